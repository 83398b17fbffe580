"""Biases of the first matmul as columns of its matrix, for kernels that add none.

A model whose hidden size is filled up leaves columns of w13 that multiply zeros. A constant in the
last of the token's columns and the bias in the weights' make the matmul add the bias in its own
float32 accumulator. In block-scaled formats a bias has one scale group of 32 columns: an integer of
at most 255 half units, its 8 significant bits, under the power of two that makes the half unit its
last bit.

* MXFP4: each E2M1 column holds 0, 1, 2, 3, 4, 6, 8 or 12 half units; 22 columns reach 255.
* MXFP8: an E4M3 column holds the upper four bits, another the lower four.
* BF16: one column holds the bias.

The constant is 2^-5 in MX formats: with it the powers of two of all finite bfloat16 biases, from
the smallest subnormal's to the largest's, lie within UE8M0's range. MXFP8 tokens hold 2^-5 exactly,
under a scale of their own, as no other value is in the group. BF16's constant is 1.

Everything here is done on integers: exact on every backend, subnormals and negative zeros too. What
float32 sums make of them is exact from 2^-112 on; below, products may be subnormal. Columns are up
to 32 times the bias: `xla` decodes them to bfloat16, whose range they leave from 2^127 on in MXFP4
and from 2^123 on in MXFP8.
"""

import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, BFloat16, Float32, Int32, UInt8

from jax_megamoe import _checks
from jax_megamoe.config import ExpertSpec
from jax_megamoe.formats import GROUPED_LAYOUTS
from jax_megamoe.mesh import by_rows
from jax_megamoe.plan.folding import COLUMNS, unfoldable
from jax_megamoe.weights.layout import UTCCP
from jax_megamoe.weights.params import ExpertWeights, check_kind, check_weights

_GROUP = 32
"""Columns under one scale in MXFP4 and MXFP8, a scale byte for each."""


def mxfp4_columns(
    biases: BFloat16[Array, "*rows"],
) -> tuple[UInt8[Array, "*rows pairs"], UInt8[Array, "*rows"]]:
    """Biases as 32 E2M1 columns each, and the group's UE8M0 exponent.

    Args:
        biases: finite bfloat16 [...].

    Returns:
        uint8 [..., 16], pairs of codes, the even column in the low nibble; uint8 [...]. The columns
        times 2^-5 sum to the bias; all carry its sign, a zero's too.
    """
    sign, half_units, exponent = _parts(biases)
    whole, rest = half_units // 12, half_units % 12
    # The largest magnitude within the rest, then what is left, at most 3: its own code.
    first = jnp.where(rest < 6, jnp.minimum(rest, 4), jnp.where(rest < 8, 5, 6))
    second = rest - _half_units_of(first)
    column = jnp.arange(_GROUP, dtype=jnp.int32).reshape(*[1] * biases.ndim, _GROUP)
    after = column - whole[..., None]
    code = jnp.where(after < 0, 7, jnp.where(after == 0, first[..., None], 0))
    code = jnp.where(after == 1, second[..., None], code) | (sign << 3)[..., None]
    pairs = code.reshape(*biases.shape, _GROUP // 2, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).astype(jnp.uint8), exponent.astype(jnp.uint8)


def mxfp4_biases(
    columns: UInt8[Array, "*rows pairs"], exponents: UInt8[Array, "*rows"]
) -> BFloat16[Array, "*rows"]:
    """The inverse of `mxfp4_columns`, bit for bit."""
    pairs = columns.astype(jnp.int32)
    codes = jnp.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], _GROUP)
    half_units = _half_units_of(codes & 7).sum(axis=-1)
    return _whole(codes[..., 0] >> 3, half_units, exponents)


def _half_units_of(magnitude: Array) -> Array:
    """Half units in an E2M1 magnitude (0 to 7): 0, 1, 2, 3, 4, 6, 8, 12."""
    return jnp.where(magnitude < 2, magnitude, (magnitude & 1 | 2) << (magnitude >> 1) >> 1)


