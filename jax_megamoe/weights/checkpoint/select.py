"""Which format a checkpoint's experts run in, from its quantization_config."""

import fnmatch
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import jax

from jax_megamoe import _checks
from jax_megamoe.formats import WEIGHT_FORMATS, WeightFormat, as_weight_format

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
) -> WeightFormat:
    """The format that a checkpoint's experts run in on `device`.

    A forced one wins; else as stored. FP8 in blocks of 128x128 stays so on SM90 (Hopper) and is
    requantised to mxfp8 elsewhere, with a warning.

    Args:
        quantization_config: the checkpoint's, or its whole config.json or hf_quant_config.json;
            None: not quantised.
        device: where the experts run; None: the default device.
        forced: a format or its name.
        prefix: of the layer's experts; a layer that the config excludes is bf16.

    Raises:
        NotImplementedError: experts stored in anything else; the message names it.
        ValueError: an unknown name in `forced`.
    """
    if forced is not None:
        return as_weight_format(forced, "forced")
    scheme = stored_scheme(quantization_config, prefix)
    if scheme == "fp8":
        raise _not_run("quantization_config", "FP8 under scales of another grid than 128x128")
    if scheme == "fp8_block":
        target = jax.devices()[0] if device is None else device
        capability = str(getattr(target, "compute_capability", ""))
        if not capability.startswith("9."):
            name = f"{target.platform} {capability}".strip()
            warnings.warn(
                f"{prefix or 'experts'}: FP8 weights in 128x128 blocks are requantised to mxfp8 on "
                f"this device ({name}); only SM90 GPUs run fp8_block",
                stacklevel=2,
            )
            scheme = "mxfp8"
    return WEIGHT_FORMATS[scheme]


def read_quantization_config(checkpoint: str | Path) -> dict[str, Any] | None:
    """What a checkpoint says of its quantisation; None if it says nothing.

    Taken from config.json, else from hf_quant_config.json, in the folder (or the file's folder).

    Raises:
        ValueError: one of them is not JSON.
    """
    path = Path(checkpoint)
    folder = path if path.is_dir() else path.parent
    for name in ("config.json", "hf_quant_config.json"):
        if not (folder / name).exists():
            continue
        try:
            content = json.loads((folder / name).read_text())
        except json.JSONDecodeError as error:
            raise ValueError(_checks.message(str(folder / name), "JSON", error)) from error
        found = _normalised(content)
        if found:
            return found
    return None


def stored_scheme(quantization_config: Mapping[str, Any] | None, prefix: str = "") -> Scheme:
    """How the experts under `prefix` are stored, by the checkpoint's own word.

    Raises:
        NotImplementedError: a scheme that does not run (packed int4, INT8, AWQ, ...); named.
    """
    config = _normalised(quantization_config or {})
    if not config or _excluded(config, prefix):
        return "bf16"
    method = str(config.get("quant_method", "")).lower()
    if "quant_algo" in config or method.startswith("modelopt"):
        return _modelopt_scheme(config, prefix)
    if method == "compressed-tensors":
        return _compressed_scheme(config, prefix)
    if method in ("mxfp4", "mxfp8"):
        return "mxfp4" if method == "mxfp4" else "mxfp8"
    if method == "fp8":
        return "mxfp4" if config.get("expert_dtype") == "fp4" else _fp8_scheme(config)
    raise _not_run("quant_method", repr(config.get("quant_method")))


def _normalised(config: Mapping[str, Any]) -> dict[str, Any]:
    """The quantisation of a config.json or hf_quant_config.json; it itself if it is neither."""
    if "quantization" in config:
        return dict(config["quantization"])
    inner = config.get("quantization_config") or config.get("compression_config")
    if inner is None and "text_config" in config:
        return _normalised(config["text_config"])
    if inner is None:
        return dict(config) if {"quant_method", "quant_algo"} & set(config) else {}
    # DeepSeek-V4 says what its experts are beside quantization_config.
    beside = {"expert_dtype": config["expert_dtype"]} if "expert_dtype" in config else {}
    return {**beside, **inner}


def _fp8_scheme(config: Mapping[str, Any]) -> Scheme:
    block = list(config.get("weight_block_size") or [])
    if block == [128, 128]:
        return "fp8_block"
    is_exponent = config.get("scale_fmt") == "ue8m0"
    return "mxfp8" if block and block[-1] == 32 and is_exponent else "fp8"


def _modelopt_scheme(config: Mapping[str, Any], prefix: str) -> Scheme:
    algorithm = config.get("quant_algo")
    if algorithm == "MIXED_PRECISION":
        layers: Mapping[str, Any] = config.get("quantized_layers") or {}
        found = {
            str(layer.get("quant_algo"))
            for name, layer in layers.items()
            if name.startswith(f"{prefix}.") or _matches(prefix, [name])
        }
        if len(found) > 1:
            raise _not_run(f"quantized_layers under {prefix}", sorted(found))
        algorithm = found.pop() if found else None
    if algorithm is None:
        return "bf16"
    if algorithm not in _MODELOPT:
        raise _not_run("quant_algo", repr(algorithm))
    return _MODELOPT[algorithm]


def _compressed_scheme(config: Mapping[str, Any], prefix: str) -> Scheme:
    groups: Mapping[str, Any] = config.get("config_groups") or {}
    for group in groups.values():
        targets = group.get("targets") or ["Linear"]
        if "Linear" in targets or _matches(prefix, targets):
            weights = group.get("weights") or {}
            return _compressed_group(group.get("format") or config.get("format"), weights)
    return "bf16" if groups else _compressed_group(config.get("format"), {})


def _compressed_group(name: str | None, weights: Mapping[str, Any]) -> Scheme:
    if name in ("float-quantized", "naive-quantized") and weights.get("type") == "float":
        block = weights.get("block_structure")
        return "fp8_block" if list(block or []) == [128, 128] else "fp8"
    if name is None or name not in _COMPRESSED:
        bits = f" ({weights.get('type')}{weights.get('num_bits')})" if weights else ""
        raise _not_run("compressed-tensors format", f"{name!r}{bits}")
    return _COMPRESSED[name]


def _excluded(config: Mapping[str, Any], prefix: str) -> bool:
    patterns = [str(each) for key in _EXCLUSIONS for each in config.get(key) or ()]
    return bool(prefix) and _matches(prefix, patterns)


def _matches(prefix: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern names the experts or a module around them.

    Patterns are regular expressions after ``re:``, else names with ``*``; a name without its
    beginning or end, such as ``mlp``, stands for whatever has it as whole components.
    """
    return any(
        re.match(pattern[3:], name) if pattern.startswith("re:") else _names(name, pattern)
        for name in (prefix, f"{prefix}.0.gate_proj", f"{prefix}.0.w1")
        for pattern in patterns
    )


def _names(name: str, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(run, pattern) for run in _runs(name.split(".")))


def _runs(components: list[str]) -> Iterator[str]:
    size = len(components)
    for start in range(size):
        for stop in range(start + 1, size + 1):
            yield ".".join(components[start:stop])


def _not_run(argument: str, got: object) -> NotImplementedError:
    return NotImplementedError(_checks.message(argument, f"experts stored as {_RUN}", got))
