"""Layouts and per-expert factors of FlashInfer's 4-bit weights: bijective, and exact or counted."""

import jax
import ml_dtypes
import numpy as np
import pytest

from jax_megamoe.weights import flashinfer_factors as factors
from jax_megamoe.weights import flashinfer_layout as layouts

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([E2M1, -E2M1])
DECODED = {
    name: table.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    for name, table in (("mxfp4", layouts.mxfp4_decoded()), ("nvfp4", layouts.nvfp4_decoded()))
}
BLOCK = {"mxfp4": 32, "nvfp4": 16}
FIT = {"mxfp4": factors.fit_mxfp4, "nvfp4": factors.fit_nvfp4}
JITTED = {name: jax.jit(fit) for name, fit in FIT.items()}


def unpacked(codes: np.ndarray) -> np.ndarray:
    return np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)


def kernel_values(name: str, fitted: factors.Fitted) -> np.ndarray:
    """What the kernel computes with: decoded bytes times the factor, float64."""
    scales = np.repeat(np.asarray(fitted.scales), BLOCK[name], -1)
    decoded = DECODED[name][scales, unpacked(np.asarray(fitted.codes))]
    return decoded * np.asarray(fitted.factor, np.float64)[:, None, None]


def stated_values(name: str, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Codes times scales as the checkpoint means them, float64."""
    if name == "mxfp4":
        numbers = 2.0 ** (scales.astype(float) - 127)
    else:
        numbers = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return E2M1[unpacked(codes)] * np.repeat(numbers, BLOCK[name], -1)


def draw(
    name: str, rng: np.random.Generator, low: int, high: int, sparse: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Two matrices [3, 128] with scale bytes from low to high."""
    codes = rng.integers(0, 256, (2, 3, 64), dtype=np.uint8)
    if sparse:
        codes[rng.random(codes.shape) < 0.9] = 0
    return codes, rng.integers(low, high + 1, (2, 3, 128 // BLOCK[name]), dtype=np.uint8)


@pytest.mark.parametrize("jit", [False, True])
def test_layouts_are_bijective(jit: bool) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (2, 256, 192), dtype=np.uint8)
    scales = rng.integers(0, 256, (2, 256, 24), dtype=np.uint8)

    def there_and_back(codes, scales):
        tiles = layouts.mxfp4_tiles(codes, scales[..., :12])
        rows = layouts.nvfp4_rows(codes, scales)
        mixed = layouts.interleave_rows(codes)
        return (
            (tiles, rows, mixed),
            layouts.mxfp4_from_tiles(tiles),
            layouts.nvfp4_from_rows(rows),
            layouts.separate_rows(mixed),
        )

    run = jax.jit(there_and_back) if jit else there_and_back
    (tiles, rows, mixed), mx, nv, separate = run(codes, scales)
    assert tiles.shape == (2, 2, 3, layouts.TILE_BYTES)
    assert rows.shape == (2, 256, 3 * layouts.ROW_BYTES)
    np.testing.assert_array_equal(mixed[:, 16 + 8 : 16 + 16], codes[:, 128 + 8 : 128 + 16])
    for got, want in (*zip(mx, (codes, scales[..., :12])), *zip(nv, (codes, scales))):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(separate, codes)


@pytest.mark.parametrize("shape", [(127, 64), (128, 32)])
def test_tiles_are_whole(shape: tuple[int, int]) -> None:
    codes, scales = np.zeros(shape, np.uint8), np.zeros((shape[0], shape[1] // 16), np.uint8)
    with pytest.raises(ValueError, match=r"(rows|columns) of MXFP4 tiles: expected a multiple of"):
        layouts.mxfp4_tiles(codes, scales)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_mxfp4_is_exact_within_11_octaves_anywhere(jit: bool, sparse: bool) -> None:
    rng = np.random.default_rng(1)
    for low in (0, 1, 60, 115, 122, 133, 200, 243):
        codes, scales = draw("mxfp4", rng, low, low + 11, sparse)
        fitted = (JITTED if jit else FIT)["mxfp4"](codes, scales)
        assert not np.any(fitted.rounded)
        np.testing.assert_array_equal(
            kernel_values("mxfp4", fitted), stated_values("mxfp4", codes, scales)
        )


def test_mxfp4_keeps_scales_that_decode_as_they_are() -> None:
    codes, scales = draw("mxfp4", np.random.default_rng(2), 122, 133)
    fitted = factors.fit_mxfp4(codes, scales)
    np.testing.assert_array_equal(fitted.scales, scales)
    np.testing.assert_array_equal(fitted.factor, np.float32(1))


def test_mxfp4_uses_what_the_codes_leave_free() -> None:
    """Groups of 6 at the lower end and of 0.5 at the upper one: 17 octaves; zeros are free."""
    codes = np.zeros((1, 1, 64), np.uint8)
    codes[0, 0, :16], codes[0, 0, 16:32], codes[0, 0, 32:48] = 0x77, 0x91, 0x10
    scales = np.array([[[103, 120, 120, 0]]], np.uint8)
    fitted = factors.fit_mxfp4(codes, scales)
    assert fitted.rounded == 0
    assert fitted.factor == 2.0**-16
    np.testing.assert_array_equal(
        kernel_values("mxfp4", fitted), stated_values("mxfp4", codes, scales)
    )


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_mxfp4_of_any_spread_is_exact_or_counted(jit: bool, sparse: bool) -> None:
    rng = np.random.default_rng(3)
    rounded = 0
    for _ in range(40):
        low = int(rng.integers(0, 240))
        codes, scales = draw("mxfp4", rng, low, int(rng.integers(low, 255)), sparse)
        fitted = (JITTED if jit else FIT)["mxfp4"](codes, scales)
        got, want = kernel_values("mxfp4", fitted), stated_values("mxfp4", codes, scales)
        np.testing.assert_array_equal((got != want).sum((1, 2)), fitted.rounded)
        largest = np.abs(want).max((1, 2), keepdims=True)
        assert (np.abs(got - want) <= 2.0**-15 * largest).all()
        # What is stored means what the kernel makes of it.
        stored = stated_values("mxfp4", np.asarray(fitted.codes), np.asarray(fitted.scales))
        factor = np.asarray(fitted.factor, np.float64)[:, None, None]
        np.testing.assert_array_equal(stored * factor, got)
        rounded += int(np.sum(fitted.rounded))
    assert rounded


@pytest.mark.parametrize("jit", [False, True])
def test_nvfp4_is_exact_or_counted(jit: bool) -> None:
    rng = np.random.default_rng(4)
    for _ in range(40):
        low = int(rng.integers(0, 126))
        codes, scales = draw("nvfp4", rng, low, int(rng.integers(low, 127)))
        fitted = (JITTED if jit else FIT)["nvfp4"](codes, scales)
        got, want = kernel_values("nvfp4", fitted), stated_values("nvfp4", codes, scales)
        assert np.isfinite(got).all()
        differ = (got != want).sum((1, 2))
        # A scale that is rounded counts its weights, of which some may round back.
        assert (fitted.rounded >= differ).all()
        if (np.asarray(fitted.factor) <= 1).all():
            np.testing.assert_array_equal(fitted.rounded, differ)
        normal = np.abs(got) >= 2.0**-6 * np.asarray(fitted.factor)[:, None, None]
        error = np.abs(got - want)
        scale_kept = np.asarray(fitted.factor)[:, None, None] <= 1
        assert (error <= np.abs(want) / 15)[normal & scale_kept].all()


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_a_matrix_of_zeros_has_the_factor_1(name: str) -> None:
    codes, scales = draw(name, np.random.default_rng(5), 3, 120)
    fitted = FIT[name](codes & 0x88, scales)
    np.testing.assert_array_equal(fitted.factor, np.float32(1))
    assert not fitted.rounded.any()
    assert not kernel_values(name, fitted).any()


def test_nvfp4_without_odd_mantissas_is_exact() -> None:
    rng = np.random.default_rng(6)
    codes, scales = draw("nvfp4", rng, 0x48, 0x58)
    scales = scales & ~np.uint8(3)  # 1 and 1.5 times powers of two
    fitted = factors.fit_nvfp4(codes, scales)
    assert not fitted.rounded.any()
    np.testing.assert_array_equal(
        kernel_values("nvfp4", fitted), stated_values("nvfp4", codes, scales)
    )
