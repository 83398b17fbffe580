"""The parameters of a layer in kernel layout: `ExpertWeights`, its shapes and its checks."""

from dataclasses import dataclass, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_megamoe import _checks
from jax_megamoe.config import SGL_SWIGLU, MoEConfig
from jax_megamoe.formats import (
    INTERLEAVE_8,
    SGL_FP4,
    WEIGHT_FORMATS,
    Recipe,
    Rounding,
    WeightSpec,
)
from jax_megamoe.weights.layout import split_rows

NVFP4_LAYOUTS = MappingProxyType({"sgl": SGL_FP4, "vllm": INTERLEAVE_8})
"""The row order that a kernel source's NVFP4 kernel reads."""

W13_ROWS = MappingProxyType({"w13_weight": -2, "w13_weight_scale": -1, "w13_bias": -1})
"""The axis of w13's rows in each field that has one, before `split_rows`."""

_META_FIELDS = ("format",)


class SharedWeights(NamedTuple):
    """A fused shared expert, laid out as one routed expert of intermediate size S."""

    l1_weight: jax.Array
    l1_weight_scale: jax.Array | None
    l2_weight: jax.Array
    l2_weight_scale: jax.Array | None


@dataclass(frozen=True)
class ExpertWeights:
    """The expert parameters of one layer, in kernel layout; a pytree with a static format.

    E experts (of all ranks, or this rank's inside `shard_map`), H hidden, I intermediate, S shared
    intermediate size, v values per stored element (2 for FP4), g values per block scale. NVFP4 in
    the row order of sgl's kernel has w13's rows in tiles of 32: [2I / 32, 32] in place of 2I in the
    shapes of w13_weight, w13_weight_scale and w13_bias. So the order is in the arrays: whatever
    moves them from one layer to another moves it too.

    Attributes:
        w13_weight: [E, 2I, H / v], gate and up rows interleaved; uint8 for FP4, else float8_e4m3fn
            or bfloat16.
        w2_weight: [E, H, I / v].
        w13_weight_scale: int32 [E, H / (4 g), 2I], four scale bytes along K a word, rows permuted;
            fp8_block: float32 [E, 2I / 128, H / 128], gate rows then up rows; bf16: None.
        w2_weight_scale: int32 [E, I / (4 g), H]; fp8_block: float32 [E, H / 128, I / 128].
        w13_weight_scale_2: float32 [E], NVFP4's global scale of gate and up.
        w2_weight_scale_2: float32 [E], NVFP4's global scale of down.
        w2_input_scale: float32 [E], NVFP4's scale of the second matmul's input; the largest over
            all experts is used, 1.0 when all are 0.
        w13_bias: float32 [E, 2I], rows ordered as w13_weight's; None for none.
        w2_bias: float32 [E, H]; None for none.
        shared_l1_weight, shared_l1_weight_scale, shared_l2_weight, shared_l2_weight_scale: a fused
            shared expert, [2S, H] and [H, S] with their scales; None for none.
        format: name of the weight format.
    """

    w13_weight: Any
    w2_weight: Any
    w13_weight_scale: Any = None
    w2_weight_scale: Any = None
    w13_weight_scale_2: Any = None
    w2_weight_scale_2: Any = None
    w2_input_scale: Any = None
    w13_bias: Any = None
    w2_bias: Any = None
    shared_l1_weight: Any = None
    shared_l1_weight_scale: Any = None
    shared_l2_weight: Any = None
    shared_l2_weight_scale: Any = None
    format: str = ""

    @property
    def layout(self) -> str:
        """Row order of w13, ``"interleave8"`` or ``"sgl_fp4"``, by w13_weight's shape."""
        is_tiled = getattr(self.w13_weight, "ndim", 0) > getattr(self.w2_weight, "ndim", 0)
        return SGL_FP4 if is_tiled else INTERLEAVE_8

    @property
    def shared(self) -> SharedWeights | None:
        """The fused shared expert, if there is one."""
        if self.shared_l1_weight is None:
            return None
        return SharedWeights(
            self.shared_l1_weight,
            self.shared_l1_weight_scale,
            self.shared_l2_weight,
            self.shared_l2_weight_scale,
        )

    def arrays(self) -> dict[str, jax.Array]:
        """The fields that hold an array, by name."""
        named = {name: getattr(self, name) for name in ARRAY_FIELDS}
        return {name: array for name, array in named.items() if array is not None}

    def partition_specs(self, axis: str | tuple[str, ...]) -> "ExpertWeights":
        """The same tree with a PartitionSpec for each array: experts split, shared replicated."""
        specs = {
            name: PartitionSpec() if name.startswith("shared_") else PartitionSpec(axis)
            for name in self.arrays()
        }
        return replace(self, **specs)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.size * array.dtype.itemsize for array in self.arrays().values())


ARRAY_FIELDS = tuple(f.name for f in fields(ExpertWeights) if f.name not in _META_FIELDS)
"""Names of the array fields of `ExpertWeights`."""

jax.tree_util.register_dataclass(
    ExpertWeights, data_fields=list(ARRAY_FIELDS), meta_fields=list(_META_FIELDS)
)


def default_layout(config: MoEConfig) -> str:
    """The w13 row order that the config's kernels read.

    NVFP4's differs by kernel source: sgl's unless another is named, or a fused shared expert or an
    activation is asked for that only vllm's kernel has.
    """
    if config.weight_format.name != "nvfp4":
        return INTERLEAVE_8
    parameters = config.activation.alpha, config.activation.beta
    on_sgl = not config.num_shared_experts and parameters in SGL_SWIGLU
    source = config.kernel_source or ("sgl" if on_sgl else "vllm")
    return NVFP4_LAYOUTS[source]


