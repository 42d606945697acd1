"""Small tokenizers of each family that people use, and what transformers makes of texts with them.

    python scripts/peers/tokenizers_golden.py tests/golden/tokenizers            writes them anew
    python scripts/peers/tokenizers_golden.py --check GPT FOLDER...              holds `gpt` against AutoTokenizer

The first writes one folder a family (tokenizer.json, tokenizer_config.json, golden.json: texts and ids), trained on a text
that stands below, with the pre-tokenizers and normalizers of GPT-2, Llama 3, Qwen 2, Llama 2 and of characters. The second
loads any folder with transformers' AutoTokenizer and compares ids with `gpt tokenizer show`, text by text.
Needs: pip install tokenizers transformers
"""

import json
import pathlib
import subprocess
import sys

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

TRAINING = [
    "The quick brown fox jumps over the lazy dog. It's 42 o'clock, they've said; we'll see.\n",
    "def main(args):\n    return [x ** 2 for x in range(100)]\n\n\nprint(main(None))\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Ça va? Où êtes-vous?\n",
    "漢字かな交じり文は日本語の文です。今日はとても良い天気ですね。\n",
    "Emoji 😀 and 👩‍👩‍👧‍👦, and math: ∑ x² ≤ ½, and\ttabs\r\nand line ends.\n",
] * 20

TEXTS = [
    "", " ", "  ", "\n", "\n\n \n", "a", " a", "a ", "The quick brown fox", "THE QUICK", "it's we'll THEY'VE 'S 's",
    "x" * 300, "1 12 123 1234 12345 3.14 1,000", "a  b   c    d", "tab\t\ttab \t x", "line\nline\r\nline\n\n\nline  \n  line",
    "émoji 😀👩‍👩‍👧‍👦 漢字かな", "e\u0301 combining \u0301\u0302 marks", "nul\0byte \x7f \x1b[0m", "\u00a0\u3000\u2028 spaces \u200b",
    "punct!!! ... --- ()[]{} /\\ @#$%^&*", "don't\u2019t", "\ufeffBOM", "ａｂｃ ﬁ ½ ²", "мир Ωμέγα שלום مرحبا नमस्ते", "<0x41> \u2581 Ġ Ċ",
    "def f(x):\n\treturn x\n", "\U0010ffff\U00020000", "ends with spaces   ", "\n starts", "a\u0000b\u0000",
]

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def byte_level(pattern=None, normalizer=None):
    tokenizer = Tokenizer(models.BPE())
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return tokenizer, trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )


def sentencepiece():
    """As Llama 2: a space before the text, U+2581 for spaces, bytes for what is unknown."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    return tokenizer, trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)


FAMILIES = {
    "gpt2": lambda: byte_level(),
    "llama3": lambda: byte_level(LLAMA3),
    "qwen2": lambda: byte_level(QWEN2, normalizers.NFC()),
    "llama2": sentencepiece,
}


def write(folder):
    for name, family in FAMILIES.items():
        tokenizer, trainer = family()
        tokenizer.train_from_iterator(TRAINING, trainer)
        if name == "llama2":
            # The bytes are tokens of the model, not added ones: else their names in a text would be taken for them.
            data = json.loads(tokenizer.to_str())
            data["added_tokens"] = [t for t in data["added_tokens"] if not t["content"].startswith("<0x")]
            tokenizer = Tokenizer.from_str(json.dumps(data))
        place = pathlib.Path(folder) / name
        place.mkdir(parents=True, exist_ok=True)
        end = "</s>" if name == "llama2" else "<|endoftext|>"
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)
        fast.save_pretrained(place)
        auto = AutoTokenizer.from_pretrained(place)
        rows = [{"text": t, "ids": auto.encode(t, add_special_tokens=False)} for t in TEXTS]
        (place / "golden.json").write_text(json.dumps(rows, ensure_ascii=True, indent=0) + "\n")
        print(name, len(auto), "ids,", sum(len(r["ids"]) for r in rows), "in the texts")


def check(gpt, folders):
    wrong = 0
    for folder in folders:
        auto = AutoTokenizer.from_pretrained(folder)
        for text in (t for t in TEXTS if "\0" not in t):
            shown = subprocess.run(
                [gpt, "tokenizer", "show", folder, "--json", "--text", text], capture_output=True, check=True
            )
            ours = [id for id, _ in json.loads(shown.stdout.splitlines()[-1])["tokens"]]
            theirs = auto.encode(text, add_special_tokens=False)
            back = auto.decode(ours, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if ours != theirs or back != text and not folder.endswith(("llama2", "qwen2")):
                wrong += 1
                print(f"{folder}: {text!r}\n  gpt          {ours}\n  transformers {theirs}\n  back {back!r}")
        print(folder, len(auto), "ids:", "equal" if wrong == 0 else f"{wrong} texts differ")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    if sys.argv[1] == "--check":
        check(sys.argv[2], sys.argv[3:])
    write(sys.argv[1])
