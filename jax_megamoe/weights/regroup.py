"""`ExpertWeights` between the mega kernels' layouts and the grouped products' own.

``humming_bf16`` is read beside BF16 rows, ``humming_fp8`` beside E4M3 rows with a float32 scale by
128. In both w13 has its gate rows first, then its up rows, biases too; and rows of w2 are padded to
a multiple of 256 with zeros. `grouped.shapes` says the shapes. Each expert is converted for
itself, so that arrays may be one rank's.
"""

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jaxtyping import Array

from jax_megamoe import _checks
from jax_megamoe.formats import (
    GROUPED_LAYOUTS,
    INTERLEAVE_8,
    WEIGHT_FORMATS,
    WeightFormat,
)
from jax_megamoe.mesh import by_rows
from jax_megamoe.weights import grouped
from jax_megamoe.weights import layout as layouts
from jax_megamoe.weights.params import ExpertWeights

_log = logging.getLogger("jax_megamoe")

_ROUTED = ("w13_weight", "w2_weight")


def _codes(weight: Array, form: WeightFormat) -> Array:
    """Codes, uint8 [..., N, K], of a stored matrix [..., N, K / v]."""
    if weight.dtype != jnp.uint8:
        weight = lax.bitcast_convert_type(jnp.asarray(weight), jnp.uint8)
    if form.weight.values_per_element == 1:
        return weight
    pairs = jnp.stack([weight & 15, weight >> 4], axis=-1)
    return pairs.reshape(*weight.shape[:-1], -1)


