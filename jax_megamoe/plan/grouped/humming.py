"""Launches of Humming's grouped product: rows named by tables, one matrix an expert.

A is [rows, K - pad_k], C [rows * top_k, N - pad_n] in BF16. ``sorted_ids`` lists flat rows of C by
expert, each expert's padded to whole blocks by any number that is no row; ``expert_ids`` has the
expert of each block, and ``num_slots`` how many slots are in use. Rows of C that no slot names
keep what was there.
"""

from dataclasses import dataclass

from jax_megamoe.plan.arithmetic import align, ceil_div
from jax_megamoe.plan.grouped import humming_unit as unit
from jax_megamoe.plan.grouped.humming_memory import shared_memory
from jax_megamoe.plan.grouped.product import E4M3, Product, Tiles
from jax_megamoe.plan.kernel import KernelSpec, LaunchConfig
from jax_megamoe.plan.launch import (
    Bool,
    KernelArgument,
    KernelLaunch,
    Pointer,
    TensorMap,
    Uint32,
)
from jax_megamoe.plan.operand import Operand
from jax_megamoe.plan.tensor_map import (
    BFLOAT16,
    INT32,
    L2_PROMOTION_NONE,
    SWIZZLE_NONE,
    UINT8,
    TensorMapSpec,
)

SOURCE = "humming"
_MAX_LOCKS_PER_TILE = 2


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Names of a product's arrays.

    Attributes:
        a, c: rows in, rows out.
        a_scale: float32 of each row, or group of a row; None for BF16.
        w, w_scale: matrices and block scales, as `weights.grouped` lays them out.
        w_scale_2: the second scales; None without.
        bias: None without.
        sorted_ids, expert_ids, num_slots: the tables.
        locks: int32, zero before and after; read with stream-K alone.
    """

    a: str
    c: str
    w: str
    w_scale: str
    a_scale: str | None = None
    w_scale_2: str | None = None
    bias: str | None = None
    sorted_ids: str = "sorted_ids"
    expert_ids: str = "expert_ids"
    num_slots: str = "num_slots"
    locks: str = "locks"


def capacity(rows: int, num_experts: int, block_m: int) -> int:
    """Most slots that `rows` rows can take."""
    return align(rows + min(rows, num_experts) * (block_m - 1), block_m)


def num_locks(num_sms: int) -> int:
    """Entries of ``locks`` for any tiles."""
    return 4 * num_sms * _MAX_LOCKS_PER_TILE


def kernel(product: Product, tiles: Tiles) -> KernelSpec:
    """What is compiled."""
    maps = unit.tensor_maps(product, tiles)
    tensors = ("A", "B", "C", "AS", "AS2", "BS", "BZP", "Bias", "BS2")
    return KernelSpec(
        SOURCE,
        compiler_arch(product.arch),
        unit.header(tiles),
        "humming",
        unit.TEMPLATE_ARGS,
        (
            *("CUtensorMap" if name in maps else "void*" for name in tensors),
            *["const uint32_t*"] * 4,
            *("CUtensorMap*", "int32_t*", "uint32_t", "uint32_t", "bool"),
        ),
        unit=unit.encoded(product, tiles),
    )


def compiler_arch(arch: int) -> str:
    """The compiler's name of an architecture: Hopper with its own instructions, Blackwell's for the
    family."""
    return f"sm_{arch}{'a' if arch == 90 else 'f' if arch >= 100 else ''}"


def launch_config(product: Product, tiles: Tiles, num_sms: int) -> LaunchConfig:
    """Grid, block and memory on a device of `num_sms` multiprocessors."""
    return LaunchConfig(
        (tiles.ctas * (tiles.num_sms or num_sms), 1, 1),
        (tiles.threads, 1, 1),
        smem=shared_memory(product, tiles),
        programmatic_serialization=tiles.pdl,
    )


def launch(
    product: Product,
    tiles: Tiles,
    names: Operands,
    *,
    rows: int,
    top_k: int,
    num_sms: int,
) -> KernelLaunch:
    """One product. `rows` are those of A; C has rows * top_k."""

    def pointer(name: str, operand: str | None) -> Pointer:
        return Pointer(name, None if operand is None else Operand(operand))

    maps = weight_maps(product, tiles, names)

    def weights(name: str, operand: str | None) -> KernelArgument:
        return TensorMap(name, maps[name]) if name in maps else pointer(name, operand)

    arguments = (
        pointer("A", names.a),
        weights("B", names.w),
        pointer("C", names.c),
        pointer("AS", names.a_scale),
        pointer("AS2", None),
        weights("BS", names.w_scale),
        pointer("BZP", None),
        weights("Bias", names.bias),
        pointer("BS2", names.w_scale_2),
        pointer("sorted_ids", names.sorted_ids),
        pointer("expert_ids", names.expert_ids),
        pointer("num_tokens_padded", names.num_slots),
        pointer("expert_layout", None),
        pointer("tensor_map_buffer", None),
        pointer("locks", names.locks if tiles.stream_k else None),
        Uint32("shape_m", rows),
        Uint32("top_k", top_k),
        Bool("use_int64_expert_layout", False),
    )
    return KernelLaunch(kernel(product, tiles), launch_config(product, tiles, num_sms), arguments)


def weight_maps(product: Product, tiles: Tiles, names: Operands) -> dict[str, TensorMapSpec]:
    """The tensor maps, by parameter."""
    n, experts = product.n, product.num_experts
    _, bn, bk = tiles.block
    scale_bytes, groups = product.weight.scale.bits // 8, product.groups
    group_type = UINT8 if scale_bytes == 1 else BFLOAT16
    maps = {
        "B": _weight_map(product, tiles, names.w),
        "BS": _map(
            names.w_scale,
            group_type,
            (16, n // 16, experts * groups),
            (16 * scale_bytes, n * scale_bytes),
            (16, bn // 16, ceil_div(bk, product.weight.group)),
        ),
    }
    if names.bias is not None:
        dims, box = (64, experts * n // 64), (64, bn // 64)
        maps["Bias"] = _map(names.bias, BFLOAT16, dims, (128,), box)
    return {name: maps[name] for name in unit.tensor_maps(product, tiles)}


def _weight_map(product: Product, tiles: Tiles, operand: str) -> TensorMapSpec:
    n, k, experts = product.n, product.k, product.num_experts
    (_, bn, bk), bits = tiles.block, product.weight.element.bits
    if product.flat:
        # Pieces of 16 bytes of each row; the rows of a warp's columns follow each other.
        wide = tiles.warp[1] if tiles.wgmma else 16
        return _map(
            operand,
            INT32,
            (64, 64 // wide, n // 64, wide // 16, k * bits // 128 * experts),
            (16 * wide, 1024, 256, 16 * n),
            (64, min(64, bn) // wide, ceil_div(bn, 64), wide // 16, bk * bits // 128),
        )
    depth = product.columns_per_word_row
    words = n * bits // 32
    return _map(
        operand,
        INT32,
        (depth, words, experts * k // depth),
        (4 * depth, n * depth * bits // 8),
        (depth, bn * bits // 32, bk // depth),
    )


def _map(
    operand: str,
    dtype: int,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
) -> TensorMapSpec:
    base = Operand(operand)
    return TensorMapSpec(
        base, dtype, dims, strides, box, SWIZZLE_NONE, l2_promotion=L2_PROMOTION_NONE
    )


def limits(product: Product, tiles: Tiles) -> str:
    """What the kernel asks of sizes and is not given; empty if nothing."""
    bits = product.input.element.bits
    checks = (
        (product.n % 64 == 0, "n a multiple of 64"),
        (product.n % tiles.block[1] == 0, f"n a multiple of {tiles.block[1]}"),
        (product.k % tiles.block[2] == 0, f"k a multiple of {tiles.block[2]}"),
        ((product.n - product.pad_n) % 8 == 0, "n without padding a multiple of 8"),
        ((product.k - product.pad_k) * bits % 128 == 0, "input rows of whole 16 bytes"),
        (
            product.input.element is not E4M3 or product.k % max(1, product.input.group) == 0,
            "groups",
        ),
    )
    return next((text for fits, text in checks if not fits), "")
