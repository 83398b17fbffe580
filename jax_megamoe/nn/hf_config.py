"""What a Hugging Face config says of its MoE blocks, for the model families known here.

Keys and their defaults are those of the families' config.json files and of transformers' config
classes, 5.24. Nothing here imports transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_megamoe import _checks
from jax_megamoe.config import Activation, padded_size
from jax_megamoe.routing.router import Router
from jax_megamoe.weights.checkpoint.families import FAMILIES, Family, family_of
from jax_megamoe.weights.checkpoint.fields import Fields, read_fields

HFConfig = Mapping[str, Any]

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
    """What each layer of a model is, by its config.

    Attributes:
        count: layers, modules of multi-token prediction included.
        hashed: the first so many choose experts by token id.
        first: a key and its value: the first so many are dense.
        last: moe_layer_end_index: those after it are dense; None: none is.
        frequency: moe_layer_freq: layers with another index than a multiple of this are dense.
        step: a key and its value: dense are those whose number, from 1, is no multiple of this.
        dense: mlp_only_layers: these are dense.
        sparse: moe_layers: all but these are dense; None: the config has no such list.
        kinds: mlp_layer_types, of the first layers; empty: the config has no such list.
    """

    count: int
    hashed: int = 0
    first: tuple[str, int] = ("first_k_dense_replace", 0)
    last: int | None = None
    frequency: int = 1
    step: tuple[str, int] = ("decoder_sparse_step", 1)
    dense: frozenset[int] = frozenset()
    sparse: frozenset[int] | None = None
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
        kind = self.kinds[index] if index < len(self.kinds) else ""
        reason = "mlp_layer_types says dense" if kind == "dense" else self._dense_by(index)
        if reason is not None:
            got = f"a dense one ({reason})"
            raise ValueError(_checks.message(f"layer {index}", "an MoE layer", got))
        return HASHED if kind == "hash_moe" or index < self.hashed else SCORED

    def _dense_by(self, index: int) -> str | None:
        """The key that makes the layer dense, with its value; None for an MoE layer."""
        reasons = {
            f"{self.first[0]} is {self.first[1]}": index < self.first[1],
            f"moe_layer_end_index is {self.last}": self.last is not None and index > self.last,
            f"moe_layer_freq is {self.frequency}": index % self.frequency,
            "mlp_only_layers has it": index in self.dense,
            "moe_layers has it not": self.sparse is not None and index not in self.sparse,
            f"{self.step[0]} is {self.step[1]}": (index + 1) % self.step[1],
        }
        return next((reason for reason, holds in reasons.items() if holds), None)


def read_hf_config(hf_config: Any) -> Fields:
    """A config as a dict; of several, the text model's.

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
    if text is None:
        return fields
    # These may stand beside the text model.
    for name in ("model_type", "quantization_config"):
        text.setdefault(name, fields.get(name))
    return text


def block_spec(hf_config: HFConfig, layer_index: int | None = None) -> BlockSpec:
    """The MoE block of one layer.

    Args:
        hf_config: as `read_hf_config` returns it.
        layer_index: the layer; None: any that chooses its experts by score.

    Raises:
        ValueError: a model_type that is not known, a key missing or of another kind than it should
            be, a layer that is dense or that the model does not have.
        NotImplementedError: an activation that the experts do not run, biases of linear layers.
    """
    fields = read_hf_config(hf_config)
    layers = layers_of(fields)
    is_hashed = layer_index is not None and layers.moe_kind(layer_index) == HASHED
    activation = fields.text("hidden_act", "hidden_activation", default="silu")
    if activation not in ("silu", "swish"):
        expected = "'silu', which the experts run as SwiGLU"
        where = fields.where("hidden_act")
        raise NotImplementedError(_checks.message(where, expected, repr(activation)))
    for name in ("use_bias", "mlp_bias"):
        if fields.flag(name, default=False):
            expected = "false: an MoE block without biases of its linear layers"
            raise NotImplementedError(_checks.message(fields.where(name), expected, "true"))
    try:
        return _block_spec(fields, _family(fields), layer_index, is_hashed)
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
    _family(fields)
    # DeepSeek-V3 stores its multi-token-prediction modules as further layers.
    extra = fields.integer("num_nextn_predict_layers", "num_mtp_layers", default=0)
    own = fields.integer("num_hidden_layers", minimum=1)
    kinds = fields.texts("mlp_layer_types")
    known = ("dense", "sparse", "moe", "hash_moe")
    for kind in kinds:
        if kind not in known:
            raise fields.wrong("mlp_layer_types", f"a list of {list(known)}", kind)
    if kinds and len(kinds) < own:
        raise fields.wrong("mlp_layer_types", f"one of each of the {own} layers")
    last = fields.integer("moe_layer_end_index", default=-1, minimum=-1)
    listed = fields.get("moe_layers") is not None
    step = ("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step")
    return Layers(
        count=own + extra,
        hashed=0 if kinds else fields.integer("num_hash_layers", default=0),
        first=_keyed(fields, "first_k_dense_replace", "moe_layer_start_index", default=0),
        last=None if last < 0 else last,
        frequency=fields.integer("moe_layer_freq", default=1) or 1,
        step=("moe_layers", 1) if listed else _keyed(fields, *step, default=1),
        dense=frozenset(fields.integers("mlp_only_layers")),
        sparse=frozenset(fields.integers("moe_layers")) if listed else None,
        kinds=kinds,
    )


