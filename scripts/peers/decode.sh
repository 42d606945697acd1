#!/usr/bin/env bash
# Decodes the same shapes with `gpt` and with llama.cpp or PyTorch, in turn, and prints the medians and the ratios.
#
#   scripts/peers/decode.sh [ROUNDS [SHAPE...]]       SHAPE = "PRESET BATCH TYPE TOKENS"
#
# By default 5 rounds of medium, one row, in f32, bf16, q8_0 and q4_0. Environment: GPT (the binary, target/release/gpt),
# PEER (llama, torch, or torch-compiled; llama), PYTHON (one with llama_cpp and gguf, or torch; python3), THREADS (passed to
# both; unset: all cores).
# The machine should do nothing else meanwhile: see README.md.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
gpt=${GPT:-$here/../../target/release/gpt}
python=${PYTHON:-python3}
rounds=${1:-5}
[ $# -eq 0 ] || shift
[ $# -gt 0 ] || set -- "medium 1 f32 200" "medium 1 bf16 200" "medium 1 q8_0 200" "medium 1 q4_0 200"

die() { echo "decode.sh: $*" >&2; exit 1; }
[[ $rounds =~ ^[1-9][0-9]*$ ]] || die "ROUNDS must be a positive number, not '$rounds'"
command -v "$gpt" >/dev/null || die "no gpt binary at $gpt: run 'cargo build --release' or set GPT"
case ${PEER:-llama} in
    llama) peer=("$here/llama_decode.py") name=llama.cpp needs="llama_cpp, gguf" ;;
    torch) peer=("$here/torch_decode.py") name=PyTorch needs=torch ;;
    torch-compiled) peer=("$here/torch_decode.py" --compile) name="compiled PyTorch" needs=torch ;;
    *) die "PEER is llama, torch or torch-compiled, not '$PEER'" ;;
esac
"$python" -c "import $needs" 2>/dev/null ||
    die "$python cannot import $needs: set PYTHON to one that can (scripts/peers/README.md says how to install it)"

speed() { sed -n 's/.*"tokens_per_second": *\([0-9.]*\).*/\1/p' | tail -n 1; }
middle() { sort -g | sed -n "$(((rounds + 1) / 2))p"; }

results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
threads=(${THREADS:+--threads "$THREADS"})
for shape in "$@"; do
    read -r preset batch type tokens rest <<<"$shape"
    [ -n "$tokens" ] && [ -z "$rest" ] || die "a shape is 'PRESET BATCH TYPE TOKENS', not '$shape'"
    work=(--preset "$preset" --batch "$batch" --type "$type" ${threads[@]+"${threads[@]}"})
    rm -f "$results"/*
    for _ in $(seq "$rounds"); do
        ours=$("$gpt" bench decode "${work[@]}" --steps "$tokens" --context 1024 --json | speed)
        theirs=$("$python" "${peer[@]}" "${work[@]}" --tokens "$tokens" | speed)
        [ -n "$ours" ] && [ -n "$theirs" ] || die "no figure for $shape"
        echo "$ours" >>"$results/gpt"
        echo "$theirs" >>"$results/peer"
        awk "BEGIN { print $ours / $theirs }" >>"$results/ratio"
    done
    printf '%-24s gpt %8.0f tok/s   %s %8.0f tok/s   ratio %.2f (median of %d pairs)\n' "$preset x$batch $type" \
        "$(middle <"$results/gpt")" "$name" "$(middle <"$results/peer")" "$(middle <"$results/ratio")" "$rounds"
done
