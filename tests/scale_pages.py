"""Scales of a fused shared expert's tokens as its kernel reads them, in NumPy's terms: an oracle of
the staging kernel."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_megamoe import _checks
from jax_megamoe.numerics.elements import pack_words


def shared_scale_rows(num_tokens: int, block_m: int) -> np.ndarray:
    """Where each token's scales stand in a fused shared expert's scale pages, int64 [num_tokens].

    Each tile of `block_m` tokens has a page of `block_m` rows rounded up to 128, in the tensor
    core's row order: within 128 rows, 32 j + i at 4 i + j.
    """
    token = np.arange(num_tokens)
    tile, row = np.divmod(token, block_m)
    page = -(-block_m // 128) * 128
    return tile * page + row // 128 * 128 + row % 32 * 4 + row % 128 // 32


def shared_scale_pages(scales: ArrayLike, block_m: int, num_rows: int | None = None) -> jax.Array:
    """Token scale bytes [T, K / 32] as a fused shared expert's pages, int32 [K / 128, num_rows],
    rows contiguous.

    `num_rows` defaults to the pages in use; rows that no token has are 0.

    Raises:
        TypeError: the scales are not bytes.
        ValueError: K / 32 is not a multiple of 4, or `num_rows` is too small.
    """
    words = pack_words(jnp.asarray(scales))
    rows = shared_scale_rows(words.shape[0], block_m)
    used = -(-words.shape[0] // block_m) * (-(-block_m // 128) * 128)
    num_rows = used if num_rows is None else num_rows
    _checks.at_most("scale rows in use", used, num_rows, "num_rows")
    return jnp.zeros((words.shape[1], num_rows), jnp.int32).at[:, rows].set(words.T)
