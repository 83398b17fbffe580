"""Small MoE layers of the model families, as configs and checkpoints: what `record_transformers.py`
runs through transformers' blocks, and `test_transformers_blocks.py` through `MegaMoEBlock`.

Values come from PCG64's raw words, whose stream NumPy keeps the same between versions, so that the
records need no weights. Needs neither torch nor JAX.
"""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

RECORDS = Path(__file__).parent / "golden" / "transformers"
TOKENS = 24

_DEEPSEEK = dict(
    hidden_size=256,
    intermediate_size=512,
    moe_intermediate_size=128,
    n_routed_experts=16,
    n_shared_experts=1,
    num_experts_per_tok=4,
    num_hidden_layers=2,
    norm_topk_prob=True,
)
_QWEN = dict(
    hidden_size=256,
    intermediate_size=512,
    moe_intermediate_size=128,
    num_experts=16,
    num_experts_per_tok=4,
    num_hidden_layers=2,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)
_V4 = dict(
    moe_intermediate_size=128,
    hidden_size=256,
    n_routed_experts=16,
    n_shared_experts=1,
    num_experts_per_tok=4,
    num_hidden_layers=2,
    num_hash_layers=1,
    norm_topk_prob=True,
    scoring_func="sqrtsoftplus",
    routed_scaling_factor=1.5,
    swiglu_limit=10.0,
    vocab_size=64,
)


@dataclass(frozen=True)
class Case:
    """One layer.

    Attributes:
        name: of the case and its record.
        family: the model family.
        block: transformers' class, after ``transformers.models``; model_type apart, which a config
            class of transformers has itself.
        hf_config: the keys of config.json that say something of the layer.
        layer_index: the layer.
        prefix: of the layer's names in the family's checkpoints.
        gain: standard deviation of gate and up for tokens of unit variance: 4 reaches the clamps.
    """

    name: str
    family: str
    block: str
    hf_config: dict[str, Any]
    layer_index: int = 1
    prefix: str = "model.layers.1.mlp"
    gain: float = 1.0


CASES = [
    Case(
        "deepseek_v3",
        "DeepSeek-V3",
        "deepseek_v3.DeepseekV3MoE",
        _DEEPSEEK
        | dict(
            model_type="deepseek_v3",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            first_k_dense_replace=1,
        ),
    ),
    Case(
        "kimi_k2",
        "Kimi-K2",
        "deepseek_v3.DeepseekV3MoE",
        _DEEPSEEK
        | dict(
            model_type="kimi_k2",
            n_group=1,
            topk_group=1,
            routed_scaling_factor=2.827,
            first_k_dense_replace=1,
        ),
    ),
    Case(
        "deepseek_v4",
        "DeepSeek-V4",
        "deepseek_v4.DeepseekV4SparseMoeBlock",
        _V4 | dict(model_type="deepseek_v4"),
        prefix="layers.1.ffn",
        gain=4.0,
    ),
    Case(
        "deepseek_v4_hashed",
        "DeepSeek-V4, layer with a table",
        "deepseek_v4.DeepseekV4SparseMoeBlock",
        _V4 | dict(model_type="deepseek_v4"),
        layer_index=0,
        prefix="layers.0.ffn",
        gain=4.0,
    ),
    Case(
        "qwen3_moe",
        "Qwen3-MoE",
        "qwen3_moe.Qwen3MoeSparseMoeBlock",
        _QWEN | dict(model_type="qwen3_moe"),
    ),
    Case(
        "qwen3_moe_plain",
        "Qwen3-MoE, not renormalised",
        "qwen3_moe.Qwen3MoeSparseMoeBlock",
        _QWEN | dict(model_type="qwen3_moe", norm_topk_prob=False),
    ),
    Case(
        "qwen3_next",
        "Qwen3-Next",
        "qwen3_next.Qwen3NextSparseMoeBlock",
        _QWEN | dict(model_type="qwen3_next", shared_expert_intermediate_size=256),
    ),
    Case(
        "gpt_oss",
        "GPT-OSS",
        "gpt_oss.GptOssMLP",
        # As in the models, neither size is a multiple of 128.
        dict(
            model_type="gpt_oss",
            hidden_size=192,
            intermediate_size=160,
            num_local_experts=16,
            num_experts_per_tok=4,
            num_hidden_layers=2,
            swiglu_limit=7.0,
        ),
        gain=4.0,
    ),
]


