"""Adapters of PEFT for the tests, and adapters of `gpt` held against PEFT.

    python scripts/peers/peft_golden.py tests/golden/peft                    writes base, adapter and golden.json anew
    python scripts/peers/peft_golden.py --check GPT ADAPTER TEXT             holds `gpt score` against transformers + PEFT

The first makes a small random Qwen3 with a random adapter on every projection and the head, and the logits of both. The
second loads an adapter that `gpt finetune` made with PeftModel, beside its base and merged into it, and compares ln p of
every token of a text with what `gpt score` says with the adapter, and on the model of `gpt merge`.
Needs: pip install torch transformers peft
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def write(folder):
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=32, tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder / "base")
    ids = torch.randint(48, (1, 11))
    logits = lambda m: m(ids).logits.flatten().tolist()
    with torch.no_grad():
        golden = {"ids": ids.flatten().tolist(), "base": logits(model)}
        lora = LoraConfig(r=3, lora_alpha=5, use_rslora=True, target_modules=ALL, task_type="CAUSAL_LM")
        adapted = get_peft_model(model, lora).eval()
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        adapted.save_pretrained(folder / "adapter")
        golden["adapted"] = logits(adapted)
        for module in adapted.modules():
            if hasattr(module, "scaling") and isinstance(module.scaling, dict):
                module.scaling = {name: scale / 2 for name, scale in module.scaling.items()}
        golden["half"] = logits(adapted)
    (folder / "golden.json").write_text(json.dumps(golden) + "\n")


def logprobs(model, ids):
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float()
    return torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def check(gpt, adapter, text):
    def score(checkpoint):
        command = [gpt, "score", checkpoint, "--text", start, "--json"]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
        tokens = json.loads(said.stdout.splitlines()[-1])["tokens"]
        return [t["id"] for t in tokens], torch.tensor([t["logprob"] for t in tokens[1:]])

    # Past the context, `gpt score` takes windows.
    start = pathlib.Path(text).read_text()[:200]
    base = json.loads((pathlib.Path(adapter) / "adapter_config.json").read_text())["base_model_name_or_path"]
    ids, ours = score(adapter)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    before = logprobs(plain, ids)
    peft = PeftModel.from_pretrained(plain, adapter).eval()
    with tempfile.TemporaryDirectory() as folder:
        merged_folder = f"{folder}/merged"
        subprocess.run([gpt, "merge", adapter, "--out", merged_folder], capture_output=True, check=True)
        _, ours_merged = score(merged_folder)
        merged = logprobs(AutoModelForCausalLM.from_pretrained(merged_folder, dtype=torch.float32).eval(), ids)
    theirs = logprobs(peft, ids)
    off = lambda a, b: (a - b).abs().max().item()
    print(f"{len(ids)} tokens; largest difference of ln p:")
    print(f"  gpt with adapter    to PEFT           {off(ours, theirs):.2e}")
    print(f"  gpt's merged model  to PEFT           {off(ours_merged, theirs):.2e}")
    print(f"  gpt's merged model  to transformers   {off(ours_merged, merged):.2e}")
    print(f"  PEFT                to the base alone {off(theirs, before):.2e}")
    if max(off(ours, theirs), off(ours_merged, theirs), off(ours_merged, merged)) > 1e-4 or off(theirs, before) < 1e-2:
        sys.exit("they differ")


if sys.argv[1] == "--check":
    check(*sys.argv[2:5])
else:
    write(pathlib.Path(sys.argv[1]))
