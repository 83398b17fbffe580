"""What is known of model families apart from their config's values. Plain data, without JAX."""

from typing import Literal

GateUpOrder = Literal["halves", "alternating"]
"""How gate and up rows follow each other in a tensor with both: gate rows first, or in turns."""

_HALVES = (
    "deepseek_v3",
    "deepseek_v4",
    "kimi_k2",
    "llama4",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl_moe",
)


def gate_up_order(model_type: str | None) -> GateUpOrder | None:
    """How a family stores gate and up in one tensor; None for a family that is not known here.

    Source: the split of ``gate_up_proj`` in transformers' experts, 5.24.
    """
    name = (model_type or "").removesuffix("_text")
    if name == "gpt_oss":
        return "alternating"
    return "halves" if name in _HALVES else None
