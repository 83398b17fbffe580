"""Tiny whole models for `examples/generate.py`: configs, checkpoints and prompts.

`record_generation.py` runs them through transformers, `test_generate.py` through the example. Needs
neither torch nor JAX.
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from transformers_cases import RECORDS, Values

RECORD = RECORDS / "generation.npz"
NEW_TOKENS = 32
PROMPTS: dict[str, tuple[tuple[int, ...], ...]] = dict(
    qwen3_moe=(
        (227, 215, 93, 222, 215),
        (75,),
        (45, 164, 246, 170, 7, 12, 152, 106, 49, 174, 9, 231),
        (93, 31, 104),
    ),
    gpt_oss=(
        (54, 9, 33, 27, 150),
        (169,),
        (254, 149, 99, 61, 98, 50, 143, 246, 25, 17, 160, 107),
        (95, 237, 27),
    ),
)
"""Prompts after which no choice among the first 32 is close: the most probable token is at least
0.3 ahead of the next, several times what bfloat16 rounds logits by."""

_SIZES = dict(
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=256,
    intermediate_size=128,
    num_experts_per_tok=2,
    tie_word_embeddings=False,
)
MODELS: dict[str, dict[str, Any]] = dict(
    qwen3_moe=dict(
        **_SIZES,
        model_type="qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"],
        moe_intermediate_size=128,
        num_experts=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=1024,
        hidden_act="silu",
    ),
    gpt_oss=dict(
        **_SIZES,
        model_type="gpt_oss",
        architectures=["GptOssForCausalLM"],
        num_local_experts=8,
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        rope_scaling=dict(
            rope_type="yarn",
            factor=32.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=64,
        ),
        max_position_embeddings=2048,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        attention_bias=True,
        swiglu_limit=7.0,
        hidden_act="silu",
    ),
)
"""config.json of each model. The window is shorter than what is generated, so that it counts."""


def tensors(raw: dict[str, Any]) -> dict[str, np.ndarray]:
    """The checkpoint under the family's names."""
    values = Values(f"{raw['model_type']} generation")
    hidden, inter = raw["hidden_size"], 128
    is_gpt_oss = raw["model_type"] == "gpt_oss"
    q, kv = (raw[f"num_{kind}_heads"] * raw["head_dim"] for kind in ("attention", "key_value"))
    out: dict[str, np.ndarray] = {}

    def matrix(name: str, *shape: int, fan_in: int | None = None) -> None:
        out[name] = values.normal(*shape, std=(fan_in or shape[-1]) ** -0.5)

    def norm(name: str, size: int) -> None:
        out[name] = (1 + values.normal(size, std=0.2).astype(np.float32)).astype(ml_dtypes.bfloat16)

    matrix("model.embed_tokens.weight", raw["vocab_size"], hidden, fan_in=1)
    matrix("lm_head.weight", raw["vocab_size"], hidden, fan_in=hidden // 16)
    norm("model.norm.weight", hidden)
    for layer in range(raw["num_hidden_layers"]):
        start = f"model.layers.{layer}"
        norm(f"{start}.input_layernorm.weight", hidden)
        norm(f"{start}.post_attention_layernorm.weight", hidden)
        parts = dict(q=(q, hidden), k=(kv, hidden), v=(kv, hidden), o=(hidden, q))
        for part, shape in parts.items():
            matrix(f"{start}.self_attn.{part}_proj.weight", *shape)
            if is_gpt_oss:
                matrix(f"{start}.self_attn.{part}_proj.bias", shape[0], fan_in=16)
        if is_gpt_oss:
            matrix(f"{start}.self_attn.sinks", raw["num_attention_heads"], fan_in=1)
            _gpt_oss_experts(matrix, f"{start}.mlp", raw["num_local_experts"], hidden, inter)
            continue
        norm(f"{start}.self_attn.q_norm.weight", raw["head_dim"])
        norm(f"{start}.self_attn.k_norm.weight", raw["head_dim"])
        matrix(f"{start}.mlp.gate.weight", raw["num_experts"], hidden)
        for expert in range(raw["num_experts"]):
            name = f"{start}.mlp.experts.{expert}"
            matrix(f"{name}.gate_proj.weight", inter, hidden)
            matrix(f"{name}.up_proj.weight", inter, hidden)
            matrix(f"{name}.down_proj.weight", hidden, inter)
    return out


def _gpt_oss_experts(matrix: Any, start: str, experts: int, hidden: int, inter: int) -> None:
    matrix(f"{start}.router.weight", experts, hidden)
    matrix(f"{start}.router.bias", experts, fan_in=16)
    matrix(f"{start}.experts.gate_up_proj", experts, hidden, 2 * inter, fan_in=hidden)
    matrix(f"{start}.experts.gate_up_proj_bias", experts, 2 * inter, fan_in=16)
    matrix(f"{start}.experts.down_proj", experts, inter, hidden, fan_in=inter)
    matrix(f"{start}.experts.down_proj_bias", experts, hidden, fan_in=16)


def write(folder: Path, model: str) -> None:
    """A model's folder as Hugging Face saves it."""
    raw = MODELS[model]
    save_file(tensors(raw), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw))
