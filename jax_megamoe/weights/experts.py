"""Plain expert matrices to `ExpertWeights` in kernel layout, and back."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, Float32

from jax_megamoe import _checks
from jax_megamoe.config import ExpertSpec, check_config
from jax_megamoe.formats import GROUPED_LAYOUTS, WEIGHT_FORMATS, WeightFormat
from jax_megamoe.mesh import by_rows, split_of, take_rows
from jax_megamoe.numerics import quantization
from jax_megamoe.numerics.elements import scale_factors
from jax_megamoe.weights import layout as layouts
from jax_megamoe.weights.folded_biases import unfold_biases
from jax_megamoe.weights.packed import PACKED_LAYOUTS, log_rounded
from jax_megamoe.weights.params import (
    INTERLEAVE_8,
    ExpertMatrices,
    ExpertWeights,
    check_kind,
    check_weights,
    default_layout,
)
from jax_megamoe.weights.regroup import from_grouped
from jax_megamoe.weights.requantize import quantize_matrix

Matrices = tuple[Array, Array, Array]
"""gate [..., I, H], up [..., I, H], down [..., H, I]."""

ROUNDED = "rounded"
"""Beside fields of parameters: how many weights became other numbers in a packed layout."""

_FLOAT_DTYPES = ("bfloat16", "float16", "float32")


def quantize_experts(
    config: ExpertSpec,
    gate: Float[Array, "experts inter hidden"],
    up: Float[Array, "experts inter hidden"],
    down: Float[Array, "experts hidden inter"],
    *,
    shared: Matrices | None = None,
    biases: Matrices | None = None,
    w2_input_scale: Float32[Array, " experts"] | None = None,
) -> ExpertWeights:
    """Float matrices as the config's format in kernel layout.

    Quantises one expert at a time; of matrices that are split along their first dimension each
    device its own, and the parameters are split likewise. (In a trace that takes Explicit axes:
    JAX does not say how an array over Auto ones is split.)

    With fewer logical than physical experts, slot p gets logical expert p % num_logical_experts.

    Args:
        config: the layer.
        gate: bfloat16, float16 or float32 [E, I, H], E logical (or all physical) experts.
        up: [E, I, H].
        down: [E, H, I].
        shared: gate [S, H], up [S, H] and down [H, S] of a shared expert to fuse, S =
            intermediate_size * num_shared_experts.
        biases: gate [E, I], up [E, I] and down [E, H]; run by ``xla`` and ``reference``.
        w2_input_scale: float32 [E], NVFP4's calibrated scale of the second matmul's input; None: 1.

    Raises:
        ValueError: a wrong shape, a value that is not finite, a shared expert that the format does
            not fuse or of another size than S.
        TypeError: a wrong dtype.
    """
    check_config(config, ExpertSpec)
    parts = dict(gate=gate, up=up, down=down)
    experts = _num_experts(config, gate)
    _check_parts(parts, (experts,), config.intermediate_size, config.hidden_size)
    slots = np.arange(config.num_experts) % experts
    layout = default_layout(config)
    quantised = by_rows(_quantize, parts, form=config.weight_format, layout=layout)
    fields: dict[str, Any] = counted("quantize_experts", quantised)
    if config.recipe.activations.has_global_scale:
        fields["w2_input_scale"] = _input_scales(w2_input_scale, fields["w2_weight_scale_2"])
    elif w2_input_scale is not None:
        expected = f"None for {config.recipe.name}"
        raise ValueError(_checks.message("w2_input_scale", expected, "an array"))
    if biases is not None:
        fields |= _bias_fields(config, biases, layout, like=fields["w2_weight"])
    if experts != config.num_experts:
        split = split_of(fields)
        fields = {name: take_rows(array, slots, split) for name, array in fields.items()}
    fused = None if shared is None else _fused(config, shared)
    weights = ExpertWeights(ExpertMatrices(**fields), fused, config.weight_format.name, layout)
    check_weights(config, weights)
    return weights


def counted(what: str, fields: dict[str, Array]) -> dict[str, Array]:
    """`fields` without the numbers of rounded weights, which are logged if they are known.

    Args:
        what: was done, for the log.
        fields: of parameters, with `ROUNDED` in a packed layout.
    """
    rounded = fields.pop(ROUNDED, None)
    if rounded is not None and not isinstance(rounded, Tracer):
        log_rounded(what, int(np.asarray(rounded).sum(dtype=np.int64)))
    return fields


def _num_experts(config: ExpertSpec, gate: Array) -> int:
    experts = gate.shape[0] if getattr(gate, "ndim", 0) == 3 else config.logical_experts
    return config.num_experts if experts == config.num_experts else config.logical_experts


def _check_parts(parts: dict[str, Array], lead: tuple[int, ...], inter: int, hidden: int) -> None:
    sizes = dict(gate=(inter, hidden), up=(inter, hidden), down=(hidden, inter))
    for name, array in parts.items():
        _checks.shape(name, array, (*lead, *sizes[name]))
        _checks.dtype(name, array, _FLOAT_DTYPES)
        check_finite(name, array)


def check_finite(name: str, array: Array) -> None:
    """Raises ValueError for a concrete array with NaN or infinity; tracers pass."""
    if isinstance(array, Tracer):
        return
    with jax.ensure_compile_time_eval():  # also of what a trace closes over
        is_finite = bool(jnp.isfinite(array).all())
    if not is_finite:
        raise ValueError(_checks.message(name, "finite values", "NaN or infinity"))


def _input_scales(scales: Array | None, like: Array) -> Array:
    """The scales, on the devices of the scales `like`."""
    if scales is None:
        # By rows: traced over Explicit axes, zeros_like alone is not split from JAX 0.12 on.
        return by_rows(jnp.zeros_like, like)
    _checks.shape("w2_input_scale", scales, like.shape)
    _checks.dtype("w2_input_scale", scales, ["float32"])
    check_finite("w2_input_scale", scales)
    return by_rows(_same, jnp.asarray(scales), like=like)


def _same(array: Array) -> Array:
    return array


def _bias_fields(
    config: ExpertSpec, biases: Matrices, layout: str, *, like: Array
) -> dict[str, Array]:
    sizes = (config.intermediate_size, config.intermediate_size, config.hidden_size)
    for name, bias, size in zip(("gate bias", "up bias", "down bias"), biases, sizes, strict=True):
        _checks.shape(name, bias, (like.shape[0], size))
        _checks.dtype(name, bias, _FLOAT_DTYPES)
        check_finite(name, bias)
    arrays = tuple(jnp.asarray(bias, jnp.float32) for bias in biases)
    return by_rows(_stored_biases, arrays, like=like, layout=layout)


def _stored_biases(biases: Matrices, *, layout: str) -> dict[str, Array]:
    gate, up, down = biases
    rows = layouts.w13_to_kernel(jnp.concatenate([gate, up], axis=-1), layout, axis=-1)
    return dict(w13_bias=layouts.split_rows(rows, layout, axis=-1), w2_bias=down)


def _fused(config: ExpertSpec, shared: Matrices) -> ExpertMatrices:
    name = config.weight_format.name
    hint = "pass the shared expert to mega_moe as a function instead"
    if config.shared_format is None:
        expected = f"None: {name} kernels fuse no shared expert"
        raise ValueError(_checks.message("shared", expected, "matrices", hint))
    if not config.num_shared_experts:
        expected = "None where config.num_shared_experts is 0"
        raise ValueError(_checks.message("shared", expected, "matrices", hint))
    parts = dict(zip(("gate", "up", "down"), shared, strict=True))
    sizes = dict(gate=(config.shared_size, config.hidden_size))
    sizes |= dict(up=sizes["gate"], down=sizes["gate"][::-1])
    for part, array in parts.items():
        _checks.shape(f"shared {part}", array, sizes[part])
        _checks.dtype(f"shared {part}", array, _FLOAT_DTYPES)
        check_finite(f"shared {part}", array)
    form = WEIGHT_FORMATS[config.shared_format]
    one = {part: jnp.asarray(array)[None] for part, array in parts.items()}
    fields = by_rows(_quantize, one, form=form, layout=INTERLEAVE_8)
    return ExpertMatrices(**{name: array[0] for name, array in fields.items()})


def _quantize(parts: dict[str, Array], *, form: WeightFormat, layout: str) -> dict[str, Array]:
    def one(expert: dict[str, Array]) -> dict[str, Array]:
        w13 = jnp.concatenate([expert["gate"], expert["up"]], axis=0)
        return expert_fields(w13, expert["down"], form, layout)

    return lax.map(one, {name: jnp.asarray(array) for name, array in parts.items()})


def expert_fields(w13: Array, w2: Array, form: WeightFormat, layout: str) -> dict[str, Array]:
    first = matrix_fields("w13_weight", w13, form, layout)
    fields = first | matrix_fields("w2_weight", w2, form, layout)
    if ROUNDED in fields:
        fields[ROUNDED] = first[ROUNDED] + fields[ROUNDED]
    return fields


def matrix_fields(
    name: str, w: Float[Array, "n k"], form: WeightFormat, layout: str
) -> dict[str, Array]:
    """One matrix quantised into kernel layout: the `ExpertMatrices` fields that start with `name`;
    in a packed layout with `ROUNDED`, int32, how many quantised weights the kernel has otherwise.

    Args:
        name: ``"w13_weight"``, gate rows then up rows, or ``"w2_weight"``.
        w: a float matrix.
        form: the target.
        layout: of the parameters.
    """
    is_w13 = name == "w13_weight"
    to_rows = partial(layouts.w13_to_kernel, layout=layout) if is_w13 else lambda rows: rows
    quantised = quantize_matrix(w, form)
    split = partial(layouts.split_rows, layout=layout if is_w13 else INTERLEAVE_8)
    if layout in PACKED_LAYOUTS:
        codes, scale = jnp.asarray(quantised.weight), jnp.asarray(quantised.scale)
        stored, factor, rounded = PACKED_LAYOUTS[layout].packed(
            codes, scale, w13=is_w13, global_scale=quantised.global_scale
        )
        return {name: stored, f"{name}_scale_2": factor, ROUNDED: rounded}
    fields = {name: split(to_rows(jnp.asarray(quantised.weight)))}
    if quantised.scale is not None:
        scale = jnp.asarray(quantised.scale)
        if form.weight.packs_scales:
            scale = split(layouts.w2_scale_to_kernel(to_rows(scale)), axis=-1)
        fields[f"{name}_scale"] = scale
    if quantised.global_scale is not None:
        fields[f"{name}_scale_2"] = jnp.asarray(quantised.global_scale)
    return fields


def stored_matrix(
    weight: Array, scale: Array | None, form: WeightFormat, *, w13: bool, layout: str
) -> Float[Array, "*e n k"]:
    """Decoded values of a stored matrix, rows in stored order, factors of whole experts left out.

    Args:
        weight: [..., N, K / v], or with the rows in tiles, of `ExpertMatrices`.
        scale: the block scales that belong to it.
        form: its format.
        w13: whether rows are gate and up.
        layout: of the parameters.

    Returns:
        [..., N, K], bfloat16 where that holds every value, else (fp8_block) float32.
    """
    if layout in PACKED_LAYOUTS:
        return PACKED_LAYOUTS[layout].values(weight)
    if w13:
        weight = layouts.join_rows(weight, layout)
    if scale is None:
        return weight
    if form.weight.scale == "float32":
        values = weight.astype(jnp.float32)
        for factor in scale_factors(scale):
            rows = jnp.repeat(jnp.repeat(factor, 128, axis=-2), 128, axis=-1)
            values = values * (layouts.w13_to_kernel(rows, layout) if w13 else rows)
        return values
    if w13:
        scale = layouts.join_rows(scale, layout, axis=-1)
    scales = layouts.w2_scale_from_kernel(scale)
    if form.weight.scale == "e4m3":
        scales = lax.bitcast_convert_type(scales, jnp.float8_e4m3fn)
        values = quantization.dequantize_nvfp4(weight, scales, jnp.float32(1))
    elif form.weight.values_per_element == 2:
        values = quantization.dequantize_mxfp4(weight, scales)
    else:
        values = quantization.dequantize_mxfp8(weight, scales)
    return values.astype(jnp.bfloat16)


def dequantize_experts(config: ExpertSpec, weights: ExpertWeights) -> Matrices:
    """The float32 matrices that the weights stand for, the inverse of `quantize_experts`; columns
    with folded biases are 0.

    Args:
        config: the layer.
        weights: its parameters, all experts or one rank's; split over devices or not.

    Returns:
        gate [E, I, H], up [E, I, H] and down [E, H, I], E the physical experts in `weights`, on the
        devices of their parameters.
    """
    check_config(config, ExpertSpec)
    check_kind(weights)
    if weights.layout in GROUPED_LAYOUTS:
        weights = from_grouped(weights)
    weights = unfold_biases(weights)
    return by_rows(_dequantised, weights.routed, form=config.weight_format, layout=weights.layout)


def _dequantised(routed: ExpertMatrices, *, form: WeightFormat, layout: str) -> Matrices:
    w13, w2 = _decoded(routed, form, layout)
    if routed.w13_weight_scale_2 is not None:
        w13 = w13 * routed.w13_weight_scale_2[:, None, None]
        w2 = w2 * routed.w2_weight_scale_2[:, None, None]
    return *layouts.gate_and_up(w13, layout), w2


def dequantize_biases(weights: ExpertWeights) -> dict[str, Array]:
    """gate_bias [E, I], up_bias [E, I] and down_bias [E, H] in float32, folded ones bit for bit;
    empty without biases."""
    weights = unfold_biases(weights)
    routed, layout = weights.routed, weights.layout
    if routed.w13_bias is None:
        return {}
    gate, up = by_rows(_read_bias, routed.w13_bias, layout=layout)
    return dict(gate_bias=gate, up_bias=up, down_bias=routed.w2_bias)


def _read_bias(bias: Array, *, layout: str) -> tuple[Array, Array]:
    if layout in GROUPED_LAYOUTS:
        gate, up = jnp.split(bias, 2, axis=-1)
        return gate, up
    return layouts.gate_and_up(layouts.join_rows(bias, layout, axis=-1), layout, axis=-1)


def dequantize_shared(config: ExpertSpec, weights: ExpertWeights) -> Matrices:
    """The float32 gate [S, H], up [S, H] and down [H, S] of the fused shared expert.

    Raises:
        ValueError: the weights hold none.
    """
    shared = weights.shared
    if shared is None or config.shared_format is None:
        raise ValueError(_checks.message("weights", "a fused shared expert", "none"))
    w13, w2 = _decoded(shared, WEIGHT_FORMATS[config.shared_format], INTERLEAVE_8)
    return *layouts.gate_and_up(w13, INTERLEAVE_8), w2


def _decoded(matrices: ExpertMatrices, form: WeightFormat, layout: str) -> tuple[Array, Array]:
    """w13 and w2 in float32, rows in stored order, factors of whole experts left out."""
    w13 = stored_matrix(
        matrices.w13_weight, matrices.w13_weight_scale, form, w13=True, layout=layout
    )
    w2 = stored_matrix(matrices.w2_weight, matrices.w2_weight_scale, form, w13=False, layout=layout)
    return w13.astype(jnp.float32), w2.astype(jnp.float32)