class Values:
    """Values of roughly normal distribution, the same with every NumPy."""

    def __init__(self, seed: str) -> None:
        self._words = np.random.PCG64(zlib.crc32(seed.encode()))

    def normal(self, *shape: int, std: float = 1.0) -> np.ndarray:
        """bfloat16, the sum of four uniform 16-bit numbers brought to this standard deviation."""
        words = self._words.random_raw(int(np.prod(shape)))
        parts = words.view(np.uint16).reshape(-1, 4).astype(np.int64).sum(axis=1) - 2 * 65535
        scale = std / (65536 * (4 / 12) ** 0.5)
        return (parts * scale).astype(ml_dtypes.bfloat16).reshape(shape)

    def integers(self, below: int, *shape: int) -> np.ndarray:
        words = self._words.random_raw(int(np.prod(shape)))
        return (words % np.uint64(below)).astype(np.int64).reshape(shape)


def inputs(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """bfloat16 x [T, H] and int64 token ids [T]."""
    values = Values(f"{case.name} inputs")
    x = values.normal(TOKENS, case.hf_config["hidden_size"])
    return x, values.integers(case.hf_config.get("vocab_size", 64), TOKENS)


def checkpoint(case: Case) -> dict[str, np.ndarray]:
    """The layer's tensors under the names of the family's checkpoints."""
    values, config = Values(f"{case.name} weights"), case.hf_config
    hidden, experts = config["hidden_size"], _num_experts(config)
    inter = config.get("moe_intermediate_size", config.get("intermediate_size"))
    tensors = {_router_name(config): values.normal(experts, hidden, std=hidden**-0.5)}
    if case.name == "gpt_oss":
        tensors |= _gpt_oss(values, experts, hidden, inter, case.gain)
    else:
        for expert in range(experts):
            tensors |= _mlp(values, case, f"experts.{expert}", inter)
    if "n_shared_experts" in config:
        tensors |= _mlp(values, case, "shared_experts", inter * config["n_shared_experts"])
    if "shared_expert_intermediate_size" in config:
        tensors |= _mlp(values, case, "shared_expert", config["shared_expert_intermediate_size"])
        tensors["shared_expert_gate.weight"] = values.normal(1, hidden, std=hidden**-0.5)
    if case.name == "deepseek_v4_hashed":
        first = values.integers(experts, config["vocab_size"], 1)
        tensors["gate.tid2eid"] = (first + 5 * np.arange(4)[None]) % experts
    elif "n_routed_experts" in config:
        is_v4 = config["model_type"] == "deepseek_v4"
        name = "gate.bias" if is_v4 else "gate.e_score_correction_bias"
        tensors[name] = values.normal(experts, std=0.2).astype(np.float32)
    return {f"{case.prefix}.{name}": array for name, array in tensors.items()}


def digest(tensors: dict[str, np.ndarray]) -> int:
    """CRC of all values, to notice another recipe than the records'."""
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(np.ascontiguousarray(tensors[name]).tobytes(), total)
    return total


def _num_experts(config: dict[str, Any]) -> int:
    keys = ("n_routed_experts", "num_experts", "num_local_experts")
    return next(config[key] for key in keys if key in config)


def _router_name(config: dict[str, Any]) -> str:
    return "router.weight" if config["model_type"] == "gpt_oss" else "gate.weight"


def _mlp(values: Values, case: Case, name: str, inter: int) -> dict[str, np.ndarray]:
    hidden = case.hf_config["hidden_size"]
    is_v4 = case.hf_config["model_type"] == "deepseek_v4"
    gate, up, down = ("w1", "w3", "w2") if is_v4 else ("gate_proj", "up_proj", "down_proj")
    return {
        f"{name}.{gate}.weight": values.normal(inter, hidden, std=case.gain * hidden**-0.5),
        f"{name}.{up}.weight": values.normal(inter, hidden, std=case.gain * hidden**-0.5),
        f"{name}.{down}.weight": values.normal(hidden, inter, std=inter**-0.5),
    }


def _gpt_oss(
    values: Values, experts: int, hidden: int, inter: int, gain: float
) -> dict[str, np.ndarray]:
    """Transposed stacks, gate and up columns in turns."""
    return {
        "router.bias": values.normal(experts, std=0.5),
        "experts.gate_up_proj": values.normal(experts, hidden, 2 * inter, std=gain * hidden**-0.5),
        "experts.gate_up_proj_bias": values.normal(experts, 2 * inter, std=0.5),
        "experts.down_proj": values.normal(experts, inter, hidden, std=inter**-0.5),
        "experts.down_proj_bias": values.normal(experts, hidden, std=0.5),
    }
