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
_QWEN_SHARED = _QWEN | dict(shared_expert_intermediate_size=256)
_MIXTRAL = dict(
    hidden_size=256,
    intermediate_size=128,
    num_local_experts=16,
    num_experts_per_tok=4,
    num_hidden_layers=2,
)
_QWEN_TEXT = dict(
    hidden_size=256,
    moe_intermediate_size=128,
    num_experts=16,
    num_experts_per_tok=4,
    num_hidden_layers=2,
)
_W123 = ("w1", "w3", "w2")
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
        prefix: of the layer's names in the family's checkpoints, as for the next ones.
        router: name of the router's weight.
        correction: name of the correction bias; empty: none.
        projections: gate, up and down of an expert.
        shared: name of the shared expert and its intermediate size; empty: none.
        stacks: the routed experts in two tensors, [E, 2I, H] ("stacked") or [E, H, 2I]
            ("transposed"), gate before up; empty: an expert's own.
        gain: standard deviation of gate and up for tokens of unit variance: 4 reaches the clamps.
    """

    name: str
    family: str
    block: str
    hf_config: dict[str, Any]
    layer_index: int = 1
    prefix: str = "model.layers.1.mlp"
    router: str = "gate.weight"
    correction: str = ""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: tuple[str, int] = ("", 0)
    stacks: str = ""
    gain: float = 1.0


_LIKE_DEEPSEEK_V3: dict[str, Any] = dict(
    correction="gate.e_score_correction_bias", shared=("shared_experts", 128)
)
_LIKE_DEEPSEEK_V4: dict[str, Any] = dict(
    projections=_W123, shared=("shared_experts", 128), gain=4.0
)

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
        **_LIKE_DEEPSEEK_V3,
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
        **_LIKE_DEEPSEEK_V3,
    ),
    Case(
        "deepseek_v4",
        "DeepSeek-V4",
        "deepseek_v4.DeepseekV4SparseMoeBlock",
        _V4 | dict(model_type="deepseek_v4"),
        prefix="layers.1.ffn",
        correction="gate.bias",
        **_LIKE_DEEPSEEK_V4,
    ),
    Case(
        "deepseek_v4_hashed",
        "DeepSeek-V4, layer with a table",
        "deepseek_v4.DeepseekV4SparseMoeBlock",
        _V4 | dict(model_type="deepseek_v4"),
        layer_index=0,
        prefix="layers.0.ffn",
        **_LIKE_DEEPSEEK_V4,
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
        _QWEN_SHARED | dict(model_type="qwen3_next"),
        shared=("shared_expert", 256),
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
        router="router.weight",
        gain=4.0,
    ),
    Case(
        "deepseek_v32",
        "DeepSeek-V3.2",
        "deepseek_v32.DeepseekV32MoE",
        _DEEPSEEK
        | dict(
            model_type="deepseek_v32",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            first_k_dense_replace=1,
        ),
        **_LIKE_DEEPSEEK_V3,
    ),
    Case(
        "glm4_moe",
        "GLM-4.5",
        "glm4_moe.Glm4MoeMoE",
        _DEEPSEEK
        | dict(
            model_type="glm4_moe",
            n_group=1,
            topk_group=1,
            routed_scaling_factor=2.5,
            first_k_dense_replace=1,
        ),
        **_LIKE_DEEPSEEK_V3,
    ),
    Case(
        "dots1",
        "dots.llm1",
        "dots1.Dots1MoE",
        _DEEPSEEK
        | dict(
            model_type="dots1",
            n_shared_experts=2,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=2.5,
            first_k_dense_replace=1,
            scoring_func="noaux_tc",
        ),
        correction="gate.e_score_correction_bias",
        shared=("shared_experts", 256),
    ),
    Case(
        "ernie4_5_moe",
        "ERNIE 4.5",
        "ernie4_5_moe.Ernie4_5_MoeSparseMoeBlock",
        dict(
            model_type="ernie4_5_moe",
            hidden_size=256,
            intermediate_size=512,
            moe_intermediate_size=128,
            moe_num_experts=16,
            moe_num_shared_experts=2,
            moe_k=4,
            moe_layer_start_index=1,
            num_hidden_layers=2,
        ),
        correction="moe_statics.e_score_correction_bias",
        shared=("shared_experts", 256),
    ),
    Case(
        "hunyuan_v1_moe",
        "Hunyuan",
        "hunyuan_v1_moe.HunYuanMoEV1Moe",
        dict(
            model_type="hunyuan_v1_moe",
            hidden_size=256,
            intermediate_size=128,
            num_experts=16,
            moe_topk=[4, 4],
            num_hidden_layers=2,
        ),
        router="gate.wg.weight",
        shared=("shared_mlp", 128),
    ),
    Case(
        "llama4",
        "Llama 4",
        "llama4.Llama4TextMoe",
        dict(
            model_type="llama4_text",
            hidden_size=256,
            intermediate_size=128,
            intermediate_size_mlp=512,
            num_local_experts=16,
            num_experts_per_tok=1,
            num_hidden_layers=2,
            interleave_moe_layer_step=2,
        ),
        prefix="language_model.model.layers.1.feed_forward",
        router="router.weight",
        shared=("shared_expert", 128),
        stacks="transposed",
    ),
    Case(
        "minimax_m2",
        "MiniMax-M2",
        "minimax_m2.MiniMaxM2SparseMoeBlock",
        _MIXTRAL | dict(model_type="minimax_m2"),
        prefix="model.layers.1.block_sparse_moe",
        correction="e_score_correction_bias",
        projections=_W123,
    ),
    Case(
        "mixtral",
        "Mixtral",
        "mixtral.MixtralSparseMoeBlock",
        _MIXTRAL | dict(model_type="mixtral"),
        prefix="model.layers.1.block_sparse_moe",
        projections=_W123,
    ),
    Case(
        "olmoe",
        "OLMoE",
        "olmoe.OlmoeSparseMoeBlock",
        dict(
            model_type="olmoe",
            hidden_size=256,
            intermediate_size=128,
            num_experts=16,
            num_experts_per_tok=4,
            num_hidden_layers=2,
            norm_topk_prob=False,
        ),
    ),
    Case(
        "qwen2_moe",
        "Qwen2-MoE",
        "qwen2_moe.Qwen2MoeSparseMoeBlock",
        _QWEN_SHARED | dict(model_type="qwen2_moe", norm_topk_prob=False),
        shared=("shared_expert", 256),
    ),
    Case(
        "qwen3_5_moe",
        "Qwen3.5-MoE",
        "qwen3_5_moe.Qwen3_5MoeSparseMoeBlock",
        _QWEN_TEXT | dict(model_type="qwen3_5_moe_text", shared_expert_intermediate_size=256),
        prefix="model.language_model.layers.1.mlp",
        shared=("shared_expert", 256),
        stacks="stacked",
    ),
    Case(
        "qwen3_vl_moe",
        "Qwen3-VL-MoE",
        "qwen3_vl_moe.Qwen3VLMoeTextSparseMoeBlock",
        _QWEN_TEXT | dict(model_type="qwen3_vl_moe_text"),
        prefix="model.language_model.layers.1.mlp",
        stacks="transposed",
    ),
    Case(
        "qwen4_exp",
        "Qwen4-Exp",
        "qwen4_exp.Qwen4ExpTextSparseMoeBlock",
        _QWEN_TEXT | dict(model_type="qwen4_exp_text", shared_expert_intermediate_size=256),
        prefix="model.language_model.layers.1.mlp",
        shared=("shared_expert", 256),
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
    hidden, experts = config["hidden_size"], num_experts(case)
    inter = config.get("moe_intermediate_size", config.get("intermediate_size"))
    tensors = {case.router: values.normal(experts, hidden, std=hidden**-0.5)}
    if case.name == "gpt_oss":
        tensors |= _gpt_oss(values, experts, hidden, inter, case.gain)
    else:
        each = [_mlp(values, case, f"experts.{expert}", inter) for expert in range(experts)]
        tensors |= (
            _stacks(case, each) if case.stacks else {k: v for one in each for k, v in one.items()}
        )
    shared, size = case.shared
    if shared:
        tensors |= _mlp(values, case, shared, size)
    if "shared_expert_intermediate_size" in config:
        tensors["shared_expert_gate.weight"] = values.normal(1, hidden, std=hidden**-0.5)
    if case.name == "deepseek_v4_hashed":
        first = values.integers(experts, config["vocab_size"], 1)
        tensors["gate.tid2eid"] = (first + 5 * np.arange(4)[None]) % experts
    if case.correction:
        shape = (1, experts) if case.correction.startswith("moe_statics.") else (experts,)
        std = 0.02 if case.name == "ernie4_5_moe" else 0.2
        tensors[case.correction] = values.normal(*shape, std=std).astype(np.float32)
    return {f"{case.prefix}.{name}": array for name, array in tensors.items()}


def num_experts(case: Case) -> int:
    """Routed experts of the case's layer."""
    keys = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
    return next(case.hf_config[key] for key in keys if key in case.hf_config)


def digest(tensors: dict[str, np.ndarray]) -> int:
    """CRC of all values, to notice another recipe than the records'."""
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(np.ascontiguousarray(tensors[name]).tobytes(), total)
    return total


def _mlp(values: Values, case: Case, name: str, inter: int) -> dict[str, np.ndarray]:
    hidden = case.hf_config["hidden_size"]
    gate, up, down = case.projections
    return {
        f"{name}.{gate}.weight": values.normal(inter, hidden, std=case.gain * hidden**-0.5),
        f"{name}.{up}.weight": values.normal(inter, hidden, std=case.gain * hidden**-0.5),
        f"{name}.{down}.weight": values.normal(hidden, inter, std=inter**-0.5),
    }


def _stacks(case: Case, each: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The experts' matrices in two tensors."""
    gate, up, down = (np.stack(part) for part in zip(*(one.values() for one in each), strict=True))
    both = np.concatenate([gate, up], axis=1)
    if case.stacks == "transposed":
        both, down = both.swapaxes(1, 2).copy(), down.swapaxes(1, 2).copy()
    return {"experts.gate_up_proj": both, "experts.down_proj": down}


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
