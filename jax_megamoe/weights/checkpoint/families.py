"""The model families with MoE blocks that are known here: one row each. Plain data, without JAX.

Source: transformers 5.24, its configuration and modeling files and the names its conversion of
checkpoints has; each row is compared with its block there (tests/record_transformers.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

GateUpOrder = Literal["halves", "alternating"]
"""How gate and up rows follow each other in a tensor with both: gate rows first, or in turns."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a family's config.json leaves unsaid, and under which keys it says the rest.

    Attributes:
        name: of the models.
        prefix: of a block's names in its checkpoints, ``{}`` for the layer's index.
        gate_up_order: of gate and up in one tensor.
        intermediate_size: keys of a routed expert's intermediate size, the first that is there.
        shared_experts: key of the number of shared experts, and the number without that key.
        shared_unit: key of the intermediate size of one shared expert; empty: a routed expert's.
        has_shared_gate: a sigmoid gate weighs the shared expert's output.
        scorings: what scoring_func may say, in `Router`'s words; without that key, the first.
        other_scoring_func: another word of its configs for the first; empty: none.
        renormalize: the value of norm_topk_prob without that key; None: the key is required.
        always_renormalizes: True whatever the config says; one that says otherwise is refused.
        has_scaling: routed_scaling_factor is a key.
        has_groups: n_group and topk_group are.
        has_bias: the router's logits have a bias.
        has_correction_bias: experts are chosen by scores with a bias.
        has_expert_biases: the experts' projections have biases.
        weighs_input: a routed expert's weight multiplies its input.
        clamp: swiglu_limit without that key.
        alpha: swiglu_alpha without that key.
        beta: what is added to up.
    """

    name: str
    prefix: str = "model.layers.{}.mlp"
    gate_up_order: GateUpOrder = "halves"
    intermediate_size: tuple[str, ...] = ("moe_intermediate_size",)
    shared_experts: tuple[str, int] = ("", 0)
    shared_unit: str = ""
    has_shared_gate: bool = False
    scorings: tuple[str, ...] = ("softmax",)
    other_scoring_func: str = ""
    renormalize: bool | None = None
    always_renormalizes: bool = False
    has_scaling: bool = False
    has_groups: bool = False
    has_bias: bool = False
    has_correction_bias: bool = False
    has_expert_biases: bool = False
    weighs_input: bool = False
    clamp: float | None = None
    alpha: float = 1.0
    beta: float = 0.0


_DEEPSEEK_V3 = Family(
    name="DeepSeek-V3",
    shared_experts=("n_shared_experts", 0),
    scorings=("sigmoid",),
    renormalize=True,
    has_scaling=True,
    has_groups=True,
    has_correction_bias=True,
)
_QWEN3_MOE = Family(name="Qwen3-MoE")
_QWEN3_NEXT = replace(
    _QWEN3_MOE,
    name="Qwen3-Next",
    shared_experts=("", 1),
    shared_unit="shared_expert_intermediate_size",
    has_shared_gate=True,
)
_MIXTRAL = Family(
    name="Mixtral",
    prefix="model.layers.{}.block_sparse_moe",
    intermediate_size=("intermediate_size",),
    always_renormalizes=True,
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "deepseek_v3": _DEEPSEEK_V3,
        "deepseek_v32": replace(_DEEPSEEK_V3, name="DeepSeek-V3.2"),
        "deepseek_v4": replace(
            _DEEPSEEK_V3,
            name="DeepSeek-V4",
            prefix="layers.{}.ffn",
            scorings=("sqrtsoftplus", "sigmoid", "softmax"),
            has_groups=False,
        ),
        # Its configs call the scoring by the method that chooses experts.
        "dots1": replace(
            _DEEPSEEK_V3,
            name="dots.llm1",
            other_scoring_func="noaux_tc",
            renormalize=False,
        ),
        "ernie4_5_moe": Family(
            name="ERNIE 4.5",
            shared_experts=("moe_num_shared_experts", 0),
            always_renormalizes=True,
            has_correction_bias=True,
        ),
        "glm4_moe": replace(_DEEPSEEK_V3, name="GLM-4.5"),
        "gpt_oss": Family(
            name="GPT-OSS",
            gate_up_order="alternating",
            intermediate_size=("intermediate_size",),
            scorings=("topk_softmax",),
            renormalize=False,
            has_bias=True,
            has_expert_biases=True,
            clamp=7.0,
            alpha=1.702,
            beta=1.0,
        ),
        "hunyuan_v1_moe": Family(
            name="Hunyuan",
            intermediate_size=("moe_intermediate_size", "intermediate_size"),
            shared_experts=("num_shared_expert", 1),
            shared_unit="intermediate_size",
            always_renormalizes=True,
        ),
        "kimi_k2": replace(_DEEPSEEK_V3, name="Kimi-K2"),
        "llama4": Family(
            name="Llama 4",
            prefix="language_model.model.layers.{}.feed_forward",
            intermediate_size=("intermediate_size",),
            shared_experts=("", 1),
            scorings=("sigmoid",),
            renormalize=False,
            weighs_input=True,
        ),
        "minimax_m2": replace(
            _MIXTRAL, name="MiniMax-M2", scorings=("sigmoid",), has_correction_bias=True
        ),
        "mixtral": _MIXTRAL,
        "olmoe": Family(name="OLMoE", intermediate_size=("intermediate_size",), renormalize=False),
        "qwen2_moe": replace(_QWEN3_NEXT, name="Qwen2-MoE", renormalize=False),
        "qwen3_5_moe": replace(
            _QWEN3_NEXT,
            name="Qwen3.5-MoE",
            prefix="model.language_model.layers.{}.mlp",
            always_renormalizes=True,
        ),
        "qwen3_moe": _QWEN3_MOE,
        "qwen3_next": _QWEN3_NEXT,
        "qwen3_vl_moe": replace(
            _QWEN3_MOE,
            name="Qwen3-VL-MoE",
            prefix="model.language_model.layers.{}.mlp",
            always_renormalizes=True,
        ),
        "qwen4_exp": replace(
            _QWEN3_NEXT,
            name="Qwen4-Exp",
            prefix="model.language_model.layers.{}.mlp",
            renormalize=True,
        ),
    }
)
"""Families by model_type, ``_text`` at its end left out."""


def family_of(model_type: str | None) -> Family | None:
    """The row of a model_type, also of a text model's config; None: not known."""
    return FAMILIES.get((model_type or "").removesuffix("_text"))


def gate_up_order(model_type: str | None) -> GateUpOrder | None:
    """How a family stores gate and up in one tensor; None for a family that is not known."""
    family = family_of(model_type)
    return None if family is None else family.gate_up_order
