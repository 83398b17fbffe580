"""What the names of a checkpoint's tensors mean: which expert, which projection, which part of it.

One grammar covers the published dialects (DeepSeek-V3 and V4, GPT-OSS, Kimi-K3, Qwen, ModelOpt,
compressed-tensors):

* ``{prefix}.{expert}.{projection}.{suffix}``, one expert's;
* ``{prefix}.{projection}[._]{suffix}`` or ``{prefix}.{projection}``, all experts stacked;
* ``{parent}.shared_expert(s).{projection}.{suffix}`` or ``{parent}.shared_mlp. ...``, where the
  prefix is ``{parent}.experts``.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from jax_megamoe import _checks

Part = Literal["gate", "up", "down", "gate_up"]
Kind = Literal["weight", "scale", "global_scale", "input_scale", "bias", "unused"]

SHARED = -1
"""The shared expert's number."""

SHARED_NAMES = ("shared_experts.", "shared_expert.", "shared_mlp.")
"""What the shared expert is called beside the routed ones."""

MAX_EXPERTS = 1 << 20
"""Of a layer with an unknown number of experts."""

PARTS: MappingProxyType[str, Part] = MappingProxyType(
    {
        "gate_proj": "gate",
        "w1": "gate",
        "up_proj": "up",
        "w3": "up",
        "down_proj": "down",
        "w2": "down",
        "gate_up_proj": "gate_up",
        "w13": "gate_up",
    }
)
"""The part of an expert by the name of its projection."""

_KINDS: MappingProxyType[str, tuple[Kind, bool]] = MappingProxyType(
    {
        "": ("weight", False),
        "weight": ("weight", False),
        "weight_packed": ("weight", False),
        "blocks": ("weight", False),
        "scale": ("scale", False),
        "scales": ("scale", False),
        "weight_scale": ("scale", False),
        "weight_scale_inv": ("scale", False),
        "scale_inv": ("scale", False),
        "weight_scale_2": ("global_scale", False),
        "weight_global_scale": ("global_scale", True),
        "input_scale": ("input_scale", False),
        "input_global_scale": ("input_scale", True),
        "bias": ("bias", False),
        "weight_shape": ("unused", False),
    }
)
"""Suffix to kind, and whether the number stored is a divisor (compressed-tensors)."""

_MODULE = re.compile(rf"((?:\.\d+)?\.(?:{'|'.join(PARTS)}))(?![^._])")
"""What of a tensor's name, after the prefix, is its module's."""

_NOT_RUN = MappingProxyType(
    dict.fromkeys(
        ("qweight", "qzeros", "g_idx", "weight_zero_point", "weight_g_idx"),
        "packed int4 (AWQ, GPTQ, pack-quantized)",
    )
    | {"pre_quant_scale": "scales of the input channels (NVFP4 with AWQ)"}
)


@dataclass(frozen=True)
class Role:
    """What one tensor of a checkpoint is.

    Attributes:
        expert: logical expert; `SHARED`; None: all experts, stacked on the leading axis.
        part: projection of the expert.
        kind: what of the projection; ``unused`` tensors are known and not read.
        divisor: the number is the reciprocal of the scale.
        blocks: E2M1 pairs as [..., N, K / 32, 16], gate and up rows in turns (GPT-OSS).
    """

    expert: int | None
    part: Part
    kind: Kind
    divisor: bool = False
    blocks: bool = False


class Dialect:
    """Names of one layer's experts.

    Args:
        prefix: of the routed experts, such as ``model.layers.3.mlp.experts``.
        num_experts: logical experts.
        shared: whether the shared expert's tensors are wanted too.
    """

    def __init__(self, prefix: str, num_experts: int, *, shared: bool) -> None:
        if not isinstance(prefix, str):
            expected = "where the experts' names begin, such as 'model.layers.3.mlp.experts'"
            raise TypeError(_checks.message("prefix", expected, repr(prefix)))
        self.prefix = prefix.rstrip(".")
        self._num_experts = num_experts
        parent = self.prefix.rpartition(".")[0]
        stem = f"{parent}." if parent else ""
        self._shared = tuple(f"{stem}{name}" for name in SHARED_NAMES) if shared else ()

    def role(self, name: str) -> Role | None:
        """What the tensor is; None for one that is no part of these experts.

        Raises:
            ValueError: a name under the prefix that no dialect has, or an expert out of range.
            NotImplementedError: a tensor of a scheme that does not run, such as packed int4.
        """
        for shared in self._shared:
            if name.startswith(shared):
                return self._parsed(name, name.removeprefix(shared), SHARED)
        if not name.startswith(f"{self.prefix}."):
            return None
        rest = name.removeprefix(f"{self.prefix}.")
        number, _, projection = rest.partition(".")
        if not number.isdecimal():
            return self._parsed(name, rest, None)
        if int(number) >= self._num_experts:
            expected = f"experts 0 to {self._num_experts - 1} (num_logical_experts)"
            raise ValueError(_checks.message(name, expected, int(number)))
        return self._parsed(name, projection, int(number))

    def modules(self, names: Iterable[str]) -> set[str]:
        """Modules of the routed experts, by the names of tensors: ``{prefix}.0.gate_proj``; of
        stacks ``{prefix}.gate_up_proj``.
        """
        found = (_MODULE.match(name, len(self.prefix)) for name in self._within(names))
        return {f"{self.prefix}{match[1]}" for match in found if match}

    def _within(self, names: Iterable[str]) -> Iterator[str]:
        return (name for name in names if name.startswith(f"{self.prefix}."))

    def _parsed(self, name: str, projection: str, expert: int | None) -> Role:
        separators = "[._]" if expert is None else "[.]"
        found = re.fullmatch(rf"({'|'.join(PARTS)})(?:{separators}(\w+))?", projection)
        suffix = (found[2] or "") if found else ""
        if suffix in _NOT_RUN:
            expected = "weights in BF16, FP16, FP8, MXFP8, MXFP4 or NVFP4"
            raise NotImplementedError(_checks.message(name, expected, _NOT_RUN[suffix]))
        if found is None or suffix not in _KINDS or (expert is not None and not suffix):
            expected = f"a projection of {sorted(PARTS)} and one of {sorted(_KINDS)[1:]}"
            raise ValueError(_checks.message(name, expected, repr(projection)))
        kind, divisor = _KINDS[suffix]
        return Role(expert, PARTS[found[1]], kind, divisor, blocks=suffix == "blocks")
