#!/usr/bin/env bash
# Type-checks the library and the binary for aarch64-apple-darwin, warnings denied, then generates the library's code
# for it, so that the Metal and Accelerate code is compiled where there is no Mac. Nothing is linked or run, and no
# kernel is compiled.
#
#   scripts/check-metal.sh       Debian 12 as root, with gcc; cached in DARWIN_CHECK_DIR (target/darwin-check)
set -euo pipefail

fail() { echo "check-metal: $*" >&2; exit 1; }
step() { local name=$1 from=$SECONDS; shift; "$@"; echo "check-metal: $name: $((SECONDS - from)) s"; }

cd "$(dirname "$0")/.."
dir=${DARWIN_CHECK_DIR:-target/darwin-check}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
usr=$dir/root/usr
packages=(rustc-web cargo-web rust-web-src)

# The toolchain is Debian's for browsers: new enough, and with the sources of std, which -Zbuild-std compiles for the
# target. It is unpacked, not installed, since it would shadow the machine's own.
unpack() {
    local debs=$dir/debs deb
    rm -rf "$debs" "$dir/root" "$dir/new"
    mkdir -p "$debs/partial" "$dir/new"
    apt-get update -qq || fail "apt-get update failed: no lists to find ${packages[*]} in"
    # Brings those of their libraries along that this machine lacks.
    apt-get install -y -qq --no-install-recommends --reinstall --download-only \
        -o APT::Sandbox::User=root -o Dir::Cache::archives="$debs" "${packages[@]}" ||
        fail "apt-get could not fetch ${packages[*]}; Debian 12 has them among its security updates"
    for deb in "$debs"/*.deb; do dpkg -x "$deb" "$dir/new"; done
    rm -rf "$debs" "$dir"/new/usr/src/rustc-*/{src,compiler} # 365 MB that std does not need
    mv "$dir/new" "$dir/root"
}

if [ ! -d "$dir/root" ]; then
    command -v apt-get >/dev/null || fail "needs apt-get: the toolchain is Debian's ${packages[*]}"
    [ "$(id -u)" = 0 ] || fail "needs root for apt-get, until $dir/root is there"
    step "toolchain" unpack
fi
command -v cc >/dev/null || fail "needs a C compiler (gcc): it links the build scripts"

# Dependencies have C that no compiler here makes for a Mac. As nothing is linked, empty objects and archives will do;
# preprocessing stays real, since build scripts ask with it which compiler they have.
cat >"$dir/cc" <<'CC'
#!/bin/sh
out='' last=''
for a in "$@"; do [ "$last" = -o ] && out=$a; last=$a; done
case " $* " in *' -E '*) exec cc -E -x c "$last" ;; esac
[ -z "$out" ] || : >"$out"
CC
cat >"$dir/ar" <<'AR'
#!/bin/sh
for a in "$@"; do case $a in *.a) printf '!<arch>\n' >"$a" ;; esac; done
AR
chmod +x "$dir/cc" "$dir/ar"
export CC_aarch64_apple_darwin=$dir/cc CXX_aarch64_apple_darwin=$dir/cc AR_aarch64_apple_darwin=$dir/ar
export SDKROOT=/nonexistent # else build scripts ask xcrun for it

libraries=$(echo "$usr"/lib/*-linux-gnu)
export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export PATH=$usr/bin:$PATH RUSTC=$usr/bin/rustc RUSTDOC=$usr/bin/rustdoc
export RUSTC_BOOTSTRAP=1 # -Z options with a stable compiler
export CARGO_TARGET_DIR=$dir/target CARGO_PROFILE_DEV_DEBUG=0
# Dependencies are built with lints capped, so this denies the warnings of this crate only.
export RUSTFLAGS="-D warnings"
unset RUSTUP_TOOLCHAIN RUSTC_WRAPPER RUSTC_WORKSPACE_WRAPPER CARGO_ENCODED_RUSTFLAGS CARGO_BUILD_RUSTFLAGS
target=(--locked -Zbuild-std=std,panic_abort --target aarch64-apple-darwin)
step "check" cargo check "${target[@]}" --lib --bins
step "code generation" cargo build "${target[@]}" --lib
