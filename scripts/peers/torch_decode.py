#!/usr/bin/env python3
"""Measures how fast PyTorch decodes the `gpt` presets on the CPU: the peer of `gpt bench decode`.

What: the decoder of `torch_train.py` with random weights and a cache of keys and values that is made once; every step
takes one token of each of `--batch` rows, attends over what is stored, and takes the likeliest next token. `--dtype bf16`
keeps weights and cache in bf16. `--compile` sends the step through `torch.compile` (the position is a tensor, so that
nothing is compiled again while the text grows).

How: a few steps untimed, then `--tokens` steps, each timed to the argmax of its logits. Speed is that of the median step,
over all rows.

The last line on stdout is one JSON object: tool, preset, batch, type, compiled, threads, tokens_per_second,
milliseconds_per_step, peak_memory_bytes.
"""

import argparse
import json
import statistics
import sys
import time

try:
    import torch
    import torch.nn.functional as F
except (ImportError, OSError, ValueError) as error:
    sys.exit(f"torch_decode.py: no usable torch in {sys.executable} ({error}); see scripts/peers/README.md")

from presets import PRESETS
from torch_train import Decoder, peak_memory_bytes, positive, rotate


class Step(torch.nn.Module):
    """Ids (B, 1) at a position to the next ids (B, 1)."""

    def __init__(self, decoder, batch, context, dtype):
        super().__init__()
        self.decoder = decoder
        attention = decoder.blocks[0].attention
        shape = (batch, attention.kv_heads, context, attention.head_dim)
        self.cache = [(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in decoder.blocks]
        self.register_buffer("positions", torch.arange(context))

    def forward(self, ids, position):
        model = self.decoder
        x = model.embed(ids)
        cos, sin = (t.index_select(0, position).to(x.dtype) for t in (model.cos, model.sin))
        seen = (self.positions <= position)[None, None, None, :]
        for block, (keys, values) in zip(model.blocks, self.cache):
            a, h = block.attention, block.attention_norm(x)
            B, H, K = h.shape[0], a.heads, a.kv_heads
            q, k, v = a.qkv(h).view(B, 1, H + 2 * K, a.head_dim).split((H, K, K), dim=2)
            q, k = rotate(a.q_norm(q), cos, sin), rotate(a.k_norm(k), cos, sin)
            keys.index_copy_(2, position, k.transpose(1, 2))
            values.index_copy_(2, position, v.transpose(1, 2))
            y = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=seen, enable_gqa=K < H)
            x = x + a.out(y.transpose(1, 2).reshape(B, 1, -1))
            x = x + block.mlp(block.mlp_norm(x))
        return F.linear(model.norm(x), model.embed.weight).argmax(-1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="medium")
    parser.add_argument("--batch", type=positive, default=1, help="rows")
    parser.add_argument("--type", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--tokens", type=positive, default=200, help="timed steps")
    parser.add_argument("--compile", action="store_true", help="torch.compile; needs a C++ compiler, takes a minute")
    parser.add_argument("--threads", type=positive, help="default: PyTorch's own choice")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.threads:
        torch.set_num_threads(args.threads)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[args.type]
    warmup = 5
    context = args.tokens + warmup + 1
    model = Step(Decoder(context, **PRESETS[args.preset]).to(dtype), args.batch, context, dtype).eval()
    step = torch.compile(model) if args.compile else model
    ids, seconds = torch.arange(args.batch)[:, None] % 256, []
    with torch.inference_mode():
        for position in range(warmup + args.tokens):
            at = torch.tensor([position])
            start = time.perf_counter()
            ids = step(ids, at)
            seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[warmup:])
    print(
        json.dumps(
            {
                "tool": "pytorch",
                "preset": args.preset,
                "batch": args.batch,
                "type": args.type,
                "compiled": args.compile,
                "threads": torch.get_num_threads(),
                "tokens_per_second": args.batch / median,
                "milliseconds_per_step": median * 1e3,
                "peak_memory_bytes": peak_memory_bytes(),
            }
        )
    )


if __name__ == "__main__":
    main()
