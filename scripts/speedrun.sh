#!/usr/bin/env bash
# The whole line in minutes: data, train, evaluate, sample, stop, resume, tokenizer, draft, adapter. --short does it with a few steps, for CI.
set -euo pipefail
cd "$(dirname "$0")/.."
short=no
[ "${1:-}" = --short ] && short=yes
cargo build --release
gpt=target/release/gpt
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
run=$place/run
if [ $short = yes ]; then
    steps=(--steps 40 --eval-every 20 --save-every 20 --batch 2 --data-bytes 200000 --eval-tokens 8192)
else
    steps=()
fi
# The draft of a model of its own size gains nothing: here it is only shown.
few=("${steps[@]}")
[ $short = yes ] || few=(--steps 300)

export GPT_CACHE=$place/cache
echo "== the data"
$gpt data info stories
echo "== a plan"
$gpt train --dry-run
echo "== train"
$gpt train --out "$run" "${steps[@]}" --json
echo "== evaluate, over every token of the held-out stories once"
$gpt eval "$run"
echo "== sample"
$gpt sample "$run" -n 300 --seed 1
echo "== every token of a text"
$gpt score "$run" --text "The small dog ran home." --json
echo "== go on for some steps more"
last=$(basename "$(ls -d "$run"/steps/* | tail -1)")
$gpt train --resume --out "$run" --steps $((10#$last + 20)) --json
echo "== a tokenizer of the same text"
$gpt tokenizer train --data stories --vocab 512 --out "$place/tokenizer"
$gpt tokenizer show "$place/tokenizer" --text "The small dog ran home."
echo "== a draft, distilled, and the same text with it"
$gpt distill --teacher "$run" "${few[@]}" --json
$gpt sample "$run" -n 200 --seed 1 --verify
echo "== an adapter for other text, merged"
$gpt finetune "$run" --data docs/guides --out "$place/mine" "${few[@]}" --json
$gpt merge "$place/mine" --out "$place/merged"
$gpt sample "$place/merged" -n 100 --seed 1