def _family(fields: Fields) -> Family:
    model_type = fields.text("model_type", default=None)
    family = family_of(model_type)
    if family is None:
        expected = f"one of {sorted(FAMILIES)}"
        hint = "build a MegaMoEBlock from its parts"
        where = fields.where("model_type")
        raise ValueError(_checks.message(where, expected, repr(model_type), hint))
    return family


def _keyed(fields: Fields, *names: str, default: int) -> tuple[str, int]:
    """The first of the keys that is there, and its value; at least `default`."""
    name = next((name for name in names if fields.get(name) is not None), names[0])
    return name, max(fields.integer(name, default=default), default)


def _block_spec(
    fields: Fields, family: Family, layer_index: int | None, is_hashed: bool
) -> BlockSpec:
    def size(*names: str, minimum: int = 1, **default: int) -> int:
        return fields.of_layer(layer_index, *names, minimum=minimum, **default)

    inter = size(*family.intermediate_size)
    count_key, count = family.shared_experts
    if count_key:
        count = size(count_key, minimum=0, default=count)
    unit = size(family.shared_unit) if count and family.shared_unit else inter
    router = Router(
        num_experts=size("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
        top_k=size("num_experts_per_tok", "experts_per_token", "moe_k", "moe_topk"),
        scoring=_scoring(fields, family),
        renormalize=_renormalizes(fields, family),
        scaling_factor=fields.number("routed_scaling_factor") if family.has_scaling else 1.0,
        num_groups=fields.integer("n_group", default=1) or 1 if family.has_groups else 1,
        top_groups=fields.integer("topk_group", default=1) or 1 if family.has_groups else 1,
        has_bias=family.has_bias,
        has_correction_bias=family.has_correction_bias and not is_hashed,
        table_size=size("vocab_size") if is_hashed else 0,
        weighs_input=family.weighs_input,
    )
    alpha = fields.number("swiglu_alpha", default=family.alpha)
    clamp = _limit(fields, family.clamp)
    return BlockSpec(
        family=family.name,
        hidden_size=size("hidden_size"),
        intermediate_size=inter,
        router=router,
        activation=Activation("swiglu", clamp=clamp, alpha=alpha, beta=family.beta),
        shared_size=count * unit,
        has_shared_gate=family.has_shared_gate,
        has_expert_biases=family.has_expert_biases,
        prefix=family.prefix,
    )


def _scoring(fields: Fields, family: Family) -> str:
    if family.has_correction_bias:
        fields.one_of("topk_method", ["noaux_tc"], default="noaux_tc")
    first, other = family.scorings[0], family.other_scoring_func
    known = [*family.scorings, *([other] if other else [])]
    scoring = fields.one_of("scoring_func", known, default=first)
    return first if scoring == other else scoring


def _renormalizes(fields: Fields, family: Family) -> bool:
    if not family.always_renormalizes:
        default = {} if family.renormalize is None else dict(default=family.renormalize)
        return fields.flag("norm_topk_prob", **default)
    if not fields.flag("norm_topk_prob", default=True):
        raise fields.wrong("norm_topk_prob", f"true, as in every model of {family.name}")
    return True


def _limit(fields: Fields, default: float | None) -> float | None:
    """swiglu_limit, > 0: of 0 some programs make no clamp and others an output of 0."""
    limit = fields.number("swiglu_limit", default=None)
    if limit is None:
        return None if "swiglu_limit" in fields else default
    if limit <= 0:
        raise fields.wrong("swiglu_limit", "a number > 0, or null for no clamp")
    return limit
