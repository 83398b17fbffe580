"""formats.py: the table of formats."""

import pytest

import jax_megamoe as mm
from jax_megamoe import formats

TABLE = {
    # storage, values an element, bits, scale, block, global scale, tokens, shared, swiglu only
    "mxfp4": ("uint8", 2, 4, "ue8m0", (1, 32), False, "mxfp8", ("mxfp8",), False),
    "mxfp8": ("float8_e4m3fn", 1, 8, "ue8m0", (1, 32), False, "mxfp8", ("mxfp8",), False),
    "nvfp4": ("uint8", 2, 4, "e4m3", (1, 16), True, "nvfp4", ("mxfp8", "bf16"), True),
    "bf16": ("bfloat16", 1, 16, "none", (0, 0), False, "bf16", ("bf16",), True),
    "fp8_block": ("float8_e4m3fn", 1, 8, "float32", (128, 128), False, "fp8_block", (), True),
}


@pytest.mark.parametrize("name", TABLE)
def test_table(name: str) -> None:
    """behaviour.md section 1."""
    form = mm.WEIGHT_FORMATS[name]
    spec = form.weight
    assert form.name == name
    assert (
        spec.storage,
        spec.values_per_element,
        spec.bits,
        spec.scale,
        spec.block,
        spec.has_global_scale,
        form.activation_format,
        form.shared_formats,
        form.activations == ("swiglu",),
    ) == TABLE[name]
    assert spec.packs_scales == (spec.scale in ("ue8m0", "e4m3"))
    assert form.architecture == ("sm90" if name == "fp8_block" else "sm100")
    assert form.weighs_in_combine == (name == "nvfp4")


def test_names() -> None:
    assert list(mm.WEIGHT_FORMATS) == list(TABLE)
    public = (mm.MXFP4, mm.MXFP8, mm.NVFP4, mm.BF16, mm.FP8_BLOCK)
    assert public == tuple(mm.WEIGHT_FORMATS.values())


def test_the_table_is_read_only() -> None:
    with pytest.raises(TypeError, match="does not support item assignment"):
        mm.WEIGHT_FORMATS["mxfp4"] = mm.BF16  # type: ignore[index]


def test_as_weight_format() -> None:
    assert formats.as_weight_format("nvfp4") is mm.NVFP4
    assert formats.as_weight_format(mm.NVFP4) is mm.NVFP4
    message = r"^target: expected one of \['mxfp4', .*'fp8_block'\], got 'int4'$"
    with pytest.raises(ValueError, match=message):
        formats.as_weight_format("int4", "target")
