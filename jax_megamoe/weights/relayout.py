"""Parameters in the layout of another kernel."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_megamoe import _checks
from jax_megamoe.formats import (
    FLASHINFER_MXFP4,
    FLASHINFER_NVFP4,
    GROUPED_LAYOUTS,
    INTERLEAVE_8,
    SGL_FP4,
)
from jax_megamoe.mesh import by_rows
from jax_megamoe.weights import layout as layouts
from jax_megamoe.weights.experts import ROUNDED, counted
from jax_megamoe.weights.folded_biases import unfold_biases
from jax_megamoe.weights.packed import PACKED_LAYOUTS
from jax_megamoe.weights.params import W13_ROWS, ExpertWeights, check_kind
from jax_megamoe.weights.regroup import from_grouped, to_grouped


def to_layout(weights: ExpertWeights, layout: str) -> ExpertWeights:
    """Parameters in the layout of another kernel.

    sgl's and vllm's NVFP4 kernels read different row orders, which hold exactly the same values.
    FlashInfer's kernels read codes and scales from one array, for the recipes mxfp4_block and
    nvfp4_block: of MXFP4, weights that lie too far below the largest of their expert and matrix are
    rounded; of NVFP4, scales that leave E4M3's normal numbers. A warning counts them. Each expert's
    rows stay on its device.

    The implementation ``grouped`` has layouts of its own: ``"humming_fp8"`` beside fp8_block
    activations, else ``"humming_bf16"``. MXFP4 in the first keeps 12 powers of two of its block
    scales under a second scale, of a matrix where that changes no value, else of a row; blocks
    further below their row's largest are rounded.

    Args:
        weights: the parameters of a layer.
        layout: ``"sgl_fp4"`` for sgl's NVFP4 kernel, ``"interleave8"`` for vllm's and for the
            recipe mxfp4, ``"flashinfer_mxfp4"`` or ``"flashinfer_nvfp4"`` for FlashInfer's,
            ``"humming_fp8"`` or ``"humming_bf16"`` for implementation grouped.

    Raises:
        ValueError: an unknown layout, or one that the format has not.
    """
    check_kind(weights)
    _checks.one_of("layout", layout, (*layouts.W13_LAYOUTS, *GROUPED_LAYOUTS))
    if layout == weights.layout:
        return weights
    weights = unfold_biases(weights)
    if weights.layout in GROUPED_LAYOUTS:
        return to_layout(from_grouped(weights), layout)
    if layout in GROUPED_LAYOUTS:
        plain = weights
        if weights.layout in PACKED_LAYOUTS:
            plain = to_layout(weights, INTERLEAVE_8)
        return to_grouped(plain, layout)
    known = _LAYOUTS_OF.get(weights.format, (INTERLEAVE_8,))
    _checks.one_of(f"layout of {weights.format}", layout, known)
    if layout in PACKED_LAYOUTS or weights.layout in PACKED_LAYOUTS:
        return _repacked(weights, layout)
    routed = weights.routed
    arrays = {name: array for name, array in routed.arrays().items() if name in W13_ROWS}
    moved: dict[str, Any] = by_rows(_moved_rows, arrays, old=weights.layout, new=layout)
    return replace(weights.with_routed(**moved), layout=layout)


_LAYOUTS_OF = {
    "mxfp4": (INTERLEAVE_8, FLASHINFER_MXFP4),
    "nvfp4": (INTERLEAVE_8, SGL_FP4, FLASHINFER_NVFP4),
}


def _repacked(weights: ExpertWeights, layout: str) -> ExpertWeights:
    """`to_layout` from or to a packed layout; a bias moves with its rows."""
    arrays = weights.routed.arrays()
    names = [name for name in arrays if name.startswith(("w13_weight", "w2_weight"))]
    matrices = {name: arrays[name] for name in names}
    made = counted("to_layout", by_rows(_repack, matrices, old=weights.layout, new=layout))
    fields: dict[str, Any] = dict.fromkeys(
        ("w13_weight_scale", "w2_weight_scale", "w13_weight_scale_2", "w2_weight_scale_2")
    )
    fields |= dict(made, w2_input_scale=None)
    if weights.format == "nvfp4" and layout not in PACKED_LAYOUTS:
        fields["w2_input_scale"] = by_rows(jnp.zeros_like, made["w2_weight_scale_2"])
    if weights.routed.w13_bias is not None:
        bias = dict(w13_bias=weights.routed.w13_bias)
        fields |= by_rows(_moved_rows, bias, old=weights.layout, new=layout)
    return replace(weights.with_routed(**fields), layout=layout)


def _repack(arrays: dict[str, Array], *, old: str, new: str) -> dict[str, Array]:
    """Routed matrices of one layout in another, an expert at a time."""

    def one(expert: dict[str, Array]) -> dict[str, Array]:
        fields: dict[str, Array] = {}
        rounded = jnp.int32(0)
        for name in ("w13_weight", "w2_weight"):
            is_w13 = name == "w13_weight"
            codes, scales, outer = _checkpoint_order(expert, name, old)
            if new in PACKED_LAYOUTS:
                stored, outer, count = PACKED_LAYOUTS[new].packed(
                    codes, scales, w13=is_w13, global_scale=outer
                )
                fields[name], rounded = stored, rounded + count
            else:
                to_rows = partial(layouts.w13_to_kernel, layout=new) if is_w13 else lambda a: a
                split = partial(layouts.split_rows, layout=new if is_w13 else INTERLEAVE_8)
                fields[name] = split(to_rows(codes))
                words = layouts.w2_scale_to_kernel(to_rows(scales))
                fields[f"{name}_scale"] = split(words, axis=-1)
            if outer is not None:
                fields[f"{name}_scale_2"] = outer
        return fields | ({ROUNDED: rounded} if new in PACKED_LAYOUTS else {})

    return lax.map(one, arrays)


def _checkpoint_order(
    expert: dict[str, Array], name: str, layout: str
) -> tuple[Array, Array, Array | None]:
    """Codes, scale bytes and NVFP4's global scale of a stored matrix, gate rows first."""
    outer = expert.get(f"{name}_scale_2")
    if layout not in PACKED_LAYOUTS:
        order = layout if name == "w13_weight" else INTERLEAVE_8
        codes = layouts.join_rows(expert[name], order)
        words = layouts.join_rows(expert[f"{name}_scale"], order, axis=-1)
        scales = layouts.w2_scale_from_kernel(words)
    else:
        codes, scales = PACKED_LAYOUTS[layout].unpack(expert[name])
        if outer is not None and PACKED_LAYOUTS[layout].weight_format == "mxfp4":
            exponents = lax.bitcast_convert_type(outer, jnp.int32) >> 23
            moved = scales.astype(jnp.int32) + exponents - 127
            scales, outer = jnp.clip(moved, 0, 254).astype(jnp.uint8), None
    if name == "w13_weight":
        codes, scales = (layouts.w13_from_kernel(each, layout) for each in (codes, scales))
    return codes, scales, outer


def _moved_rows(arrays: dict[str, Array], *, old: str, new: str) -> dict[str, Array]:
    """w13's arrays of one layout in another."""

    def moved(name: str, rows: Array) -> Array:
        axis = W13_ROWS[name]
        rows = layouts.join_rows(rows, old, axis)
        if name == "w13_weight_scale":
            rows = layouts.w13_scale_to_kernel(layouts.w13_scale_from_kernel(rows, old), new)
        else:
            rows = layouts.w13_to_kernel(layouts.w13_from_kernel(rows, old, axis), new, axis)
        return layouts.split_rows(rows, new, axis)

    return {name: moved(name, rows) for name, rows in arrays.items()}
