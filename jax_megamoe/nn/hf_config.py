"""What a Hugging Face config says of its MoE blocks, for the model families known here.

Keys and their defaults are those of the families' config.json files and of transformers' config
classes, 5.24. Nothing here imports transformers.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jax_megamoe import _checks
from jax_megamoe.config import Activation, padded_size
from jax_megamoe.routing.router import Router

HFConfig = Mapping[str, Any]

_NUM_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_REQUIRED = object()
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


@dataclass(frozen=True)
class Layers:
    """What each layer of a model is.

    Attributes:
        kinds: ``"scored"`` or ``"hashed"`` for an MoE layer that chooses experts by score or by
            token id; anything else says why a layer is dense.
    """

    kinds: tuple[str, ...]

    def moe_kind(self, layer_index: int) -> str:
        """``"scored"`` or ``"hashed"``.

        Raises:
            ValueError: a layer that is dense or that the model does not have.
        """
        index = _checks.integer("layer_index", layer_index)
        if index >= len(self.kinds):
            expected = f"one of the model's {len(self.kinds)} layers"
            raise ValueError(_checks.message("layer_index", expected, index))
        kind = self.kinds[index]
        if kind not in (SCORED, HASHED):
            got = f"a dense one ({kind})"
            raise ValueError(_checks.message(f"layer {index}", "an MoE layer", got))
        return kind


def read_hf_config(hf_config: Any) -> dict[str, Any]:
    """A config as a dict, that of the text model where there are several.

    Args:
        hf_config: a transformers config, a dict, or the path of a config.json or of its folder.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not JSON.
        TypeError: anything else.
    """
    content = hf_config.to_dict() if hasattr(hf_config, "to_dict") else hf_config
    if isinstance(content, str | Path):
        path = Path(content)
        path = path / "config.json" if path.is_dir() else path
        if not path.exists():
            raise FileNotFoundError(_checks.message("hf_config", "a config.json", path))
        try:
            content = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(_checks.message(str(path), "JSON", error)) from error
    if not isinstance(content, Mapping):
        expected = "a transformers config, a dict or the path of a config.json"
        raise TypeError(_checks.message("hf_config", expected, type(content).__name__))
    text = content.get("text_config")
    if isinstance(text, Mapping) and content.get("model_type") not in _FAMILIES:
        # The quantisation may stand beside the text model.
        return {"quantization_config": content.get("quantization_config"), **text}
    return dict(content)


def block_spec(hf_config: HFConfig, layer_index: int | None = None) -> BlockSpec:
    """The MoE block of one layer.

    Args:
        hf_config: as `read_hf_config` returns it.
        layer_index: the layer; None: any whose experts are chosen by score.

    Raises:
        ValueError: a model_type that is not known, a key missing, a layer that is dense or that
            the model does not have.
        NotImplementedError: an activation that the experts do not run.
    """
    layers = layers_of(hf_config)
    kind = SCORED if layer_index is None else layers.moe_kind(layer_index)
    activation = _get(hf_config, "hidden_act", default="silu")
    if activation not in ("silu", "swish"):
        expected = "'silu', which the experts run as SwiGLU"
        raise NotImplementedError(_checks.message("hidden_act", expected, repr(activation)))
    return _FAMILIES[hf_config["model_type"]](hf_config, kind)


def layers_of(hf_config: HFConfig) -> Layers:
    """What each layer of the model is.

    Raises:
        ValueError: a model_type that is not known, a key missing.
    """
    hint = "build a MegaMoEBlock from its parts"
    _checks.one_of("model_type", hf_config.get("model_type"), _FAMILIES, hint)
    # DeepSeek-V3 stores its multi-token-prediction modules as further layers.
    extra = _get(hf_config, "num_nextn_predict_layers", "num_mtp_layers", default=0) or 0
    count = _size(hf_config, "num_hidden_layers") + extra
    if hf_config["model_type"] != "deepseek_v4":
        return Layers(tuple(_dense_by(hf_config, index) or SCORED for index in range(count)))
    kinds = _get(hf_config, "mlp_layer_types", default=None)
    if kinds is None:
        hashed = _get(hf_config, "num_hash_layers")
        kinds = ["hash_moe"] * hashed + ["moe"] * (count - hashed)
    return Layers(tuple(HASHED if kind == "hash_moe" else SCORED for kind in kinds))


def _dense_by(hf_config: HFConfig, index: int) -> str | None:
    """The key that makes the layer dense, with its value; None for an MoE layer."""
    first = _get(hf_config, "first_k_dense_replace", default=0) or 0
    if index < first:
        return f"first_k_dense_replace is {first}"
    frequency = _get(hf_config, "moe_layer_freq", default=1) or 1
    if index % frequency:
        return f"moe_layer_freq is {frequency}"
    only = _get(hf_config, "mlp_only_layers", default=()) or ()
    if index in only:
        return f"mlp_only_layers is {list(only)}"
    step = _get(hf_config, "decoder_sparse_step", default=1) or 1
    if (index + 1) % step:
        return f"decoder_sparse_step is {step}"
    return None


def _deepseek_v3(hf_config: HFConfig, kind: str, family: str) -> BlockSpec:
    del kind
    scoring = _get(hf_config, "scoring_func", default="sigmoid")
    _checks.one_of("scoring_func", scoring, ["sigmoid"])
    _checks.one_of("topk_method", _get(hf_config, "topk_method", default="noaux_tc"), ["noaux_tc"])
    router = Router(
        num_experts=_size(hf_config, *_NUM_EXPERTS),
        top_k=_size(hf_config, "num_experts_per_tok"),
        scoring="sigmoid",
        renormalize=bool(_get(hf_config, "norm_topk_prob", default=True)),
        scaling_factor=float(_get(hf_config, "routed_scaling_factor")),
        num_groups=_get(hf_config, "n_group", default=1) or 1,
        top_groups=_get(hf_config, "topk_group", default=1) or 1,
        has_correction_bias=True,
    )
    inter = _size(hf_config, "moe_intermediate_size")
    return BlockSpec(
        family=family,
        hidden_size=_size(hf_config, "hidden_size"),
        intermediate_size=inter,
        router=router,
        shared_size=inter * (_get(hf_config, "n_shared_experts", default=0) or 0),
    )


def _deepseek_v4(hf_config: HFConfig, kind: str) -> BlockSpec:
    hashed = kind == HASHED
    router = Router(
        num_experts=_size(hf_config, *_NUM_EXPERTS),
        top_k=_size(hf_config, "num_experts_per_tok"),
        scoring=_get(hf_config, "scoring_func", default="sqrtsoftplus"),
        renormalize=bool(_get(hf_config, "norm_topk_prob", default=True)),
        scaling_factor=float(_get(hf_config, "routed_scaling_factor")),
        has_correction_bias=not hashed,
        table_size=_size(hf_config, "vocab_size") if hashed else 0,
    )
    inter = _size(hf_config, "moe_intermediate_size")
    return BlockSpec(
        family="DeepSeek-V4",
        hidden_size=_size(hf_config, "hidden_size"),
        intermediate_size=inter,
        router=router,
        activation=Activation("swiglu", clamp=_limit(hf_config, default=None)),
        shared_size=inter * (_get(hf_config, "n_shared_experts", default=0) or 0),
        prefix="layers.{}.ffn",
    )


def _qwen3_moe(hf_config: HFConfig, kind: str) -> BlockSpec:
    del kind
    router = Router(
        num_experts=_size(hf_config, *_NUM_EXPERTS),
        top_k=_size(hf_config, "num_experts_per_tok"),
        renormalize=bool(_get(hf_config, "norm_topk_prob")),
    )
    return BlockSpec(
        family="Qwen3-MoE",
        hidden_size=_size(hf_config, "hidden_size"),
        intermediate_size=_size(hf_config, "moe_intermediate_size"),
        router=router,
    )


def _qwen3_next(hf_config: HFConfig, kind: str) -> BlockSpec:
    plain = _qwen3_moe(hf_config, kind)
    return BlockSpec(
        family="Qwen3-Next",
        hidden_size=plain.hidden_size,
        intermediate_size=plain.intermediate_size,
        router=plain.router,
        shared_size=_size(hf_config, "shared_expert_intermediate_size"),
        has_shared_gate=True,
    )


def _gpt_oss(hf_config: HFConfig, kind: str) -> BlockSpec:
    del kind
    router = Router(
        num_experts=_size(hf_config, *_NUM_EXPERTS),
        top_k=_size(hf_config, "num_experts_per_tok", "experts_per_token"),
        scoring="topk_softmax",
        has_bias=True,
    )
    alpha = float(_get(hf_config, "swiglu_alpha", default=1.702))
    return BlockSpec(
        family="GPT-OSS",
        hidden_size=_size(hf_config, "hidden_size"),
        intermediate_size=_size(hf_config, "intermediate_size"),
        router=router,
        activation=Activation("swiglu", clamp=_limit(hf_config, 7.0), alpha=alpha, beta=1.0),
        has_expert_biases=True,
    )


def _limit(hf_config: HFConfig, default: float | None) -> float | None:
    """swiglu_limit, > 0: of 0 some programs make no clamp and others an output of 0."""
    limit = _get(hf_config, "swiglu_limit", default=default)
    if limit is None:
        return None
    limit = _checks.finite("swiglu_limit", limit)
    if limit <= 0:
        expected = "a number > 0, or null for no clamp"
        raise ValueError(_checks.message("swiglu_limit", expected, limit))
    return limit


def _get(hf_config: HFConfig, *names: str, default: Any = _REQUIRED) -> Any:
    """The value of the first of the keys that is there.

    Raises:
        ValueError: none is, and there is no default.
    """
    for name in names:
        if name in hf_config:
            return hf_config[name]
    if default is _REQUIRED:
        model = hf_config.get("model_type")
        raise ValueError(_checks.message(f"hf_config of {model}", f"the key {names[0]}", "none"))
    return default


def _size(hf_config: HFConfig, *names: str) -> int:
    """`_get` for a positive integer."""
    return _checks.integer(names[0], _get(hf_config, *names), minimum=1)


def _family(name: str) -> Callable[[HFConfig, str], BlockSpec]:
    return lambda hf_config, kind: _deepseek_v3(hf_config, kind, name)


_FAMILIES: Mapping[str, Callable[[HFConfig, str], BlockSpec]] = MappingProxyType(
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
