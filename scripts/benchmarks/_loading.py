"""A user's process that has transformers but not peerd: loads an export, computes logits, and generates text from a prompt.

Arguments: the export's folder, a safetensors file with `tokens` [rows, columns], where to write their `logits`, the prompt, and how many
tokens to add. Prints {"class", "text"}.
"""

from __future__ import annotations

import json
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.no_grad()
def main(folder: str, tokens_file: str, logits_file: str, prompt: str, num_new_tokens: str) -> None:
    torch.set_num_threads(1)
    model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    if any(told.values()):
        sys.exit(f"not all of the model came from the export: {told}")
    logits = model(input_ids=load_file(tokens_file)["tokens"]).logits
    save_file({"logits": logits.contiguous()}, logits_file)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = tokenizer(prompt, return_tensors="pt")
    made = model.generate(**given, max_new_tokens=int(num_new_tokens), do_sample=False)
    print(json.dumps({"class": type(model).__name__, "text": tokenizer.decode(made[0, given["input_ids"].shape[1] :])}))


if __name__ == "__main__":
    main(*sys.argv[1:])
