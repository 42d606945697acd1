#!/usr/bin/env python3
"""Measures how fast llama.cpp decodes the `gpt` presets on the CPU: the peer of `gpt bench decode`.

What: a GGUF file of the preset's Qwen3 shape with random weights is written (the head tied to the token table, byte
vocabulary padded to 320), quantised with the `gguf` package if a block type is asked for, and loaded through
llama-cpp-python's low-level interface. `--batch` sequences are decoded greedily, one token each a step.

How: a few steps untimed, then `--tokens` steps, each timed from `llama_decode` to the argmax of its logits. Speed is that
of the median step, over all sequences. Flash attention is left at llama.cpp's default for the CPU.

The last line on stdout is one JSON object: tool, preset, batch, type, threads, tokens_per_second,
milliseconds_per_step, peak_memory_bytes.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time

try:
    import gguf
    import llama_cpp
    import numpy as np
except ImportError as error:
    sys.exit(f"llama_decode.py: {error}; see scripts/peers/README.md")

from presets import PRESETS, VOCAB

TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
    "q5_0": gguf.GGMLQuantizationType.Q5_0,
    "q5_1": gguf.GGMLQuantizationType.Q5_1,
}


def write_model(path, shape, kind, context):
    """A GGUF file of random weights: matrices in `kind`, gains in f32."""
    c, f, heads = shape["hidden"], shape["ffn"], shape["heads"]
    head = c // heads
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(shape["layers"])
    writer.add_context_length(context)
    writer.add_embedding_length(c)
    writer.add_feed_forward_length(f)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("no_vocab")
    random = np.random.default_rng(0)

    def matrix(name, rows, columns):
        weights = (random.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)
        data = gguf.quants.quantize(weights, TYPES[kind])
        writer.add_tensor(name, data, raw_dtype=TYPES[kind])

    def gain(name, size):
        writer.add_tensor(name, np.ones(size, np.float32))

    matrix("token_embd.weight", VOCAB, c)
    gain("output_norm.weight", c)
    for i in range(shape["layers"]):
        gain(f"blk.{i}.attn_norm.weight", c)
        gain(f"blk.{i}.ffn_norm.weight", c)
        gain(f"blk.{i}.attn_q_norm.weight", head)
        gain(f"blk.{i}.attn_k_norm.weight", head)
        for name, rows, columns in [
            ("attn_q", c, c), ("attn_k", c, c), ("attn_v", c, c), ("attn_output", c, c),
            ("ffn_gate", f, c), ("ffn_up", f, c), ("ffn_down", c, f),
        ]:
            matrix(f"blk.{i}.{name}.weight", rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="medium")
    parser.add_argument("--type", choices=TYPES, default="f32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()

    warm_up = 5
    steps = args.tokens + warm_up
    context = (steps + 1) * args.batch
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, None)
    llama_cpp.llama_backend_init()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.gguf")
        write_model(path, PRESETS[args.preset], args.type, context)
        model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    if not model:
        sys.exit("llama_decode.py: llama.cpp could not load the model")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_seq_max = context, max(args.batch, 32), args.batch
    params.n_threads = params.n_threads_batch = args.threads
    ctx = llama_cpp.llama_init_from_model(model, params)
    if not ctx:
        sys.exit("llama_decode.py: llama.cpp could not make a context")

    batch = llama_cpp.llama_batch_init(args.batch, 0, 1)
    batch.n_tokens = args.batch
    ids = [row % 256 for row in range(args.batch)]
    times = []
    for step in range(steps):
        for row in range(args.batch):
            batch.token[row], batch.pos[row], batch.logits[row] = ids[row], step, 1
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = row
        start = time.perf_counter()
        if llama_cpp.llama_decode(ctx, batch):
            sys.exit("llama_decode.py: llama_decode failed")
        for row in range(args.batch):
            logits = llama_cpp.llama_get_logits_ith(ctx, row)
            ids[row] = int(np.ctypeslib.as_array(logits, (VOCAB,)).argmax())
        if step >= warm_up:
            times.append(time.perf_counter() - start)
    seconds = statistics.median(times)
    print(json.dumps(dict(
        tool=f"llama.cpp (llama-cpp-python {llama_cpp.__version__})", preset=args.preset, batch=args.batch,
        type=args.type, threads=args.threads, tokens_per_second=args.batch / seconds,
        milliseconds_per_step=seconds * 1e3,
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )))


if __name__ == "__main__":
    main()
