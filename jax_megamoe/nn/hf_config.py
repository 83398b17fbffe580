"""What a Hugging Face config says of its MoE blocks, for the model families known here.

Keys and their defaults are those of the families' config.json files and of transformers' config
classes, 5.24. Nothing here imports transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jax_megamoe import _checks
from jax_megamoe.config import Activation, padded_size
from jax_megamoe.routing.router import SCORINGS, Router
from jax_megamoe.weights.checkpoint.fields import Fields, read_fields

HFConfig = Mapping[str, Any]

_NUM_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_SWIGLU = Activation("swiglu")


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """The MoE block of one layer of a model.

    Attributes:
        family: of the model, such as ``"DeepSeek-V3"``.
        hidden_size: as the model has it; `MoEConfig` may need more.
        intermediate_size: of a routed expert.
        router: how experts are chosen.
        activation: of the routed experts and of the shared one.
        shared_size: intermediate size of the shared expert; 0: none.
        has_shared_gate: the shared expert's output is weighed by a sigmoid of its own.
        has_expert_biases: the routed experts' projections have biases.
        prefix: of the block's names in checkpoints, ``{}`` for the layer's index.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    router: Router
    activation: Activation = _SWIGLU
    shared_size: int = 0
    has_shared_gate: bool = False
    has_expert_biases: bool = False
    prefix: str = "model.layers.{}.mlp"

    @property
    def padded_sizes(self) -> tuple[int, int]:
        """hidden_size and intermediate_size rounded up to what `MoEConfig` takes."""
        return padded_size(self.hidden_size), padded_size(self.intermediate_size)


SCORED = "scored"
HASHED = "hashed"


@dataclass(frozen=True, kw_only=True)
class Layers:
    """What each layer of a model is.

    Attributes:
        count: layers, modules of multi-token prediction included.
        hashed: the first so many choose experts by token id.
        first_dense: the first so many are dense.
        dense: these are dense.
        frequency: dense are those whose index is no multiple of this.
        step: dense are those whose number, from 1, is no multiple of this.
        kinds: of each layer where the config lists them; empty: it does not.
    """

    count: int
    hashed: int = 0
    first_dense: int = 0
    dense: frozenset[int] = frozenset()
    frequency: int = 1
    step: int = 1
    kinds: tuple[str, ...] = ()

    def moe_kind(self, layer_index: int) -> str:
        """``"scored"`` or ``"hashed"``: experts are chosen by score or by token id.

        Raises:
            ValueError: a layer that is dense or that the model does not have.
        """
        index = _checks.integer("layer_index", layer_index)
        if index >= self.count:
            expected = f"one of the model's {self.count} layers"
            raise ValueError(_checks.message("layer_index", expected, index))
        reason = self._dense_by(index)
        if reason is not None:
            got = f"a dense one ({reason})"
            raise ValueError(_checks.message(f"layer {index}", "an MoE layer", got))
        is_hashed = self.kinds[index] == "hash_moe" if self.kinds else index < self.hashed
        return HASHED if is_hashed else SCORED

    def _dense_by(self, index: int) -> str | None:
        """The key that makes the layer dense, with its value; None for an MoE layer."""
        reasons = {
            f"first_k_dense_replace is {self.first_dense}": index < self.first_dense,
            f"moe_layer_freq is {self.frequency}": index % self.frequency,
            "mlp_only_layers has it": index in self.dense,
            f"decoder_sparse_step is {self.step}": (index + 1) % self.step,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)


