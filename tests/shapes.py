"""Named shapes: real models, and the small ones that the tests run."""

from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": dict(num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768),
    "qwen3-235b-a22b": dict(num_experts=128, top_k=8, hidden_size=4096, intermediate_size=1536),
    "deepseek-v3": dict(
        num_experts=256, top_k=8, hidden_size=7168, intermediate_size=2048, num_shared_experts=1
    ),
    "kimi-k2": dict(
        num_experts=384, top_k=8, hidden_size=7168, intermediate_size=2048, num_shared_experts=1
    ),
    # 2880 is no multiple of 128: checkpoints are padded to 2944.
    "gpt-oss-120b": dict(num_experts=128, top_k=4, hidden_size=2944, intermediate_size=2944),
}
"""Sizes of `MoEConfig` by model, from the models' published configs."""

SMALL = dict(num_experts=16, top_k=4, hidden_size=256, intermediate_size=128, max_num_tokens=64)
"""What most tests run: two 128 blocks of hidden, one of intermediate, two experts a rank of 8."""

TINY = dict(num_experts=4, top_k=2, hidden_size=128, intermediate_size=128, max_num_tokens=16)
"""Small enough for the loops of the NumPy oracle."""
