"""Which format a checkpoint's experts run in, from its quantization_config and the names in it."""

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import jax

from jax_megamoe import _checks
from jax_megamoe.formats import WEIGHT_FORMATS, WeightFormat, as_weight_format
from jax_megamoe.mesh import default_device
from jax_megamoe.weights.checkpoint.dialects import MAX_EXPERTS, Dialect
from jax_megamoe.weights.checkpoint.families import GateUpOrder, gate_up_order
from jax_megamoe.weights.checkpoint.fields import Fields, read_fields
from jax_megamoe.weights.checkpoint.patterns import matches
from jax_megamoe.weights.checkpoint.projection import FLOATS
from jax_megamoe.weights.checkpoint.tensors import Tensor

Scheme = Literal["bf16", "mxfp4", "mxfp8", "nvfp4", "fp8_block", "fp8"]
"""How a checkpoint stores experts: a format, or ``fp8`` under scales of another grid."""

_RUN = "bf16, mxfp8, mxfp4, nvfp4 or FP8 in 128x128 blocks"

_EXCLUSIONS = ("modules_to_not_convert", "ignored_layers", "exclude_modules", "ignore")

_MODELOPT: Mapping[str, Scheme] = MappingProxyType(
    {
        "NVFP4": "nvfp4",
        "MXFP8": "mxfp8",
        "W4A8_MXFP4_FP8": "mxfp4",
        "FP8_PB_WO": "fp8_block",
        "FP8_BLOCK_SCALES": "fp8_block",
        "FP8": "fp8",
    }
)
_COMPRESSED: Mapping[str, Scheme] = MappingProxyType(
    {
        "nvfp4-pack-quantized": "nvfp4",
        "mxfp4-pack-quantized": "mxfp4",
        "mxfp8-quantized": "mxfp8",
        "dense": "bf16",
    }
)


def select_format(
    quantization_config: Mapping[str, Any] | None,
    device: jax.Device | None = None,
    forced: str | WeightFormat | None = None,
    *,
    prefix: str = "",
    modules: Collection[str] = (),
) -> WeightFormat:
    """The format that a checkpoint's experts run in on `device`.

    A forced one wins; else as stored. FP8 in blocks of 128x128 stays so on SM90 (Hopper) and is
    requantised to mxfp8 elsewhere, with a warning.

    Args:
        quantization_config: the checkpoint's, or its whole config.json or hf_quant_config.json;
            None: not quantised.
        device: where the experts run; None: the default device.
        forced: a format or its name.
        prefix: of the layer's experts, as the checkpoint has it; a layer that the config excludes
            is bf16.
        modules: see `stored_scheme`.

    Raises:
        NotImplementedError: experts stored in anything else; the message names it.
        ValueError: an unknown name in `forced`, a field of the config that is of another kind than
            it should be, a pattern that is malformed.
    """
    if forced is not None:
        return as_weight_format(forced, "forced")
    return format_of(stored_scheme(quantization_config, prefix, modules), device, prefix)


def format_of(scheme: Scheme, device: jax.Device | None = None, prefix: str = "") -> WeightFormat:
    """The format that experts stored so run in on `device`, see `select_format`.

    Args:
        scheme: how they are stored.
        device: where they run; None: the default device.
        prefix: of the experts, for the warning.

    Raises:
        NotImplementedError: FP8 under scales of another grid than 128x128.
    """
    if scheme == "fp8":
        raise _not_run("quantization_config", "FP8 under scales of another grid than 128x128")
    if scheme == "fp8_block":
        target = default_device() if device is None else device
        capability = str(getattr(target, "compute_capability", ""))
        on_hopper = capability.startswith("9.")
        scheme = runs_as(scheme, on_hopper=on_hopper)
        if not on_hopper:
            name = f"{target.platform} {capability}".strip()
            warnings.warn(
                f"{prefix or 'experts'}: FP8 weights in 128x128 blocks are requantised to mxfp8 on "
                f"this device ({name}); only SM90 GPUs run fp8_block",
                stacklevel=3,
            )
    return WEIGHT_FORMATS[scheme]


def runs_as(scheme: Scheme, *, on_hopper: bool) -> Scheme:
    """How experts stored so are stored where they run: only Hopper multiplies FP8 in blocks of
    128x128."""
    return "mxfp8" if scheme == "fp8_block" and not on_hopper else scheme


