#!/usr/bin/env python3
"""Bytes and operations of each kernel for a token, and the time that some Macs should need: computed, not measured.

usage: metal_times.py PRESET WEIGHTS POSITION      decoding; WEIGHTS: f32 bf16 q8_0 q4_0
       metal_times.py PRESET train BATCHxT         a training step in f32
A kernel takes as long as the larger of its bytes at the memory's rate and its operations at the GPU's; launches are not
counted. Bandwidths are Apple's figures; the rates of operations are 2 x 32 x 4 x cores x clock, which others have measured.
"""
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# name: GB/s, f32 TFLOP/s
MACS = {"M1 Max": (400, 10.4), "M3 Max": (400, 14.1), "M4 Max": (546, 16.1)}
BYTES = {"f32": 4, "bf16": 2, "q8_0": 34 / 32, "q4_0": 18 / 32}
DECODE = {"f32": 0, "bf16": 1, "q8_0": 3, "q4_0": 5}  # operations that make a number of a weight


def kernels(model, vocab, weights, position):
    c, f, layers = model["hidden_size"], model["intermediate_size"], model["num_hidden_layers"]
    heads, kv, d = model["num_attention_heads"], model["num_key_value_heads"], model["head_dim"]
    qkv, width, page = (heads + 2 * kv) * d, heads * d, 4 if weights == "f32" else 2
    stretches = position // 256 + 1

    def product(outputs, inputs, norm=False):
        numbers = outputs * inputs
        operations = (2 + DECODE[weights]) * numbers + (3 * numbers / 4 if norm else 0)
        return numbers * BYTES[weights] + 4 * (inputs + outputs), operations

    keys = 2 * kv * d * position
    return [
        ("embed_blocks", 1, (c * BYTES[weights] + 4 * c, c)),
        ("norm_product, queries keys values", layers, product(qkv, c, True)),
        ("append", layers, (4 * (qkv + 2 * width) + 2 * page * kv * d, 20 * qkv)),
        ("attend", layers, (page * keys + 4 * (2 * width + stretches * heads * (d + 2)), 4 * position * width)),
        ("attend_join", layers, (4 * (stretches * heads * (d + 2) + width), 3 * stretches * width)),
        ("residual_product, output", layers, product(c, width)),
        ("gate_up_product", layers, product(2 * f, c, True)),
        ("residual_product, down", layers, product(c, f)),
        ("norm_product, head", 1, product(vocab, c, True)),
        ("sample", 1, (12 * vocab, 60 * vocab)),
    ]


def training(model, vocab, batch, seq):
    c, f, layers = model["hidden_size"], model["intermediate_size"], model["num_hidden_layers"]
    heads, kv, d = model["num_attention_heads"], model["num_key_value_heads"], model["head_dim"]
    qkv, width, tokens = (heads + 2 * kv) * d, heads * d, batch * seq
    matrices = qkv * c + width * c + 3 * f * c
    parameters = layers * matrices + vocab * c
    scores = (seq + 32) / 2  # of a head and query, whole tiles
    padded = next(w for w in (32, 64, 128, 256) if w >= d)
    sides = qkv + width + 2 * f + f + 3 * c
    return [
        ("embed, embed_backward", 2, (20 * c, 2 * c)),
        ("rms_norm", layers + 1, (8 * c, 4 * c)),
        ("rms_norm_add", layers, (16 * c, 5 * c)),
        ("rms_norm_backward", 2 * layers + 1, (24 * c, 12 * c)),
        ("rotary", layers, (8 * qkv, 8 * qkv)),
        ("rotary_backward", layers, (20 * qkv, 20 * qkv)),
        ("attention_forward", layers, (4 * (qkv + width), 4 * heads * padded * scores)),
        ("attention_delta", layers, (8 * width, 2 * width)),
        ("attention_backward_keys", layers, (4 * (qkv + width + 2 * kv * d), 8 * heads * padded * scores)),
        ("attention_backward_queries", layers, (4 * (qkv + 2 * width), 6 * heads * padded * scores)),
        ("swiglu", layers, (12 * f, 8 * f)),
        ("swiglu_backward", layers, (20 * f, 14 * f)),
        ("add, residual stream and its gradients", 3 * layers, (12 * c, c)),
        ("candle's products, layers", 12 * layers, (sides + 4 * 3 * matrices / tokens, matrices / 2)),
        ("candle's products, head", 3, (8 * (c + vocab), 2 * vocab * c)),
        ("cross_entropy", 1, (16 * vocab, 12 * vocab)),
        ("norm_of_pieces", 1, (4 * parameters / tokens, 3 * parameters / tokens)),
        ("adamw", 1, (28 * parameters / tokens, 14 * parameters / tokens)),
    ]


def table(preset, what, size):
    with open(ROOT / "presets" / f"{preset}.toml", "rb") as file:
        model = tomllib.load(file)["model"]
    if what == "train":
        batch, seq = map(int, size.split("x"))
        rows, title = training(model, 257, batch, seq), f"training in f32, {batch} x {seq} tokens"
    else:
        rows, title = kernels(model, 257, what, int(size)), f"decoding, weights in {what}, position {size}"
    print(f"{preset}, {title}, byte vocabulary:\n")
    print("| kernel | times | KB a token | Mflop a token | " + " | ".join(MACS) + " |\n" + "| --- " * 7 + "|")
    totals = [0.0] * 5
    for name, times, (size, operations) in rows:
        size, operations = times * size, times * operations
        spent = [max(size / (rate * 1e3), operations / (peak * 1e6)) for rate, peak in MACS.values()]
        figures = [f"{size / 1e3:.1f}", f"{operations / 1e6:.2f}"] + [f"{t:.2f} us" for t in spent]
        print(f"| {name} | {times} | " + " | ".join(figures) + " |")
        totals = [a + b for a, b in zip(totals, [size, operations, *spent])]
    figures = [f"{totals[0] / 1e3:.0f}", f"{totals[1] / 1e6:.1f}"] + [f"{t:.1f} us" for t in totals[2:]]
    print(f"| together | {sum(row[1] for row in rows)} | " + " | ".join(figures) + " |\n")


if __name__ == "__main__":
    if sys.argv[1:] in (["-h"], ["--help"]):
        sys.exit(print(__doc__))
    try:
        preset, what, size = sys.argv[1:]
        numbers = [int(n) for n in size.split("x")]
        if min(numbers) < 1 or len(numbers) != 1 + (what == "train") or what not in [*BYTES, "train"]:
            raise ValueError
        table(preset, what, size)
    except (ValueError, FileNotFoundError):
        sys.exit(__doc__)
