"""The parameters of a layer in kernel layout: `ExpertWeights`, its shapes and its checks."""

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_megamoe import _checks
from jax_megamoe.config import ExpertSpec, MoEConfig, check_config
from jax_megamoe.formats import (
    GROUPED_LAYOUTS,
    INTERLEAVE_8,
    WEIGHT_FORMATS,
    Recipe,
    WeightSpec,
)
from jax_megamoe.plan import families, folding
from jax_megamoe.weights import grouped
from jax_megamoe.weights.layout import split_rows
from jax_megamoe.weights.packed import PACKED_LAYOUTS

W13_ROWS = MappingProxyType({"w13_weight": -2, "w13_weight_scale": -1, "w13_bias": -1})
"""The axis of w13's rows in each field that has one, before `split_rows`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertMatrices:
    """Two matrices with what belongs to them, of all routed experts or of the shared one; a pytree.

    E experts (of all ranks, or this rank's inside `shard_map`), H hidden, I intermediate, v values
    per stored element (2 for FP4), g values per block scale. A shared expert has no E, its own
    intermediate size S for I, the first four fields alone, and always interleaved rows. In
    ``"sgl_fp4"`` w13's rows lie in tiles of 32: [2I / 32, 32] in place of 2I in the shapes of
    w13_weight, w13_weight_scale and w13_bias. So every layout of a format has shapes of its own,
    and arrays that were moved from a layer of another layout are noticed (`layout_of`).

    Attributes:
        w13_weight: [E, 2I, H / v], gate and up rows interleaved; uint8 for FP4, else float8_e4m3fn
            or bfloat16. FlashInfer's layouts, scales included: uint8 [E, 2I / 128, H / 128, 8704]
            (MXFP4) or [E, 2I, 80 H / 128] (NVFP4).
        w2_weight: [E, H, I / v]; likewise.
        w13_weight_scale: int32 [E, H / (4 g), 2I], four scale bytes along K a word, rows permuted;
            fp8_block: float32 [E, 2I / 128, H / 128], gate rows then up rows; bf16: None.
        w2_weight_scale: int32 [E, I / (4 g), H]; fp8_block: float32 [E, H / 128, I / 128].
        w13_weight_scale_2: float32 [E], NVFP4's global scale of gate and up; FlashInfer's layouts:
            the factor of the first matmul's result. MXFP4 in ``"humming_fp8"``: the second scale,
            float32 [E] or bfloat16 [E, 2I].
        w2_weight_scale_2: float32 [E], the same of down.
        w2_input_scale: float32 [E], the scale of the second matmul's input in NVFP4; the largest
            over all experts is used, 1.0 when all are 0.
        w13_bias: float32 [E, 2I], rows ordered as w13_weight's; None for none, or beside a w2_bias
            where the last columns of w13_weight hold them (`jax_megamoe.fold_biases`).
        w2_bias: float32 [E, H]; None for none.
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

    @property
    def has_row_scales(self) -> bool:
        """Whether second scales are of rows rather than of matrices, see w13_weight_scale_2."""
        return getattr(self.w13_weight_scale_2, "ndim", 1) == 2

    def arrays(self) -> dict[str, Any]:
        """The fields that hold an array, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: array for name, array in named.items() if array is not None}


MATRIX_FIELDS = tuple(field.name for field in fields(ExpertMatrices))
"""Names of the fields of `ExpertMatrices`."""

PARTS = ("routed", "shared")
"""The parts of `ExpertWeights`."""


@dataclass(frozen=True)
class ExpertWeights:
    """The expert parameters of one layer, in kernel layout; a pytree with static format and layout.

    Attributes:
        routed: the routed experts.
        shared: a fused shared expert; None for none.
        format: name of the weight format, the routed experts'.
        layout: row order of the routed w13 and how scales are stored, ``"interleave8"``,
            ``"sgl_fp4"``, ``"flashinfer_mxfp4"`` or ``"flashinfer_nvfp4"``; or ``"humming_bf16"``
            or ``"humming_fp8"``, layouts of the implementation ``grouped`` with shapes of their own
            (`jax_megamoe.to_layout`).
    """

    routed: ExpertMatrices
    shared: ExpertMatrices | None = None
    format: str = ""
    layout: str = INTERLEAVE_8

    @property
    def folds_biases(self) -> bool:
        """Whether the last columns of w13_weight hold the biases of the first matmul."""
        return self.routed.w13_bias is None and self.routed.w2_bias is not None

    @property
    def parts(self) -> dict[str, ExpertMatrices]:
        """The parts that there are, by name."""
        named = {name: getattr(self, name) for name in PARTS}
        return {name: part for name, part in named.items() if part is not None}

    def arrays(self) -> dict[str, Any]:
        """The arrays that there are, by path: ``"routed.w13_weight"``, ``"shared.w2_weight"``."""
        return {
            f"{part}.{name}": array
            for part, matrices in self.parts.items()
            for name, array in matrices.arrays().items()
        }

    def with_routed(self, **arrays: Any) -> "ExpertWeights":
        """The same parameters but for these fields of the routed experts."""
        return replace(self, routed=replace(self.routed, **arrays))

    def partition_specs(self, axis: str | tuple[str, ...]) -> "ExpertWeights":
        """The same tree with a PartitionSpec for each array: experts split, shared replicated."""

        def with_spec(matrices: ExpertMatrices, spec: PartitionSpec) -> ExpertMatrices:
            return replace(matrices, **dict.fromkeys(matrices.arrays(), spec))

        shared = None if self.shared is None else with_spec(self.shared, PartitionSpec())
        return replace(self, routed=with_spec(self.routed, PartitionSpec(axis)), shared=shared)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.size * array.dtype.itemsize for array in self.arrays().values())


jax.tree_util.register_dataclass(
    ExpertWeights, data_fields=list(PARTS), meta_fields=["format", "layout"]
)


def default_layout(config: ExpertSpec) -> str:
    """The layout that the config's kernels read: w13's row order, and whether scales lie among the
    codes; the preferred kernel's where they differ.

    NVFP4's do: sgl's unless another is named, or a fused shared expert or an activation is asked
    for that only vllm's has. Where no activation and no source is named, a fused shared expert
    decides alone: it is always in interleave8, and the kernels that fuse it read all experts so.
    """
    if not isinstance(config, MoEConfig):
        orders = families.layouts(config.recipe)
        return orders[0] if orders and not config.num_shared_experts else INTERLEAVE_8
    family = families.default_family(config)
    return INTERLEAVE_8 if family is None else family.w13_layout


def known_layouts(config: ExpertSpec) -> tuple[str, ...]:
    """Layouts that parameters of the config may have, the kernels' own first."""
    layouts = families.layouts(config.recipe) or (INTERLEAVE_8,)
    form = config.weight_format.name
    return layouts + tuple(name for name, forms in GROUPED_LAYOUTS.items() if form in forms)


def layout_of(config: ExpertSpec, routed: ExpertMatrices) -> str:
    """The layout of a layer's arrays, by their shapes and dtypes: each layout has its own.

    Args:
        config: the layer.
        routed: all experts or one rank's.

    Raises:
        ValueError: dtypes or shapes of none of the config's layouts.
    """
    arrays = routed.arrays()
    names = [name for name in ("w13_weight", "w13_weight_scale", "w2_weight") if name in arrays]
    for layout in known_layouts(config):
        wanted = parameter_shapes(config, layout=layout).routed.arrays()
        fits = (
            name in wanted
            and tuple(arrays[name].shape[1:]) == wanted[name].shape[1:]
            and arrays[name].dtype == wanted[name].dtype
            for name in names
        )
        if all(fits) and ("w13_weight_scale" in wanted) == ("w13_weight_scale" in arrays):
            return layout
    got = ", ".join(f"{name} {arrays[name].dtype} {list(arrays[name].shape)}" for name in names)
    expected = f"dtypes and shapes of one of the layouts {list(known_layouts(config))}"
    raise ValueError(_checks.message("the layer's parameters", expected, got))


def recipe_for(config: MoEConfig, weights: ExpertWeights) -> Recipe:
    """The config's recipe, with the rounding of the kernel that reads the weights' row order.

    NVFP4's two kernels differ: sgl's multiplies the top-k weight in before it quantises the second
    matmul's input, vllm's afterwards, and only vllm's floors block scales. Quantised with one
    where the other runs, outputs are 6 to 11 % off.
    """
    recipe = config.recipe
    if weights.layout in GROUPED_LAYOUTS:
        # The first product's result is BF16 whatever the recipe.
        rounding = replace(recipe.rounding, rounds_gate_up=True, power_of_two_scales=False)
        return replace(recipe, rounding=rounding)
    readers = (f for f in families.of_recipe(recipe) if f.w13_layout == weights.layout)
    family = next(readers, None)
    if family is None or family.rounding is None:
        return recipe
    return replace(recipe, rounding=family.rounding)


def parameter_shapes(
    config: ExpertSpec,
    num_experts: int | None = None,
    layout: str | None = None,
    *,
    has_biases: bool = False,
    by_row: bool = False,
) -> ExpertWeights:
    """The parameters of the config's layer as shapes and dtypes (`jax.ShapeDtypeStruct`).

    Args:
        config: the layer.
        num_experts: leading size of the routed parameters; None: all physical experts.
        layout: of the routed matrices; None: the config's default.
        has_biases: with biases.
        by_row: whether MXFP4 in ``"humming_fp8"`` has second scales of rows.
    """
    experts = config.num_experts if num_experts is None else num_experts
    hidden, inter = config.hidden_size, config.intermediate_size
    recipe, spec = config.recipe, config.weight_format.weight
    layout = default_layout(config) if layout is None else layout
    packed = PACKED_LAYOUTS.get(layout)
    shapes: dict[str, Any] = {}
    for name, rows, columns in (("w13_weight", 2 * inter, hidden), ("w2_weight", hidden, inter)):
        if packed is None:
            shapes |= _matrix(name, spec, (experts,), rows, columns)
        else:
            shape = (experts, *packed.shape(rows, columns))
            shapes[name] = jax.ShapeDtypeStruct(shape, jnp.uint8)
        if packed is not None or spec.has_global_scale:
            shapes[f"{name}_scale_2"] = jax.ShapeDtypeStruct((experts,), jnp.float32)
    if layout in GROUPED_LAYOUTS:
        form = config.weight_format
        found = grouped.shapes(form, layout, hidden, inter, experts, by_row=by_row)
        for name, (shape, dtype) in found.items():
            shapes[name] = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    if recipe.activations.has_global_scale:
        shapes["w2_input_scale"] = jax.ShapeDtypeStruct((experts,), jnp.float32)
    if has_biases:
        shapes["w13_bias"] = jax.ShapeDtypeStruct((experts, 2 * inter), jnp.float32)
        shapes["w2_bias"] = jax.ShapeDtypeStruct((experts, hidden), jnp.float32)
    for name, axis in W13_ROWS.items():
        if name in shapes:
            rows = shapes[name]
            shapes[name] = jax.eval_shape(partial(split_rows, layout=layout, axis=axis), rows)
    shared = None
    if config.num_shared_experts and config.shared_format:
        spec = WEIGHT_FORMATS[config.shared_format].weight
        first = _matrix("w13_weight", spec, (), 2 * config.shared_size, hidden)
        second = _matrix("w2_weight", spec, (), hidden, config.shared_size)
        shared = ExpertMatrices(**first, **second)
    return ExpertWeights(ExpertMatrices(**shapes), shared, config.weight_format.name, layout)


def _matrix(name: str, spec: WeightSpec, lead: tuple[int, ...], n: int, k: int) -> dict[str, Any]:
    stored = (*lead, n, k // spec.values_per_element)
    shapes = {name: jax.ShapeDtypeStruct(stored, jnp.dtype(spec.storage))}
    if spec.packs_scales:
        words = (*lead, k // (4 * spec.block[1]), n)
        shapes[f"{name}_scale"] = jax.ShapeDtypeStruct(words, jnp.int32)
    elif spec.scale == "float32":
        grid = (*lead, n // spec.block[0], k // spec.block[1])
        shapes[f"{name}_scale"] = jax.ShapeDtypeStruct(grid, jnp.float32)
    return shapes


def check_kind(weights: object) -> None:
    """Raises TypeError unless `weights` are an `ExpertWeights`."""
    if not isinstance(weights, ExpertWeights):
        expected = "an ExpertWeights (from quantize_experts or load_experts)"
        raise TypeError(_checks.message("weights", expected, type(weights).__name__))


def check_weights(
    config: ExpertSpec, weights: ExpertWeights, num_experts: int | None = None
) -> None:
    """Checks that `weights` are this config's parameters.

    Args:
        config: the layer.
        weights: global arrays, or one rank's.
        num_experts: leading size expected of the routed parameters; None: all physical experts.

    Raises:
        ValueError: another format, an unknown layout, a missing, superfluous or misshaped field.
        TypeError: not a config, not an ExpertWeights, or a field of another dtype.
    """
    check_config(config, ExpertSpec)
    check_kind(weights)
    if weights.format != config.weight_format.name:
        raise ValueError(
            _checks.message(
                "weights.format",
                f"{config.weight_format.name!r} (config.weight_format)",
                repr(weights.format),
                "quantise or load the weights with the same config",
            )
        )
    _checks.one_of("weights.layout", weights.layout, known_layouts(config))
    for part, matrices in weights.parts.items():
        if not isinstance(matrices, ExpertMatrices):
            raise TypeError(
                _checks.message(f"weights.{part}", "an ExpertMatrices", type(matrices).__name__)
            )
    by_row = weights.routed.has_row_scales
    wanted = parameter_shapes(config, num_experts, weights.layout, has_biases=True, by_row=by_row)
    optional = {"w13_bias", "w2_bias"}
    if weights.folds_biases and folding.unfoldable(config) is None:
        _check_folded(weights)
        optional.remove("w2_bias")
    elif optional & weights.routed.arrays().keys():
        optional.clear()
    _check_fields("routed", weights.routed, wanted.routed, optional)
    if weights.shared is not None:
        if wanted.shared is None:
            expected = "None: config.num_shared_experts is 0 or the format fuses no shared expert"
            raise ValueError(_checks.message("weights.shared", expected, "an ExpertMatrices"))
        _check_fields("shared", weights.shared, wanted.shared)
    expected_shapes = wanted.arrays()
    tiled = {f"routed.{name}" for name in W13_ROWS}
    for name, array in weights.arrays().items():
        shape = expected_shapes[name].shape
        in_order = name not in tiled or getattr(array, "ndim", 0) == len(shape)
        hint = "" if in_order else f"the arrays are not in the layout {weights.layout}"
        _checks.shape(f"weights.{name}", array, shape, hint)
        _checks.dtype(f"weights.{name}", array, [str(expected_shapes[name].dtype)])


def _check_folded(weights: ExpertWeights) -> None:
    if weights.layout in GROUPED_LAYOUTS:
        hint = "the grouped products add biases: unfold_biases gives them back"
        raise ValueError(_checks.message("weights.routed.w13_bias", "an array", None, hint))
    if weights.shared is not None:
        expected = "none beside folded biases: it would multiply their constant"
        raise ValueError(_checks.message("weights.shared", expected, "a fused shared expert"))


def _check_fields(
    part: str, matrices: ExpertMatrices, wanted: ExpertMatrices, optional: Collection[str] = ()
) -> None:
    """Raises ValueError for a field that is superfluous, or missing and not optional."""
    given, known = matrices.arrays(), wanted.arrays()
    for name in given.keys() - known.keys():
        expected = "None: this config has no such parameter"
        raise ValueError(_checks.message(f"weights.{part}.{name}", expected, "an array"))
    for name in known:
        if name not in given and name not in optional:
            raise ValueError(_checks.message(f"weights.{part}.{name}", "an array", None))
