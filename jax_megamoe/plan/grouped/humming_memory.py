"""Shared memory of one of Humming's grouped products: its kernel's own struct, field by field.

A field starts at the next multiple of its alignment; empty fields take no room.
"""

from jax_megamoe.plan.arithmetic import align, ceil_div
from jax_megamoe.plan.grouped.product import BF16, Product, Tiles


def shared_memory(product: Product, tiles: Tiles) -> int:
    """Bytes of dynamic shared memory: the size of the kernel's own struct, exactly."""
    end = _channels(product, tiles) + _stages(product, tiles)
    end += tiles.block[0] * (16 if tiles.warp_spec else 8)  # row tables
    if tiles.warp_spec or tiles.use_tma:
        end = _placed(end, 8 * (tiles.stages + 2), 128)  # barriers
    if tiles.warp_spec:
        end = _placed(end, 8 * (tiles.stages + 1), 8)
    return align(end, 1024)


def _placed(offset: int, num_bytes: int, alignment: int) -> int:
    """The end of a field after `offset`; empty fields take no room."""
    return align(offset, alignment) + num_bytes if num_bytes else offset


def _stages(product: Product, tiles: Tiles) -> int:
    """The pipeline's stages and the output, which may lie in the same place."""
    (bm, bn, bk), weight, inputs = tiles.block, product.weight, product.input
    stage = bm * bk * inputs.element.bits // 8
    stage = _placed(stage, bn * bk * weight.element.bits // 8, 1024 if product.flat else 128)
    if inputs.group:
        stage = _placed(stage, ceil_div(bk, inputs.group) * (bm // 4) * 16, 128)
    # Scales of 128 x 128 blocks have room for one of every row.
    scales = ceil_div(bk, weight.group) * bn * weight.scale.bits // 8
    stage = align(_placed(stage, scales, 128), 1024)
    parts = bk // tiles.warp[2]
    kept = (parts - 1 if parts <= 4 else parts // 2) if parts > 1 else 0
    sums = bm // tiles.warp[0] * bn * 64 * kept
    output = 2 * bm * bn
    before = 0 if tiles.reuse_stages else tiles.stages * stage
    return align(max(tiles.stages * stage, before + max(sums, output)), 1024)


def _channels(product: Product, tiles: Tiles) -> int:
    """What a tile has one of for each row or column."""
    bm, bn = tiles.block[:2]
    end = _placed(0, 2 * bn * (product.second_scale == "channel"), 128)
    end = _placed(end, 2 * bn * product.has_bias, 128)
    per_row = product.input.element is not BF16 and not product.input.group
    return align(_placed(end, 4 * bm * per_row, 128), 1024)