def read_hf_config(hf_config: Any) -> Fields:
    """A config as a dict, that of the text model where there are several.

    Args:
        hf_config: a transformers config, a dict, or the path of a config.json or of its folder.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a JSON object, or parts of it of another kind than they should be.
        TypeError: anything else.
    """
    if isinstance(hf_config, Fields):
        return hf_config
    content = hf_config.to_dict() if hasattr(hf_config, "to_dict") else hf_config
    if isinstance(content, str | Path):
        path = Path(content)
        path = path / "config.json" if path.is_dir() else path
        if not path.exists():
            raise FileNotFoundError(_checks.message("hf_config", "a config.json", path))
        fields = read_fields(path)
    elif isinstance(content, Mapping):
        fields = Fields(content, "hf_config")
    else:
        expected = "a transformers config, a dict or the path of a config.json"
        raise TypeError(_checks.message("hf_config", expected, type(content).__name__))
    text = fields.inner("text_config")
    if text is not None and fields.text("model_type", default=None) not in _FAMILIES:
        # The quantisation may stand beside the text model.
        text.setdefault("quantization_config", fields.get("quantization_config"))
        return text
    return fields


def block_spec(hf_config: HFConfig, layer_index: int | None = None) -> BlockSpec:
    """The MoE block of one layer.

    Args:
        hf_config: as `read_hf_config` returns it.
        layer_index: the layer; None: any whose experts are chosen by score.

    Raises:
        ValueError: a model_type that is not known, a key missing or of another kind than it should
            be, a layer that is dense or that the model does not have.
        NotImplementedError: an activation that the experts do not run.
    """
    fields = read_hf_config(hf_config)
    layers = layers_of(fields)
    kind = SCORED if layer_index is None else layers.moe_kind(layer_index)
    activation = fields.text("hidden_act", default="silu")
    if activation not in ("silu", "swish"):
        expected = "'silu', which the experts run as SwiGLU"
        where = fields.where("hidden_act")
        raise NotImplementedError(_checks.message(where, expected, repr(activation)))
    try:
        return _FAMILIES[fields["model_type"]](fields, kind)
    except ValueError as error:
        if fields.origin in str(error):
            raise
        raise ValueError(_checks.message(fields.origin, "a block that runs", error)) from error


def layers_of(hf_config: HFConfig) -> Layers:
    """What each layer of the model is.

    Raises:
        ValueError: a model_type that is not known, a key missing or of another kind than it should
            be.
    """
    fields = read_hf_config(hf_config)
    model_type = fields.text("model_type", default=None)
    hint = "build a MegaMoEBlock from its parts"
    _checks.one_of(fields.where("model_type"), model_type, _FAMILIES, hint)
    # DeepSeek-V3 stores its multi-token-prediction modules as further layers.
    extra = fields.integer("num_nextn_predict_layers", "num_mtp_layers", default=0)
    count = fields.integer("num_hidden_layers", minimum=1) + extra
    if model_type != "deepseek_v4":
        return Layers(
            count=count,
            first_dense=fields.integer("first_k_dense_replace", default=0),
            frequency=fields.integer("moe_layer_freq", default=1) or 1,
            dense=frozenset(fields.integers("mlp_only_layers")),
            step=fields.integer("decoder_sparse_step", default=1) or 1,
        )
    kinds = fields.texts("mlp_layer_types")
    if not kinds:
        return Layers(count=count, hashed=fields.integer("num_hash_layers"))
    return Layers(count=len(kinds), kinds=kinds)


def _deepseek_v3(fields: Fields, kind: str, family: str) -> BlockSpec:
    del kind
    fields.one_of("scoring_func", ["sigmoid"], default="sigmoid")
    fields.one_of("topk_method", ["noaux_tc"], default="noaux_tc")
    router = Router(
        num_experts=_size(fields, *_NUM_EXPERTS),
        top_k=_size(fields, "num_experts_per_tok"),
        scoring="sigmoid",
        renormalize=fields.flag("norm_topk_prob", default=True),
        scaling_factor=fields.number("routed_scaling_factor"),
        num_groups=fields.integer("n_group", default=1) or 1,
        top_groups=fields.integer("topk_group", default=1) or 1,
        has_correction_bias=True,
    )
    inter = _size(fields, "moe_intermediate_size")
    return BlockSpec(
        family=family,
        hidden_size=_size(fields, "hidden_size"),
        intermediate_size=inter,
        router=router,
        shared_size=inter * fields.integer("n_shared_experts", default=0),
    )


