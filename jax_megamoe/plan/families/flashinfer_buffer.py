"""The symmetric buffer of FlashInfer's SM90 FP4 kernels, and how tensor maps see it.

Offsets follow from the sizes that the kernels are instantiated with. Only the counters, up to
`zeroed_bytes`, must be zero before the first launch.
"""

from jax_megamoe.plan.arithmetic import align
from jax_megamoe.plan.families.flashinfer_heuristics import Sizes
from jax_megamoe.plan.symmetric_buffer import BufferLayout, RegionStack

TOKEN_MULTIPLE = 4
"""max_num_tokens is rounded up to this: else the pool may start off the 16 bytes that TMA needs."""

_SIGNAL_BYTES = 128
_SMALLEST_TILE = 8


def buffer_layout(
    sizes: Sizes, pool_tokens: int | None = None, scale_pool_tokens: int | None = None
) -> BufferLayout:
    """The buffer; the same on every rank.

    ``x``, ``x_sf`` and the top-k regions are filled before a launch.

    Args:
        sizes: max_num_tokens as the kernel is told it.
        pool_tokens: rows for received tokens; None: as many as in `Sizes`.
        scale_pool_tokens: row stride of the received tokens' scales; None: pool_tokens, as scales
            lie by pool row whatever the tile. FlashInfer's host reserves 16 times as much.
    """
    pool = sizes.pool_tokens if pool_tokens is None else pool_tokens
    scales = pool if scale_pool_tokens is None else scale_pool_tokens
    tokens, hidden, width = sizes.max_num_tokens, sizes.hidden_size, sizes.intermediate_size
    stack = RegionStack()
    stack.add("workspace", "uint8", _workspace_bytes(sizes))
    stack.add("x", "float8_e4m3fn", tokens, hidden)
    stack.add("x_sf", "float32", tokens, hidden // 128)
    stack.add("topk_idx", "int64", tokens, sizes.top_k)
    stack.add("topk_weights", "float32", tokens, sizes.top_k)
    stack.add("l1_acts", "float8_e4m3fn", pool, hidden)
    stack.add_columns("l1_acts_sf", "float32", scales, hidden // 128)
    stack.add("l1_topk_weights", "float32", pool)
    stack.add("l2_acts", "float8_e4m3fn", pool, width)
    # Tiles of 128 rows have a scale every 64 columns.
    stack.add_columns("l2_acts_sf", "float32", scales, width // 64)
    stack.add("combine", "bfloat16", sizes.top_k, tokens, hidden)
    return stack.finish(tokens)


def zeroed_bytes(sizes: Sizes) -> int:
    """Bytes of signals and counters at the start of the buffer."""
    blocks = sizes.pool_tokens // _SMALLEST_TILE
    counts = 16 * sizes.num_experts + 2 * align(8 * sizes.local_experts, 128)
    return _SIGNAL_BYTES + counts + 4 * align(blocks, 2) + 8 * blocks


def _workspace_bytes(sizes: Sizes) -> int:
    """Counters, source indices of received rows, and pool metadata."""
    indices = 4 * sizes.num_experts * sizes.num_ranks * sizes.max_num_tokens
    return align(zeroed_bytes(sizes) + indices + 12 * sizes.pool_tokens, 16)
