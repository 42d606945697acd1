#!/usr/bin/env bash
# Trains the same shapes with `gpt` and with PyTorch, in turn, and prints the medians and the ratios.
#
#   scripts/peers/train.sh [ROUNDS [SHAPE...]]       SHAPE = "PRESET BATCH CONTEXT DTYPE STEPS"
#
# By default 5 rounds of tiny 12x64 and medium 8x256 in f32. STEPS are PyTorch's timed steps; `gpt bench` picks its own.
# Environment: GPT (the binary, target/release/gpt), PYTHON (one with torch, python3), THREADS (passed to both; unset:
# each one's default), RANK (trains adapters of that rank; PyTorch's are PEFT's), TORCH_FLAGS (more flags for torch_train.py, such as --compile or --data FILE).
# The machine should do nothing else meanwhile: see README.md.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
gpt=${GPT:-$here/../../target/release/gpt}
python=${PYTHON:-python3}
rounds=${1:-5}
[ $# -eq 0 ] || shift
[ $# -gt 0 ] || set -- "tiny 12 64 f32 100" "medium 8 256 f32 10"

die() { echo "train.sh: $*" >&2; exit 1; }
[[ $rounds =~ ^[1-9][0-9]*$ ]] || die "ROUNDS must be a positive number, not '$rounds'"
command -v "$gpt" >/dev/null || die "no gpt binary at $gpt: run 'cargo build --release' or set GPT"
command -v "$python" >/dev/null || die "no python at $python: set PYTHON"
"$python" -c 'import torch' 2>/dev/null ||
    die "$python cannot import torch: set PYTHON to one that can (scripts/peers/README.md says how to install it)"

# Runs a command and adds the last line of its stdout, a JSON object, to a file.
measure() {
    local file=$1 line
    shift
    line=$("$@" | tail -n 1) || die "failed: $*"
    [[ $line == "{"*"}" ]] || die "no JSON on the last line of: $*"
    echo "$line" >>"$file"
}

results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
threads=(${THREADS:+--threads "$THREADS"})
[ ! -r /proc/loadavg ] || echo "load average at the start: $(cut -d' ' -f1 /proc/loadavg)"

for shape in "$@"; do
    read -r preset batch context dtype steps rest <<<"$shape"
    [ -n "$steps" ] && [ -z "$rest" ] || die "a shape is 'PRESET BATCH CONTEXT DTYPE STEPS', not '$shape'"
    work=(--preset "$preset" --batch "$batch" --context "$context" --dtype "$dtype" ${threads[@]+"${threads[@]}"}
        ${RANK:+--rank "$RANK"})
    rm -f "$results"/*
    for _ in $(seq "$rounds"); do
        measure "$results/gpt" "$gpt" bench train "${work[@]}" --json
        # TORCH_FLAGS is split into words on purpose.
        measure "$results/torch" "$python" "$here/torch_train.py" "${work[@]}" --steps "$steps" ${TORCH_FLAGS:-}
    done
    "$python" - "$shape" "$rounds" "$results/gpt" "$results/torch" <<'PY'
import json, statistics, sys

shape, rounds, *files = sys.argv[1:]
preset, batch, context, dtype, _ = shape.split()
runs = [[json.loads(line) for line in open(file)] for file in files]
def median(rows, value):
    return statistics.median(map(value, rows))
speeds = [[r["tokens_per_second"] for r in rows] for rows in runs]
speed = [statistics.median(s) for s in speeds]
spread = [f"{min(s):,.0f}-{max(s):,.0f}" for s in speeds]
memory = [median(rows, lambda r: r["peak_memory_bytes"]) / 2**20 for rows in runs]
above = median(runs[1], lambda r: r["peak_memory_bytes"] - r["import_memory_bytes"]) / 2**20
torch = runs[1][0]
name = f"torch {torch['torch_version']}{' compiled' if torch['compiled'] else ''}, {torch['threads']} threads"
print(f"\n{preset} {batch}x{context} {dtype}, medians of {rounds} rounds")
for who, s, range_, m in zip(("gpt", name), speed, spread, memory):
    print(f"  {who:34} {s:10,.0f} tok/s ({range_}) {m:8,.0f} MiB peak")
print(f"  gpt/torch: tok/s {speed[0] / speed[1]:.2f}, peak memory {memory[0] / memory[1]:.2f}"
      f" ({memory[0] / above:.2f} of torch's {above:,.0f} MiB above its imports)")
PY
done
