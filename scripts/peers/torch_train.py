#!/usr/bin/env python3
"""Measures how fast PyTorch trains the `gpt` presets on the CPU: the peer of `gpt bench train`.

What: one optimizer step after another on the model a preset names, written as an efficient PyTorch user would: a
Qwen3-style decoder (RMSNorm, rotary positions, query/key norm, grouped-query attention through
`scaled_dot_product_attention`, SwiGLU, tied embeddings, no biases, 257 byte ids padded to 320), cross-entropy at every
position, gradients clipped to norm 1, fused AdamW. With `--rank` only adapters of PEFT are trained. `--dtype bf16` runs the forward under autocast; weights, gradients
and moments stay f32. `--compile` sends the model through `torch.compile`.

How: `--warmup` steps untimed, then `--steps` steps, each timed from drawing its windows to the end of the optimizer's
update (operations on the CPU are synchronous). The loss is read once, after the last step. Speed is that of the median
step. Memory is the largest resident size of the whole process. A good part of it is the PyTorch library, so
`import_memory_bytes`, the same figure right after the imports, stands beside it.

The last line on stdout is one JSON object: tool, preset, batch, context, dtype, compiled, threads, tokens_per_second,
milliseconds_per_step, peak_memory_bytes, import_memory_bytes, train_loss (nats a token), parameters, torch_version.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import time

try:
    import torch
    import torch.nn.functional as F
    from torch import nn
except (ImportError, OSError, ValueError) as error:  # a missing CUDA library raises the latter two
    sys.exit(f"torch_train.py: no usable torch in {sys.executable} ({error}); see scripts/peers/README.md")

from presets import PRESETS, VOCAB


class RMSNorm(nn.Module):
    """Written out: on the CPU `F.rms_norm` is no faster in f32, and slower where autocast mixes bf16 and f32."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def rotate(x, cos, sin):
    """Rotary positions, half-split as in Hugging Face: x (B, T, H, D), cos and sin (T, 1, D)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, hidden, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, hidden // heads
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.q_norm, self.k_norm = RMSNorm(self.head_dim), RMSNorm(self.head_dim)

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        H, K = self.heads, self.kv_heads
        q, k, v = self.qkv(x).view(B, T, H + 2 * K, self.head_dim).split((H, K, K), dim=2)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=K < H)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, hidden, ffn):
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, hidden, heads, kv_heads, ffn):
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(hidden), Attention(hidden, heads, kv_heads)
        self.mlp_norm, self.mlp = RMSNorm(hidden), MLP(hidden, ffn)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Ids and targets (B, T) to the mean loss in nats a token."""

    def __init__(self, context, layers, hidden, heads, ffn, kv_heads=None):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, kv_heads or heads, ffn) for _ in range(layers))
        self.norm = RMSNorm(hidden)
        head_dim = hidden // heads
        frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(context), frequencies).repeat(1, 2)[:, None, :]
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids, targets):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.embed.weight)  # tied
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Transformers(nn.Module):
    """The same with transformers' Qwen3, the model that PEFT's users have."""

    def __init__(self, context, layers, hidden, heads, ffn, kv_heads=None):
        super().__init__()
        from transformers import Qwen3Config, Qwen3ForCausalLM

        self.model = Qwen3ForCausalLM(Qwen3Config(
            vocab_size=VOCAB, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads or heads, head_dim=hidden // heads,
            max_position_embeddings=context, tie_word_embeddings=True, use_cache=False,
        ))

    def forward(self, ids, targets):
        logits = self.model(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--batch", type=positive, default=12, help="windows a step")
    parser.add_argument("--context", type=positive, default=64, help="tokens a window")
    parser.add_argument("--kv-heads", type=positive, help="default: as many as query heads")
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--rank", type=positive, help="train PEFT's LoRA of this rank beside frozen weights")
    parser.add_argument("--transformers", action="store_true", help="take transformers' Qwen3 instead of the decoder here")
    parser.add_argument("--compile", action="store_true", help="torch.compile; needs a C++ compiler, takes a minute")
    parser.add_argument("--threads", type=positive, help="default: PyTorch's own choice")
    parser.add_argument("--warmup", type=positive, default=5, help="untimed steps first")
    parser.add_argument("--steps", type=positive, default=20, help="timed steps")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", metavar="FILE", help="bytes to draw windows from; default: random bytes")
    args = parser.parse_args()
    heads = PRESETS[args.preset]["heads"]
    if args.kv_heads and heads % args.kv_heads:
        parser.error(f"--kv-heads must divide the {heads} heads of {args.preset}")
    return args


def load_bytes(path, context):
    if path is None:
        return torch.randint(0, 256, (max(1 << 20, context + 1),), dtype=torch.uint8)
    try:
        size = os.path.getsize(path)
    except OSError as error:
        sys.exit(f"torch_train.py: {error}")
    if size <= context:
        sys.exit(f"torch_train.py: {path} has {size} bytes, a window takes {context + 1}")
    return torch.from_file(path, size=size, dtype=torch.uint8)


def peak_memory_bytes():
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main():
    args = parse_args()
    import_memory = peak_memory_bytes()
    torch.manual_seed(args.seed)
    if args.threads:
        torch.set_num_threads(args.threads)
    data = load_bytes(args.data, args.context)
    decoder = (Transformers if args.transformers else Decoder)(args.context, kv_heads=args.kv_heads, **PRESETS[args.preset])
    if args.rank:
        from peft import LoraConfig, inject_adapter_in_model

        # The fused projections are one linear layer each here: fewer and wider products than transformers' own.
        targets = ["qkv", "out", "gate_up", "down"]
        if args.transformers:
            targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        lora = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=targets)
        decoder = inject_adapter_in_model(lora, decoder)
        for name, parameter in decoder.named_parameters():
            parameter.requires_grad = "lora_" in name
    parameters = [p for p in decoder.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.99), fused=True)
    model = torch.compile(decoder) if args.compile else decoder
    window = torch.arange(args.context + 1)

    def step():
        starts = torch.randint(0, len(data) - args.context, (args.batch, 1))
        tokens = data[starts + window].long()
        with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bf16"):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    for _ in range(args.warmup):
        step()
    seconds = []
    for _ in range(args.steps):
        start = time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)

    print(json.dumps({
        "tool": "torch",
        "preset": args.preset,
        "batch": args.batch,
        "context": args.context,
        "dtype": args.dtype,
        "compiled": args.compile,
        "threads": torch.get_num_threads(),
        "tokens_per_second": round(args.batch * args.context / median, 1),
        "milliseconds_per_step": round(median * 1e3, 3),
        "peak_memory_bytes": peak_memory_bytes(),
        "import_memory_bytes": import_memory,
        "train_loss": round(loss.item(), 4),
        "parameters": sum(p.numel() for p in parameters),
        "torch_version": torch.__version__,
    }))


if __name__ == "__main__":
    main()