def _deepseek_v4(fields: Fields, kind: str) -> BlockSpec:
    hashed = kind == HASHED
    router = Router(
        num_experts=_size(fields, *_NUM_EXPERTS),
        top_k=_size(fields, "num_experts_per_tok"),
        scoring=fields.one_of("scoring_func", SCORINGS, default="sqrtsoftplus"),
        renormalize=fields.flag("norm_topk_prob", default=True),
        scaling_factor=fields.number("routed_scaling_factor"),
        has_correction_bias=not hashed,
        table_size=_size(fields, "vocab_size") if hashed else 0,
    )
    inter = _size(fields, "moe_intermediate_size")
    return BlockSpec(
        family="DeepSeek-V4",
        hidden_size=_size(fields, "hidden_size"),
        intermediate_size=inter,
        router=router,
        activation=Activation("swiglu", clamp=_limit(fields, default=None)),
        shared_size=inter * fields.integer("n_shared_experts", default=0),
        prefix="layers.{}.ffn",
    )


def _qwen3_moe(fields: Fields, kind: str) -> BlockSpec:
    del kind
    router = Router(
        num_experts=_size(fields, *_NUM_EXPERTS),
        top_k=_size(fields, "num_experts_per_tok"),
        renormalize=fields.flag("norm_topk_prob"),
    )
    return BlockSpec(
        family="Qwen3-MoE",
        hidden_size=_size(fields, "hidden_size"),
        intermediate_size=_size(fields, "moe_intermediate_size"),
        router=router,
    )


def _qwen3_next(fields: Fields, kind: str) -> BlockSpec:
    plain = _qwen3_moe(fields, kind)
    return BlockSpec(
        family="Qwen3-Next",
        hidden_size=plain.hidden_size,
        intermediate_size=plain.intermediate_size,
        router=plain.router,
        shared_size=_size(fields, "shared_expert_intermediate_size"),
        has_shared_gate=True,
    )


def _gpt_oss(fields: Fields, kind: str) -> BlockSpec:
    del kind
    router = Router(
        num_experts=_size(fields, *_NUM_EXPERTS),
        top_k=_size(fields, "num_experts_per_tok", "experts_per_token"),
        scoring="topk_softmax",
        has_bias=True,
    )
    alpha = fields.number("swiglu_alpha", default=1.702)
    return BlockSpec(
        family="GPT-OSS",
        hidden_size=_size(fields, "hidden_size"),
        intermediate_size=_size(fields, "intermediate_size"),
        router=router,
        activation=Activation("swiglu", clamp=_limit(fields, 7.0), alpha=alpha, beta=1.0),
        has_expert_biases=True,
    )


def _limit(fields: Fields, default: float | None) -> float | None:
    """swiglu_limit, > 0: of 0 some programs make no clamp and others an output of 0."""
    limit = fields.number("swiglu_limit", default=None)
    if limit is None:
        return None if "swiglu_limit" in fields else default
    if limit <= 0:
        raise fields.wrong("swiglu_limit", "a number > 0, or null for no clamp")
    return limit


def _size(fields: Fields, *names: str) -> int:
    """A positive integer."""
    return fields.integer(*names, minimum=1)


def _family(name: str) -> Callable[[Fields, str], BlockSpec]:
    return lambda fields, kind: _deepseek_v3(fields, kind, name)


_FAMILIES: Mapping[str, Callable[[Fields, str], BlockSpec]] = MappingProxyType(
    {
        "deepseek_v3": _family("DeepSeek-V3"),
        "deepseek_v4": _deepseek_v4,
        "gpt_oss": _gpt_oss,
        "kimi_k2": _family("Kimi-K2"),
        "qwen3_moe": _qwen3_moe,
        "qwen3_next": _qwen3_next,
    }
)
"""What reads the config of a family, by model_type."""