def _stored(codes: Array, form: WeightFormat) -> Array:
    """The inverse of `_codes`."""
    if form.weight.values_per_element == 1:
        return lax.bitcast_convert_type(codes, jnp.dtype(form.weight.storage))
    pairs = codes.reshape(*codes.shape[:-1], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


def arrange(
    name: str, weight: Array, scale: Array, form: WeightFormat, layout: str, *, by_row: bool
) -> dict[str, Array]:
    """One matrix in a layout: the fields that start with `name`.

    Args:
        name: ``"w13_weight"`` or ``"w2_weight"``.
        weight: [N, K / v] in checkpoint order, gate rows before up rows.
        scale: bytes, uint8 [N, G]; fp8_block: float32 [N / 128, K / 128].
        form: the weight format.
        layout: ``"humming_bf16"`` or ``"humming_fp8"``.
        by_row: fused MXFP4 has a second scale for each row, not one for the matrix.
    """
    codes = _codes(weight, form)
    rows = codes.shape[0]
    extra = grouped.padded_rows(rows) - rows
    codes = jnp.pad(codes, ((0, extra), (0, 0)))
    fields: dict[str, Array] = {}
    how = grouped.packing(form, layout)
    if how is not None and how.fused:
        # Padded rows are zeros; their scales are of the matrix's or the last row's binades.
        scale = jnp.pad(scale, ((0, extra), (0, 0)), mode="edge")
        fused = grouped.fuse(codes, scale, by_row=by_row)
        codes, scale = fused.codes, fused.scale
        second = grouped.second_scale(fused.lowest)
        if by_row:
            fields[f"{name}_scale_2"] = grouped.to_thirtytwos(second[..., 0]).astype(jnp.bfloat16)
        else:
            fields[f"{name}_scale_2"] = second.reshape(())
    elif form.weight.scale == "float32":
        scale = jnp.pad(scale, ((0, grouped.padded_rows(rows) // 128 - scale.shape[0]), (0, 0)))
    else:
        byte = 127 if form.weight.scale == "ue8m0" else 0
        scale = jnp.pad(scale, ((0, extra), (0, 0)), constant_values=byte)
    fields[name] = grouped.to_flat(codes) if how is None else grouped.pack(codes, how)
    turned = scale.swapaxes(-1, -2)
    by_block = form.weight.scale == "float32"
    fields[f"{name}_scale"] = turned if by_block else grouped.transpose_eights(turned)
    return fields


def restore(
    name: str, fields: dict[str, Array], form: WeightFormat, layout: str, n: int
) -> tuple[Array, Array]:
    """The inverse of `arrange` for one matrix of `n` rows: the weight and its scales.

    Scales of fused MXFP4 come back as raised; the values are the products'.
    """
    how = grouped.packing(form, layout)
    words, scale = fields[name], fields[f"{name}_scale"]
    by_block = form.weight.scale == "float32"
    scale = (scale if by_block else grouped.transpose_eights(scale)).swapaxes(-1, -2)
    padded = grouped.padded_rows(n)
    if how is None:
        codes = grouped.from_flat(words)
    else:
        k = scale.shape[-1] * form.weight.block[1]
        codes = grouped.unpack(words, how, padded, k)
        if how.fused:
            second = fields[f"{name}_scale_2"]
            if second.ndim:
                rows = grouped.to_thirtytwos(second.astype(jnp.float32))
                lowest = grouped.lowest_of(rows)[:, None]
            else:
                lowest = grouped.lowest_of(second.reshape(1, 1))
            scale = grouped.unfuse(scale, lowest)
    rows = n // 128 if by_block else n
    return _stored(codes[:n], form), scale[:rows]


def fuses_exactly(weights: ExpertWeights) -> bool:
    """Whether one second scale for each matrix of MXFP4 changes no value of it.

    Args:
        weights: in a mega kernel's layout, concrete.
    """
    form, arrays = WEIGHT_FORMATS[weights.format], _matrices(weights.routed.arrays())
    return bool(by_rows(_fuse_exactly, arrays, form=form, layout=weights.layout).all())


def _fuse_exactly(arrays: dict[str, Array], *, form: WeightFormat, layout: str) -> Array:
    """bool [E]."""

    def one(expert: dict[str, Array]) -> Array:
        parts = _checkpoint_order(expert, form, layout)
        fine = [
            grouped.fuses_exactly(_codes(weight, form), scale) for weight, scale in parts.values()
        ]
        return fine[0] & fine[1]

    return lax.map(one, arrays)


def _matrices(arrays: dict[str, Any]) -> dict[str, Any]:
    names = {*_ROUTED, *(f"{name}_scale" for name in _ROUTED)}
    return {name: array for name, array in arrays.items() if name in names}


def _checkpoint_order(
    expert: dict[str, Array], form: WeightFormat, layout: str
) -> dict[str, tuple[Array, Array]]:
    """An expert's matrices and block scales, gate rows before up rows, out of a mega kernel's."""
    parts: dict[str, tuple[Array, Array]] = {}
    for name in _ROUTED:
        weight, scale = expert[name], expert[f"{name}_scale"]
        w13 = name == "w13_weight"
        if w13:
            weight = layouts.w13_from_kernel(layouts.join_rows(weight, layout), layout)
        if form.weight.packs_scales:
            scale = layouts.join_rows(scale, layout, axis=-1) if w13 else scale
            unpack = partial(layouts.w13_scale_from_kernel, layout=layout)
            scale = (unpack if w13 else layouts.w2_scale_from_kernel)(scale)
        parts[name] = weight, scale
    return parts


def to_grouped(weights: ExpertWeights, layout: str, *, by_row: bool | None = None) -> ExpertWeights:
    """Parameters of a mega kernel's layout in one of the grouped products'.

    Args:
        weights: of any format but bf16, in ``"interleave8"`` or ``"sgl_fp4"``.
        layout: ``"humming_bf16"`` or ``"humming_fp8"``.
        by_row: MXFP4 in ``humming_fp8`` has a second scale for each row of a matrix rather than
            one for the matrix, a little slower; None: where one would change values (and for
            traced parameters). See `grouped.fuse` for what happens to blocks out of range of both.

    Raises:
        ValueError: an unknown layout, or a format that has no such layout.
    """
    form = WEIGHT_FORMATS[weights.format]
    _check(form, layout)
    if by_row is None and grouped.is_fused(form, layout):
        traced = isinstance(weights.routed.w13_weight, Tracer)
        by_row = traced or not fuses_exactly(weights)
    how = dict(form=form, old=weights.layout, new=layout, by_row=bool(by_row))
    arrays = by_rows(_arranged, _moved(weights), **how)
    return replace(weights.with_routed(**arrays), layout=layout)


def _moved(weights: ExpertWeights) -> dict[str, Array]:
    arrays = _matrices(weights.routed.arrays())
    if weights.routed.w13_bias is not None:
        arrays["w13_bias"] = weights.routed.w13_bias
    return arrays


def _check(form: WeightFormat, layout: str) -> None:
    _checks.one_of("layout", layout, GROUPED_LAYOUTS)
    formats = GROUPED_LAYOUTS[layout]
    _checks.one_of(f"format of layout {layout}", form.name, formats)


def _arranged(
    arrays: dict[str, Array], *, form: WeightFormat, old: str, new: str, by_row: bool
) -> dict[str, Array]:
    def one(expert: dict[str, Array]) -> dict[str, Array]:
        fields: dict[str, Array] = {}
        for name, (weight, scale) in _checkpoint_order(expert, form, old).items():
            fields |= arrange(name, weight, scale, form, new, by_row=by_row)
        if "w13_bias" in expert:
            bias = layouts.join_rows(expert["w13_bias"], old, axis=-1)
            fields["w13_bias"] = layouts.w13_from_kernel(bias, old, axis=-1)
        return fields

    return lax.map(one, arrays)


def from_grouped(weights: ExpertWeights, layout: str = INTERLEAVE_8) -> ExpertWeights:
    """Parameters of a grouped layout in a mega kernel's, ``"interleave8"`` or ``"sgl_fp4"``.

    The inverse of `to_grouped`; of MXFP4 in ``humming_fp8`` the scales come back as they were
    raised, and all values are the products'.

    Raises:
        ValueError: an unknown layout.
    """
    form = WEIGHT_FORMATS[weights.format]
    arrays = weights.routed.arrays()
    arrays = {name: array for name, array in arrays.items() if name in _relaid_names(form)}
    fields = by_rows(_restored, arrays, form=form, old=weights.layout, new=layout)
    dropped = {f"{name}_scale_2": None for name in _ROUTED if not form.weight.has_global_scale}
    return replace(weights.with_routed(**(dropped | fields)), layout=layout)


def _restored(
    arrays: dict[str, Array], *, form: WeightFormat, old: str, new: str
) -> dict[str, Array]:
    return lax.map(lambda expert: restored_fields(expert, form, old, new), arrays)


def in_rows(weights: ExpertWeights) -> ExpertWeights:
    """The parameters, out of a grouped layout if they are in one."""
    return from_grouped(weights) if weights.layout in GROUPED_LAYOUTS else weights


def as_grouped(like: ExpertWeights, weights: ExpertWeights) -> ExpertWeights:
    """Changed parameters in the grouped layout of `like` and of its shapes; themselves where it is
    in none.

    A warning says so where second scales of whole matrices, which `like` has, round values.
    """
    if like.layout not in GROUPED_LAYOUTS:
        return weights
    by_row = like.routed.has_row_scales
    is_fused = grouped.is_fused(WEIGHT_FORMATS[like.format], like.layout)
    if is_fused and not by_row and not fuses_exactly(weights):
        _log.warning(
            "%s: blocks of weights over %d powers of two below the largest of their matrix are "
            "rounded; load all experts anew for scales of rows",
            like.layout,
            grouped.FUSED_BINADES - 1,
        )
    return to_grouped(weights, like.layout, by_row=by_row)


def _relaid_names(form: WeightFormat) -> set[str]:
    """Fields that differ between the layouts."""
    names = {*_ROUTED, *(f"{name}_scale" for name in _ROUTED), "w13_bias"}
    if not form.weight.has_global_scale:
        names |= {f"{name}_scale_2" for name in _ROUTED}
    return names


def restored_fields(
    expert: dict[str, Array], form: WeightFormat, old: str, new: str = INTERLEAVE_8
) -> dict[str, Array]:
    """One expert's fields of a grouped layout as a mega kernel's; other fields stay as they are."""
    hidden = expert["w13_weight_scale"].shape[-2] * form.weight.block[1]
    inter = expert["w2_weight_scale"].shape[-2] * form.weight.block[1]
    changed = _relaid_names(form)
    fields = {name: array for name, array in expert.items() if name not in changed}
    for name, n in zip(_ROUTED, (2 * inter, hidden), strict=True):
        weight, scale = restore(name, expert, form, old, n)
        w13 = name == "w13_weight"
        if w13:
            weight = layouts.split_rows(layouts.w13_to_kernel(weight, new), new)
        if form.weight.packs_scales:
            pack = partial(layouts.w13_scale_to_kernel, layout=new)
            scale = (pack if w13 else layouts.w2_scale_to_kernel)(scale)
            scale = layouts.split_rows(scale, new, axis=-1) if w13 else scale
        fields[name], fields[f"{name}_scale"] = weight, scale
    if "w13_bias" in expert:
        bias = layouts.w13_to_kernel(expert["w13_bias"], new, axis=-1)
        fields["w13_bias"] = layouts.split_rows(bias, new, axis=-1)
    return fields
