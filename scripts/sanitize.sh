#!/usr/bin/env bash
# Runs the tests of the code that threads share without locks (src/ops/team.rs, src/ops/decode/cells.rs) under
# ThreadSanitizer and Miri. Both files need nothing but std, so a crate of the two is enough.
#
#   scripts/sanitize.sh          needs rustup's nightly toolchain with rust-src and miri; takes three minutes
set -euo pipefail

here=$(cd "$(dirname "$0")/.." && pwd)
crate=$(mktemp -d)
trap 'rm -rf "$crate"' EXIT
mkdir "$crate/src"
printf '[package]\nname = "shared"\nversion = "0.1.0"\nedition = "2024"\n' >"$crate/Cargo.toml"
cat >"$crate/src/lib.rs" <<RUST
#[path = "$here/src/ops/decode/cells.rs"]
pub mod cells;
#[path = "$here/src/ops/team.rs"]
pub mod team;
RUST
cd "$crate"
host=$(rustc -vV | sed -n 's/^host: //p')
RUSTFLAGS=-Zsanitizer=thread cargo +nightly test --lib -Zbuild-std --target "$host"
# Miri is some thousand times slower, so it takes the short tests; threads that still sleep at the end are no leak.
MIRIFLAGS=-Zmiri-ignore-leaks cargo +nightly miri test --lib -- cells a_panic two_callers
