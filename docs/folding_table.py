"""The table of "Biases in columns" in usage.md: `python docs/folding_table.py` prints it."""

from typing import Any

from jax_megamoe import Activation, FoldingCost, MoEConfig, folding_cost
from jax_megamoe.runtime.devices import KNOWN_DEVICES

GPT_OSS = Activation("swiglu", clamp=7.0, alpha=1.702, beta=1.0)
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "GPT-OSS-120B": (2880, dict(num_experts=128, top_k=4, intermediate_size=2944)),
    "GPT-OSS-20B": (2880, dict(num_experts=32, top_k=4, intermediate_size=2944)),
    "Qwen3-30B-A3B, had it biases": (2048, dict(num_experts=128, top_k=8, intermediate_size=768)),
}
"""Hidden size of the model, and its config; 2880 is filled up to 2944, a multiple of 128."""

FORMATS = ("mxfp4", "mxfp8", "bf16")


def cost(model: str, form: str) -> FoldingCost:
    """On eight B200."""
    hidden, sizes = MODELS[model]
    filled_up = -(-hidden // 128) * 128
    fields = sizes | dict(hidden_size=filled_up, max_num_tokens=1024, weight_format=form)
    config = MoEConfig(**fields, activation=GPT_OSS)
    return folding_cost(config, KNOWN_DEVICES["b200"], 8, hidden_size=hidden)


def table() -> str:
    """A layer of each model with and without folded biases, in Markdown."""
    lines = [
        "| model | format | kernel's sizes, without and with | parameters in MB | operations of a "
        "token in millions | gathered over ranks, MB |",
        "|---|---|---|---|---|---:|",
    ]
    for model in MODELS:
        for form in FORMATS:
            found = cost(model, form)
            sizes = " → ".join(
                f"{config.hidden_size} x {config.intermediate_size}"
                for config in (found.plain, found.folded)
            )
            size = _both(found.plain_bytes, found.folded_bytes)
            operations = _both(found.plain_operations, found.folded_operations)
            gathered = f"{found.gathered_bytes / 1e6:.2f}"
            cells = [model, f"`{form}`", sizes, size, operations, gathered]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _both(plain: int, folded: int) -> str:
    return f"{plain / 1e6:.1f} → {folded / 1e6:.1f} (+{folded / plain - 1:.2%})"


if __name__ == "__main__":
    print(table())