def layer_scheme(
    quantization_config: Mapping[str, Any] | None,
    prefix: str,
    names: Iterable[str],
    tensor: Callable[[str], Tensor],
) -> Scheme:
    """How a layer's experts are stored, by the config, the names and the dtypes found.

    Experts with a weight in floating point are bf16, whatever the config says: nothing excluded is
    quantised because a config names modules otherwise than the checkpoint does.

    Args:
        quantization_config: see `select_format`.
        prefix: of the experts' names in the checkpoint.
        names: of tensors in the checkpoint; those outside the prefix are passed over.
        tensor: the tensor of a name, of which the dtype alone is asked.

    Raises:
        ValueError: as `select_format`, and a name under the prefix that no dialect has.
        NotImplementedError: as `stored_scheme`.
    """
    dialect = Dialect(prefix, MAX_EXPERTS, shared=False)
    roles = ((name, dialect.role(name)) for name in names)
    weights = [name for name, role in roles if role is not None and role.kind == "weight"]
    scheme = stored_scheme(quantization_config, prefix, dialect.modules(weights))
    is_float = scheme != "bf16" and any(str(tensor(name).dtype) in FLOATS for name in weights)
    return "bf16" if is_float else scheme


def read_quantization_config(checkpoint: str | Path) -> dict[str, Any] | None:
    """What a checkpoint says of its quantisation; None if it says nothing.

    Taken from config.json, else from hf_quant_config.json, in the folder (or the file's folder).

    Raises:
        ValueError: one of them is not a JSON object, or a field of it is of another kind than it
            should be.
    """
    for name in ("config.json", "hf_quant_config.json"):
        fields = _read_beside(checkpoint, name)
        found = None if fields is None else quantization_of(fields)
        if found:
            return found
    return None


def read_gate_up_order(checkpoint: str | Path) -> GateUpOrder | None:
    """How the model stores gate and up in one tensor, by the config.json in the folder (or the
    file's folder); None if that does not say.

    Raises:
        ValueError: as `read_quantization_config`.
    """
    fields = _read_beside(checkpoint, "config.json")
    if fields is None:
        return None
    order = gate_up_order(fields.text("model_type", default=None))
    text = fields.inner("text_config")
    if order is not None or text is None:
        return order
    return gate_up_order(text.text("model_type", default=None))


def _read_beside(checkpoint: str | Path, name: str) -> Fields | None:
    path = Path(checkpoint)
    file = (path if path.is_dir() else path.parent) / name
    return read_fields(file) if file.exists() else None


def stored_scheme(
    quantization_config: Mapping[str, Any] | None,
    prefix: str = "",
    modules: Collection[str] = (),
) -> Scheme:
    """How the experts under `prefix` are stored, by the checkpoint's own word.

    Exclusions and maps of formats by layer name modules as the checkpoint does. A pattern concerns
    these experts if it stands for any of their modules or for one around them. Regular expressions
    and names with ``*`` are tried on the prefix and on the modules of one expert.

    Args:
        quantization_config: see `select_format`.
        prefix: of the experts' names in the checkpoint; empty: of no layer in particular, so that
            exclusions do not matter.
        modules: of these experts, by the names found in the checkpoint, see `Dialect.modules`;
            empty: not known, taken to be one expert's.

    Raises:
        NotImplementedError: a scheme that does not run (packed int4, INT8, AWQ, ...); named.
        ValueError: as `select_format`.
    """
    config = quantization_of(_as_fields(quantization_config or {}))
    named = _Named(prefix, modules)
    if not config or any(named.by(each) for key in _EXCLUSIONS for each in config.texts(key)):
        return "bf16"
    method = config.text("quant_method", default="").lower()
    if "quant_algo" in config or method.startswith("modelopt"):
        return _modelopt_scheme(config, named)
    if method == "compressed-tensors":
        return _compressed_scheme(config, named)
    if method in ("mxfp4", "mxfp8"):
        return "mxfp4" if method == "mxfp4" else "mxfp8"
    if method == "fp8":
        is_fp4 = config.text("expert_dtype", default="") == "fp4"
        return "mxfp4" if is_fp4 else _fp8_scheme(config)
    raise _not_run(config.where("quant_method"), repr(config.get("quant_method")))


def _as_fields(config: Mapping[str, Any]) -> Fields:
    return config if isinstance(config, Fields) else Fields(config, "quantization_config")