def mxfp8_columns(
    biases: BFloat16[Array, "*rows"],
) -> tuple[UInt8[Array, "*rows columns"], UInt8[Array, "*rows"]]:
    """Biases as 32 E4M3 columns each, of which two are not 0, and the group's UE8M0 exponent.

    Args:
        biases: finite bfloat16 [...].

    Returns:
        uint8 [..., 32], bits of float8_e4m3fn; uint8 [...]. The columns times 2^-5 sum to the bias;
        all carry its sign, a zero's too.
    """
    sign, half_units, exponent = _parts(biases)
    upper, lower = _e4m3(half_units >> 4, _UPPER), _e4m3(half_units & 15, _LOWER)
    zero = jnp.zeros_like(upper)
    columns = jnp.stack([upper, lower, *[zero] * (_GROUP - 2)], axis=-1) | (sign << 7)[..., None]
    return columns.astype(jnp.uint8), exponent.astype(jnp.uint8)


def mxfp8_biases(
    columns: UInt8[Array, "*rows columns"], exponents: UInt8[Array, "*rows"]
) -> BFloat16[Array, "*rows"]:
    """The inverse of `mxfp8_columns`, bit for bit."""
    bits = columns.astype(jnp.int32)
    upper, lower = _integer(bits[..., 0], _UPPER), _integer(bits[..., 1], _LOWER)
    return _whole(bits[..., 0] >> 7, 16 * upper + lower, exponents)


_UPPER, _LOWER = 10, 6
"""E4M3 exponent fields of 8 and of a half: what 1 stands for in the upper and lower four bits."""


def _e4m3(integer: Array, one: int) -> Array:
    """E4M3 bits of an integer below 16 times the power of two with the exponent field `one`."""
    binade = sum(((integer >= limit).astype(jnp.int32) for limit in (2, 4, 8)), jnp.int32(0))
    bits = (binade + one) << 3 | integer << (3 - binade) & 7
    return jnp.where(integer == 0, 0, bits)


def _integer(bits: Array, one: int) -> Array:
    """The inverse of `_e4m3`; the sign is passed over."""
    field = bits >> 3 & 15
    return jnp.where(field == 0, 0, (bits & 7 | 8) >> jnp.clip(one + 3 - field, 0, 31))


def _parts(biases: Array) -> tuple[Array, Array, Array]:
    """Sign, integer of half units and UE8M0 exponent byte, int32.

    A bfloat16 is +-n * 2^(e - 134) with e the exponent field, or 1 for a subnormal, and n < 256.
    Half a unit under the byte b, times 2^-5, is 2^(b - 127 - 1 - 5): so b is e - 1.
    """
    _checks.dtype("biases", biases, ["bfloat16"])
    bits = lax.bitcast_convert_type(jnp.asarray(biases), jnp.uint16).astype(jnp.int32)
    field = bits >> 7 & 0xFF
    half_units = bits & 0x7F | (field > 0).astype(jnp.int32) << 7
    return bits >> 15, half_units, jnp.maximum(field, 1) - 1


def _whole(sign: Array, half_units: Array, exponents: Array) -> Array:
    """The inverse of `_parts`."""
    is_normal = half_units >= 128
    field = jnp.where(is_normal, exponents.astype(jnp.int32) + 1, 0)
    bits = sign << 15 | field << 7 | half_units & 0x7F
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