_ROUNDINGS = MappingProxyType({SGL_FP4: Rounding(floors_scales=False)})
"""Of kernels that round otherwise than their recipe says, by the row order that they read."""


def recipe_for(config: MoEConfig, weights: ExpertWeights) -> Recipe:
    """The config's recipe, with the rounding of the kernel that reads the weights' row order.

    NVFP4's two kernels differ: sgl's multiplies the top-k weight in before it quantises the second
    matmul's input, vllm's afterwards, and only vllm's floors block scales. Quantised with one
    where the other runs, outputs are 6 to 11 % off.
    """
    recipe = config.recipe
    return replace(recipe, rounding=_ROUNDINGS.get(weights.layout, recipe.rounding))


def parameter_shapes(
    config: MoEConfig, num_experts: int | None = None, *, layout: str | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter the config's layer may hold, by field name.

    Args:
        config: the layer.
        num_experts: leading size of the routed parameters; None: all physical experts.
        layout: row order of w13; None: the config's.
    """
    layout = default_layout(config) if layout is None else layout
    experts = config.num_experts if num_experts is None else num_experts
    hidden, inter = config.hidden_size, config.intermediate_size
    form = config.weight_format
    shapes = _matrix("w13_weight", form.weight, (experts,), 2 * inter, hidden)
    shapes |= _matrix("w2_weight", form.weight, (experts,), hidden, inter)
    if form.weight.has_global_scale:
        for name in ("w13_weight_scale_2", "w2_weight_scale_2", "w2_input_scale"):
            shapes[name] = jax.ShapeDtypeStruct((experts,), jnp.float32)
    shapes["w13_bias"] = jax.ShapeDtypeStruct((experts, 2 * inter), jnp.float32)
    for name, axis in W13_ROWS.items():
        if name in shapes:
            rows = shapes[name]
            shapes[name] = jax.eval_shape(partial(split_rows, layout=layout, axis=axis), rows)
    shapes["w2_bias"] = jax.ShapeDtypeStruct((experts, hidden), jnp.float32)
    if config.num_shared_experts and config.shared_format:
        spec = WEIGHT_FORMATS[config.shared_format].weight
        shapes |= _matrix("shared_l1_weight", spec, (), 2 * config.shared_size, hidden)
        shapes |= _matrix("shared_l2_weight", spec, (), hidden, config.shared_size)
    return shapes


def _matrix(
    name: str, spec: WeightSpec, lead: tuple[int, ...], n: int, k: int
) -> dict[str, jax.ShapeDtypeStruct]:
    stored = (*lead, n, k // spec.values_per_element)
    shapes = {name: jax.ShapeDtypeStruct(stored, jnp.dtype(spec.storage))}
    if spec.packs_scales:
        words = (*lead, k // (4 * spec.block[1]), n)
        shapes[f"{name}_scale"] = jax.ShapeDtypeStruct(words, jnp.int32)
    elif spec.scale == "float32":
        grid = (*lead, n // spec.block[0], k // spec.block[1])
        shapes[f"{name}_scale"] = jax.ShapeDtypeStruct(grid, jnp.float32)
    return shapes


def check_weights(
    config: MoEConfig, weights: ExpertWeights, num_experts: int | None = None
) -> None:
    """Checks that `weights` are this config's parameters.

    Args:
        config: the layer.
        weights: global arrays, or one rank's.
        num_experts: leading size expected of the routed parameters; None: all physical experts.

    Raises:
        ValueError: another format, fields in different row orders, a missing, superfluous or
            misshaped field.
        TypeError: not an ExpertWeights, or a field of another dtype.
    """
    if not isinstance(weights, ExpertWeights):
        expected = "an ExpertWeights (from quantize_experts or load_experts)"
        raise TypeError(_checks.message("weights", expected, type(weights).__name__))
    if weights.format != config.weight_format.name:
        raise ValueError(
            _checks.message(
                "weights.format",
                f"{config.weight_format.name!r} (config.weight_format)",
                repr(weights.format),
                "quantise or load the weights with the same config",
            )
        )
    layout = weights.layout if weights.format == "nvfp4" else INTERLEAVE_8
    expected_shapes = parameter_shapes(config, num_experts, layout=layout)
    arrays = weights.arrays()
    _check_presence(arrays, expected_shapes)
    for name, array in arrays.items():
        wanted = expected_shapes[name].shape
        in_order = name not in W13_ROWS or getattr(array, "ndim", 0) == len(wanted)
        hint = "" if in_order else "the rows of all w13 fields have one order"
        _checks.shape(f"weights.{name}", array, wanted, hint)
        _checks.dtype(f"weights.{name}", array, [str(expected_shapes[name].dtype)])


def _check_presence(arrays: dict[str, Any], expected: dict[str, jax.ShapeDtypeStruct]) -> None:
    for name in arrays:
        if name not in expected:
            reason = "None: this config has no such parameter"
            if name.startswith("shared_"):
                reason = "None: config.num_shared_experts is 0 or the format fuses no shared expert"
            raise ValueError(_checks.message(f"weights.{name}", reason, "an array"))
    has_shared = any(name.startswith("shared_") for name in arrays)
    has_bias = any(name.endswith("_bias") for name in arrays)
    for name in expected:
        optional = (name.endswith("_bias") and not has_bias) or (
            name.startswith("shared_") and not has_shared
        )
        if name not in arrays and not optional:
            raise ValueError(_checks.message(f"weights.{name}", "an array", None))
