#!/bin/sh
# How much a draft speeds a target up: the same passages with and without it, in turn, and the ratios of the pairs.
#
#   scripts/speculation.sh TARGET DRAFT TEXT [ROUNDS]
#
# Eight passages of 100 bytes from the last tenth of TEXT, which runs hold out, are continued by 400 tokens one after the other
# (--batch 1), at temperature 0 and 0.8. The text is the same either way; `gpt sample --verify` holds that.
set -eu
target=$1 draft=$2 text=$3 rounds=${4:-5}
gpt=${GPT:-target/release/gpt}
prompts=$(mktemp)
trap 'rm -f "$prompts"' EXIT
python3 - "$text" > "$prompts" <<'PY'
import json, sys
text = open(sys.argv[1], encoding="utf-8").read()
start, step = len(text) * 9 // 10, len(text) // 10 // 8 - 1
for i in range(8):
    print(json.dumps({"prompt": text[start + i * step :][:100]}))
PY
for temperature in 0 0.8; do
    for _ in $(seq "$rounds"); do
        for how in --no-draft "--draft $draft"; do
            # shellcheck disable=SC2086
            "$gpt" sample "$target" --prompts "$prompts" --batch 1 -n 400 --temperature $temperature $how --json 2> /dev/null | tail -n 1
        done
    done | python3 -c '
import json, sys
rows = [json.loads(line) for line in sys.stdin]
pairs = list(zip(rows[::2], rows[1::2]))
same = all([r["ids"] for r in a["rows"]] == [r["ids"] for r in b["rows"]] for a, b in pairs)
middle = lambda xs: sorted(xs)[len(xs) // 2]
rate = lambda row: row["tokens_per_second"]
ratios = [rate(b) / rate(a) for a, b in pairs]
plain, fast = middle([rate(a) for a, _ in pairs]), middle([rate(b) for _, b in pairs])
accepted = middle([b["acceptance_rate"] for _, b in pairs])
print(f"temperature {sys.argv[1]}: plain {plain:.0f}, with the draft {fast:.0f} tok/s, ratio {middle(ratios):.2f}"
      f" ({min(ratios):.2f} to {max(ratios):.2f}), accepted {accepted:.2f},", "the same text" if same else "OTHER TEXT")' "$temperature"
done
