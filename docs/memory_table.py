"""The table of memory.md: `python docs/memory_table.py` prints it."""

from typing import Any

from jax_megamoe.config import MoEConfig
from jax_megamoe.formats import RECIPES
from jax_megamoe.plan import plan_mega_moe
from jax_megamoe.runtime.devices import KNOWN_DEVICES
from jax_megamoe.weights.params import parameter_shapes

MODELS = {
    "Qwen3-30B-A3B": dict(num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768),
    "Qwen3-235B-A22B": dict(num_experts=128, top_k=8, hidden_size=4096, intermediate_size=1536),
    "Qwen3-Next-80B-A3B": dict(
        num_experts=512, top_k=10, hidden_size=2048, intermediate_size=512, num_shared_experts=1
    ),
    "GPT-OSS-120B": dict(num_experts=128, top_k=4, hidden_size=3072, intermediate_size=2944),
    "DeepSeek-V3": dict(
        num_experts=256, top_k=8, hidden_size=7168, intermediate_size=2048, num_shared_experts=1
    ),
    "DeepSeek-V4-Flash": dict(
        num_experts=256, top_k=6, hidden_size=4096, intermediate_size=2048, num_shared_experts=1
    ),
    "DeepSeek-V4-Pro": dict(
        num_experts=384, top_k=6, hidden_size=7168, intermediate_size=3072, num_shared_experts=1
    ),
    "Kimi-K2": dict(
        num_experts=384, top_k=8, hidden_size=7168, intermediate_size=2048, num_shared_experts=1
    ),
}
"""Sizes by model, from the models' published configs; GPT-OSS's 2880 filled up to what
Blackwell's kernels take."""

RANKS = (1, 8, 32, 64)
TOKENS = (1024, 8192)
_MOST_SM90_RANKS, _SM90_INTER_STEP = 32, 256


def table() -> str:
    """Megabytes of one rank, in Markdown: the parameters of a layer, and the symmetric buffer."""
    lines = [
        "| model | ranks | fp8_block | mxfp4 | bf16 | Hopper 1024 | 8192 | Blackwell 1024 | 8192 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for model, sizes in MODELS.items():
        for ranks in RANKS:
            cells = [_parameters(sizes, ranks, name) for name in ("fp8_block", "mxfp4", "bf16")]
            cells += [_buffer(sizes, ranks, "fp8_block", "h200", tokens) for tokens in TOKENS]
            cells += [_buffer(sizes, ranks, "mxfp4", "b200", tokens) for tokens in TOKENS]
            lines.append(f"| {model} | {ranks} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _config(sizes: dict[str, int], form: str, max_num_tokens: int) -> MoEConfig:
    """The layer; its shared expert is fused where the format fuses one."""
    fused = sizes.get("num_shared_experts", 0) if RECIPES[form].shared_formats else 0
    fields: dict[str, Any] = {**sizes, "num_shared_experts": fused}
    return MoEConfig(**fields, max_num_tokens=max_num_tokens, weight_format=form)


def _parameters(sizes: dict[str, int], ranks: int, form: str) -> str:
    config = _config(sizes, form, 1)
    return _megabytes(parameter_shapes(config, config.experts_per_rank(ranks)).num_bytes)


def _buffer(sizes: dict[str, int], ranks: int, form: str, device: str, tokens: int) -> str:
    if form == "fp8_block":  # sizes that Hopper's kernel refuses
        if ranks > _MOST_SM90_RANKS or sizes["intermediate_size"] % _SM90_INTER_STEP:
            return "-"
    plan = plan_mega_moe(_config(sizes, form, tokens), KNOWN_DEVICES[device], 0, ranks)
    return _megabytes(plan.buffer.num_bytes)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f}"


if __name__ == "__main__":
    print(table())
