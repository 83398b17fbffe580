"""Runs the models of `generation_cases.py` through transformers and records what they generate.

Needs torch and transformers (``pip install '.[transformers]'``), on the CPU:
``python tests/record_generation.py``. Each prompt runs alone, in bfloat16: the record has its
logits after the prompt, and the tokens that follow one by one, each the most probable.
"""

import tempfile
from pathlib import Path

import generation_cases as cases
import numpy as np
import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    records = {}
    for name in cases.MODELS:
        with tempfile.TemporaryDirectory() as folder:
            cases.write(Path(folder), name)
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.bfloat16, attn_implementation="eager"
            ).eval()
        logits, chosen, margins = [], [], []
        with torch.no_grad():
            for prompt in cases.PROMPTS[name]:
                ids, past = torch.tensor([prompt]), None
                for step in range(cases.NEW_TOKENS):
                    output = model(ids if past is None else ids[:, -1:], past_key_values=past)
                    last, past = output.logits[0, -1].float(), output.past_key_values
                    if step == 0:
                        logits.append(last.numpy())
                    first, second = torch.topk(last, 2).values
                    margins.append(float(first - second))
                    ids = torch.cat([ids, last.argmax()[None, None]], dim=1)
                chosen.append(ids[0, len(prompt) :].numpy().astype(np.int32))
        records[f"{name}_logits"] = np.stack(logits).astype(np.float32)
        records[f"{name}_tokens"] = np.stack(chosen)
        spread = np.stack(logits).std()
        print(f"{name}: least margin {min(margins):.3f}, logits' deviation {spread:.3f}")
    np.savez_compressed(cases.RECORD, **records)


if __name__ == "__main__":
    main()