def quantization_of(fields: Fields) -> Fields | None:
    """The quantisation of a config.json or hf_quant_config.json; it itself if it is neither.

    Raises:
        ValueError: a part of it that is no JSON object.
    """
    if "quantization" in fields:
        return fields.inner("quantization")
    inner = fields.inner("quantization_config") or fields.inner("compression_config")
    if inner is None:
        text = fields.inner("text_config")
        inner = None if text is None else text.inner("quantization_config")
        fields = fields if text is None else text
    if inner is None:
        return fields if {"quant_method", "quant_algo"} & set(fields) else None
    # DeepSeek-V4 says what its experts are beside quantization_config.
    if "expert_dtype" in fields:
        inner.setdefault("expert_dtype", fields["expert_dtype"])
    return inner


def _fp8_scheme(config: Fields) -> Scheme:
    block = config.integers("weight_block_size")
    if block == (128, 128):
        return "fp8_block"
    is_exponent = config.text("scale_fmt", default="") == "ue8m0"
    return "mxfp8" if block and block[-1] == 32 and is_exponent else "fp8"


def _modelopt_scheme(config: Fields, named: "_Named") -> Scheme:
    algorithm = config.text("quant_algo", default=None)
    if algorithm == "MIXED_PRECISION":
        layers = config.inner("quantized_layers") or {}
        found = {
            Fields(layer, config.origin, f"{config.path}quantized_layers.{name}.").text(
                "quant_algo", default="None"
            )
            for name, layer in layers.items()
            if named.has(name) or named.by(name)
        }
        if len(found) > 1:
            raise _not_run(f"quantized_layers under {named.prefix}", sorted(found))
        algorithm = found.pop() if found else None
    if algorithm is None:
        return "bf16"
    if algorithm not in _MODELOPT:
        raise _not_run(config.where("quant_algo"), repr(algorithm))
    return _MODELOPT[algorithm]


def _compressed_scheme(config: Fields, named: "_Named") -> Scheme:
    name = config.text("format", default=None)
    groups = config.each("config_groups")
    for group in groups.values():
        targets = group.texts("targets") or ("Linear",)
        if "Linear" in targets or any(named.by(target) for target in targets):
            weights = group.inner("weights") or Fields({}, group.origin)
            return _compressed_group(config, group.text("format", default=None) or name, weights)
    return "bf16" if groups else _compressed_group(config, name, Fields({}, config.origin))


def _compressed_group(config: Fields, name: str | None, weights: Fields) -> Scheme:
    kind = weights.text("type", default=None)
    if name in ("float-quantized", "naive-quantized") and kind == "float":
        return "fp8_block" if weights.integers("block_structure") == (128, 128) else "fp8"
    if name is None or name not in _COMPRESSED:
        bits = f" ({kind}{weights.integer('num_bits', default=None)})" if weights else ""
        where = f"compressed-tensors {config.where('format')}"
        raise _not_run(where, f"{name!r}{bits}")
    return _COMPRESSED[name]


class _Named:
    """The modules of a layer's experts, for patterns.

    Args:
        prefix: of the experts; empty: of no layer, and no pattern concerns it.
        modules: theirs.
    """

    def __init__(self, prefix: str, modules: Collection[str]) -> None:
        if prefix.count(".") >= _MAX_COMPONENTS:
            expected = f"at most {_MAX_COMPONENTS} components between dots"
            raise ValueError(_checks.message("prefix", expected, prefix.count(".") + 1))
        self.prefix = prefix
        each = sorted(modules) or [f"{prefix}.0.{name}" for name in ("gate_proj", "w1")]
        self._tried = [prefix, *each[:_TRIED]] if prefix else []
        names = [name.split(".") for name in (prefix, *each)] if prefix else []
        self._runs = {run for name in names for run in _runs(name)}

    def by(self, pattern: str) -> bool:
        """Whether the pattern stands for one of the modules, or for one around them."""
        if pattern.startswith("re:") or set(pattern) & set("*?["):
            return any(matches(pattern, name) for name in self._tried)
        return pattern in self._runs

    def has(self, name: str) -> bool:
        """Whether the name is of one of the modules, or of one in them."""
        return bool(self.prefix) and name.startswith(f"{self.prefix}.")


_TRIED = 8
"""Modules that patterns are tried on: those of one expert, or of all where they are stacked."""
_MAX_COMPONENTS = 64


def _runs(components: Sequence[str]) -> list[str]:
    size = len(components)
    spans = [(start, stop) for start in range(size) for stop in range(start + 1, size + 1)]
    return [".".join(components[start:stop]) for start, stop in spans]


def _not_run(argument: str, got: object) -> NotImplementedError:
    return NotImplementedError(_checks.message(argument, f"experts stored as {_RUN}", got))