def fold_biases(config: ExpertSpec, weights: ExpertWeights) -> ExpertWeights:
    """Parameters with the first biases in the last columns of w13, which multiplied zeros.

    `mega_moe` puts the constant into the tokens' columns and adds the second biases to the
    output, so that kernels without biases run the layer. `unfold_biases` is the inverse.

    Args:
        config: the layer; its hidden_size is larger than the model's.
        weights: its parameters with biases of bfloat16 values, in the layout of a fused kernel.

    Raises:
        ValueError: parameters that are not the config's, without biases or with folded ones, in a
            layout of the grouped products, or with a fused shared expert; last columns that are not
            0; biases that are no finite bfloat16 values.
        NotImplementedError: a recipe that holds no bias exactly.
    """
    check_weights(config, weights)
    column = _column(config, weights)
    arrays = _first(weights) | dict(bias=weights.routed.w13_bias)
    folded, is_bfloat16, is_free = by_rows(_folded, arrays, form=weights.format, column=column)
    if not isinstance(is_free, Tracer):
        if not bool(is_free.all()):
            expected = f"zeros in the last {COLUMNS[weights.format]} columns"
            hint = "make the config with a larger hidden_size than the model's"
            raise ValueError(_checks.message("weights.routed.w13_weight", expected, "others", hint))
        if not bool(is_bfloat16.all()):
            expected = "finite bfloat16 values, which a group of columns holds exactly"
            hint = "round them, or leave the biases as they are: xla runs them"
            raise ValueError(_checks.message("weights.routed.w13_bias", expected, "others", hint))
    return _with_first(weights, folded)


def with_free_columns(weights: ExpertWeights) -> ExpertWeights:
    """Parameters with zeros in the columns that `fold_biases` uses: drawn ones have none."""
    columns = COLUMNS[weights.format] // (2 if weights.format == "mxfp4" else 1)
    freed = by_rows(_freed, weights.routed.w13_weight, columns=columns)
    return weights.with_routed(w13_weight=freed)


def _freed(weight: Array, *, columns: int) -> Array:
    return weight.at[..., -columns:].set(jnp.zeros((), weight.dtype))


def folded_as(like: ExpertWeights, config: ExpertSpec, weights: ExpertWeights) -> ExpertWeights:
    """Parameters with biases, folded where those of `like` are."""
    return fold_biases(config, weights) if like.folds_biases else weights


def unfold_biases(weights: ExpertWeights) -> ExpertWeights:
    """The inverse of `fold_biases`, biases bit for bit; others come back as they are.

    The columns are 0 then, under the scales of the columns before them.
    """
    check_kind(weights)
    if not weights.folds_biases:
        return weights
    plain = by_rows(_unfolded, _first(weights), form=weights.format, column=_last(weights))
    return _with_first(weights, plain)


def _first(weights: ExpertWeights) -> dict[str, Array]:
    """w13's weight, and its scale where it has one."""
    arrays = dict(weight=weights.routed.w13_weight, scale=weights.routed.w13_weight_scale)
    return {name: array for name, array in arrays.items() if array is not None}


def _with_first(weights: ExpertWeights, arrays: dict[str, Array]) -> ExpertWeights:
    """Parameters with this weight, scale and bias of w13; None for those that are not given."""
    return weights.with_routed(
        w13_weight=arrays["weight"],
        w13_weight_scale=arrays.get("scale"),
        w13_bias=arrays.get("bias"),
    )


def _last(weights: ExpertWeights) -> int:
    """The first of the last columns."""
    values = 2 if weights.format == "mxfp4" else 1
    return values * weights.routed.w13_weight.shape[-1] - COLUMNS[weights.format]


def _column(config: ExpertSpec, weights: ExpertWeights) -> int:
    reason = unfoldable(config)
    if reason is not None:
        raise reason.error()
    if weights.layout in GROUPED_LAYOUTS:
        expected = "the layout of a fused kernel: the grouped products add biases"
        raise ValueError(_checks.message("weights.layout", expected, repr(weights.layout)))
    if weights.routed.w13_bias is None:
        got = "folded ones" if weights.folds_biases else "none"
        raise ValueError(_checks.message("weights.routed.w13_bias", "biases", got))
    if weights.shared is not None:
        expected = "none beside folded biases: it would multiply their constant"
        hint = "pass it to mega_moe as a function"
        raise ValueError(_checks.message("weights.shared", expected, "a fused one", hint))
    return _last(weights)


