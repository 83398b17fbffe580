"""deadline.py: kernels that wait less long for other ranks."""

import pytest
from fake_toolchain import SPEC, FakeCompiler

from jax_megamoe.compile import builder
from jax_megamoe.compile.codegen import generate
from jax_megamoe.compile.deadline import TIMEOUT_VARIABLE, clock_rate
from jax_megamoe.compile.sources import find_source


@pytest.mark.parametrize(
    ("seconds", "rate"),
    [("", 1), ("300", 1), ("299", 2), ("150", 2), ("149.9", 3), ("20", 15), ("1", 300)],
)
def test_a_kernel_waits_no_longer_than_asked(source, monkeypatch, seconds, rate):
    monkeypatch.setenv(TIMEOUT_VARIABLE, seconds)
    assert clock_rate(find_source("sgl")) == rate
    text = generate(SPEC, find_source("sgl"), rate)
    assert (f"return {rate} * clock64();" in text) == (rate != 1)
    assert ("#define clock64 jax_megamoe_clock\n#include <deep_gemm/" in text) == (rate != 1)


@pytest.mark.parametrize("seconds", ["0", "0.9", "301", "soon", "nan", "-1"])
def test_no_number_of_seconds_is_refused(source, monkeypatch, tmp_path, seconds):
    monkeypatch.setenv(TIMEOUT_VARIABLE, seconds)
    text = f"^{TIMEOUT_VARIABLE}: expected a number of seconds from 1 to 300, got '{seconds}'$"
    with pytest.raises(ValueError, match=text):
        builder.build(SPEC, compiler=FakeCompiler(tmp_path / "calls"))


def test_kernels_of_other_headers_keep_their_limits(source, monkeypatch):
    monkeypatch.setenv(TIMEOUT_VARIABLE, "20")
    assert clock_rate(find_source("jax_megamoe")) == 1


def test_a_kernel_of_another_limit_is_another_kernel(source, monkeypatch, tmp_path):
    compiler = FakeCompiler(tmp_path / "calls")
    for seconds in ("", "300", "20", "20.5", "20", "60"):
        monkeypatch.setenv(TIMEOUT_VARIABLE, seconds)
        builder.build(SPEC, compiler=compiler)
    assert compiler.num_calls == 3
