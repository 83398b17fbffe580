"""E2M1 codes one by one, as a reader writes it first."""

from typing import Any

import numpy as np

_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def decode_e2m1(codes: Any) -> np.ndarray:
    """float32 values of codes 0 to 15."""
    codes = np.asarray(codes)
    return np.where(codes & 8, np.float32(-1), np.float32(1)) * _MAGNITUDES[codes & 7]


def unpack_e2m1(packed: Any) -> np.ndarray:
    """The codes [..., K] in bytes [..., K / 2], even k in the low nibble."""
    packed = np.asarray(packed)
    pairs = np.stack([packed & 15, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])
