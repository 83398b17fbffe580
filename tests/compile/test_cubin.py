"""cubin.py on files made here; test_kernels.py reads real ones."""

import pytest
from fake_toolchain import cubin

from jax_megamoe.compile.cubin import read_kernels


def test_parameters_are_read_in_order():
    (kernel,) = read_kernels(cubin({"_Z1k": [(0, 8), (8, 4), (112, 128), (240, 592)]}))
    assert kernel.symbol == "_Z1k"
    assert kernel.parameters == ((0, 8), (8, 4), (112, 128), (240, 592))
    assert (kernel.parameter_base, kernel.parameter_bytes) == (0x210, 832)
    assert kernel.registers == 101


def test_every_kernel_is_read():
    kernels = read_kernels(cubin({"first": [(0, 8)], "second": [(0, 4), (4, 4)]}, base=0x380))
    assert [(k.symbol, k.parameter_bytes, k.registers) for k in kernels] == [
        ("first", 8, 101),
        ("second", 8, 102),
    ]
    assert {k.parameter_base for k in kernels} == {0x380}


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip", b"\x7fELF\x01\x01 32 bits"])
def test_other_files_are_refused(content):
    with pytest.raises(ValueError, match="cubin: expected a 64-bit ELF file, got b'"):
        read_kernels(content)


@pytest.mark.parametrize("length", [20, 64, 200])
def test_truncated_files_are_refused(length):
    with pytest.raises(ValueError, match=f"expected a whole ELF file, got {length} bytes"):
        read_kernels(cubin({"kernel": [(0, 8)]})[:length])
