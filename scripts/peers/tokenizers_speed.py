"""How fast a text becomes ids: `gpt data prepare` into an empty cache against Hugging Face tokenizers, in turn.

    python scripts/peers/tokenizers_speed.py target/release/gpt TEXT TOKENIZER_FOLDER [ROUNDS]

gpt reads the file, checks it, hashes it, encodes it and writes the ids to the disk; tokenizers only encodes, from memory, with
encode_batch_fast (no offsets) over pieces of about 100 kB and all threads. Both numbers of ids are printed: they must be equal
but for the one place where gpt cuts off the held-out part.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

os.environ["TOKENIZERS_PARALLELISM"] = "true"
from tokenizers import Tokenizer

gpt, path, folder = sys.argv[1:4]
text = open(path, encoding="utf-8").read()
size = len(text.encode())
parts, at = [], 0
while at < len(text):
    end = text.find("\n", at + 100_000)
    end = len(text) if end < 0 else end + 1
    parts.append(text[at:end])
    at = end


def ours():
    with tempfile.TemporaryDirectory() as cache:
        start = time.time()
        done = subprocess.run(
            [gpt, "data", "prepare", path, "--tokenizer", folder, "--json"],
            env={**os.environ, "GPT_CACHE": cache}, capture_output=True, check=True,
        )
        seconds = time.time() - start
    return json.loads(done.stdout.splitlines()[-1])[0]["tokens"], size / seconds / 1e6


def theirs():
    tokenizer = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    start, count = time.time(), 0
    for i in range(0, len(parts), 100):
        count += sum(len(e.ids) for e in tokenizer.encode_batch_fast(parts[i : i + 100], add_special_tokens=False))
    return count, size / (time.time() - start) / 1e6


rates = []
for _ in range(int(sys.argv[4]) if len(sys.argv) > 4 else 3):
    (a, fast), (b, slow) = ours(), theirs()
    rates.append(fast / slow)
    print(f"gpt {fast:.1f} MB/s ({a} ids), tokenizers {slow:.1f} MB/s ({b} ids), ratio {fast / slow:.2f}")
print(f"median ratio {sorted(rates)[len(rates) // 2]:.2f}")