def _folded(
    arrays: dict[str, Array], *, form: str, column: int
) -> tuple[dict[str, Array], Array, Array]:
    """The arrays with folded biases; of each expert whether they are finite bfloat16, and whether
    the columns were 0."""

    def of_expert(flags: Array) -> Array:
        return flags.reshape(flags.shape[0], -1).all(axis=1)

    weight, bits = arrays["weight"], lax.bitcast_convert_type(arrays["bias"], jnp.uint32)
    is_finite = (bits >> 23 & 0xFF) != 0xFF
    is_bfloat16 = of_expert(is_finite & (bits & 0xFFFF == 0))
    biases = lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    if form == "bf16":
        places = slice(column, column + 1)
        is_free = of_expert(weight[..., places] == 0)
        return {"weight": weight.at[..., places].set(biases[..., None])}, is_bfloat16, is_free
    places, is_fp4 = _places(form, column), form == "mxfp4"
    columns, exponents = mxfp4_columns(biases) if is_fp4 else mxfp8_columns(biases)
    stored = lax.bitcast_convert_type(weight, jnp.uint8)
    is_free = of_expert(stored[..., places] & (0x77 if is_fp4 else 0x7F) == 0)
    weight = lax.bitcast_convert_type(stored.at[..., places].set(columns), weight.dtype)
    scale = _with_exponents(arrays["scale"], exponents, column // _GROUP)
    return {"weight": weight, "scale": scale}, is_bfloat16, is_free


def _unfolded(arrays: dict[str, Array], *, form: str, column: int) -> dict[str, Array]:
    weight = arrays["weight"]
    if form == "bf16":
        places = slice(column, column + 1)
        bias = _widened(weight[..., column])
        return {"weight": weight.at[..., places].set(jnp.zeros((), weight.dtype)), "bias": bias}
    places, group, scale = _places(form, column), column // _GROUP, arrays["scale"]
    stored = lax.bitcast_convert_type(weight, jnp.uint8)
    inverse = mxfp4_biases if form == "mxfp4" else mxfp8_biases
    biases = inverse(stored[..., places], _exponents(scale, group))
    stored = stored.at[..., places].set(jnp.uint8(0))
    return {
        "weight": lax.bitcast_convert_type(stored, weight.dtype),
        "scale": _with_exponents(scale, _exponents(scale, group - 1), group),
        "bias": _widened(biases),
    }


def _widened(biases: BFloat16[Array, "*rows"]) -> Float32[Array, "*rows"]:
    """By bits: XLA:CPU takes subnormals for zero."""
    bits = lax.bitcast_convert_type(biases, jnp.uint16).astype(jnp.uint32) << 16
    return lax.bitcast_convert_type(bits, jnp.float32)


def _places(form: str, column: int) -> slice:
    """The stored elements of the group of columns."""
    values = 2 if form == "mxfp4" else 1
    return slice(column // values, (column + _GROUP) // values)


def _exponents(scale: Int32[Array, "*e words rows"], group: int) -> UInt8[Array, "*e rows"]:
    """The exponents of one group of columns."""
    word, byte = divmod(group, 4)
    permuted = (scale[..., word, :] >> 8 * byte & 0xFF).astype(jnp.uint8)
    return UTCCP.undo(permuted, axis=-1)


def _with_exponents(
    scale: Int32[Array, "*e words rows"], exponents: UInt8[Array, "*e rows"], group: int
) -> Int32[Array, "*e words rows"]:
    """Scale words with the exponents of one group of columns."""
    word, byte = divmod(group, 4)
    permuted = UTCCP.apply(exponents, axis=-1).astype(jnp.uint32) << 8 * byte
    bits = lax.bitcast_convert_type(scale[..., word, :], jnp.uint32)
    bits = bits & jnp.uint32(0xFFFFFFFF ^ 0xFF << 8 * byte) | permuted
    return scale.at[..., word, :].set(lax.bitcast_convert_type(bits, jnp.int32))
