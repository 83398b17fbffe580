"""measured.py: what follows from times, and that calls without an implementation go by it."""

import logging
from pathlib import Path

import jax
import numpy as np
import pytest
from emulation import H200, Emulation

import jax_megamoe as mm
from jax_megamoe.formats import RECIPES
from jax_megamoe.launch import measured
from jax_megamoe.op import mega_moe as op

ALL = ("deep_gemm", "grouped", "xla")


def row(num_tokens: int, model: str = "one", **microseconds: float) -> measured.Measured:
    return measured.Measured("gpu", 1, "bf16", model, num_tokens, microseconds)


def fastest(
    rows: list[measured.Measured], num_tokens: int, able: tuple[str, ...] = ALL
) -> str | None:
    return measured.fastest(rows, "gpu", "bf16", 1, num_tokens, able)


ROWS = [row(8, deep_gemm=9, grouped=5, xla=7), row(64, deep_gemm=20, xla=30)]


@pytest.mark.parametrize(
    ("num_tokens", "able", "want"),
    [
        (8, ALL, "grouped"),
        (8, ("deep_gemm", "xla"), "xla"),
        (8, ("xla",), None),  # nothing to compare it with
        (64, ALL, "deep_gemm"),
        (64, ("grouped", "xla"), None),  # both were timed at 8 tokens alone
        (22, ALL, "grouped"),
        (23, ALL, "deep_gemm"),  # nearer to 64
        (2, ALL, "grouped"),
        (1, ALL, None),  # further than a quarter of 8
        (256, ALL, "deep_gemm"),
        (257, ALL, None),
        (0, ALL, None),
    ],
)
def test_fastest(num_tokens: int, able: tuple[str, ...], want: str | None) -> None:
    assert fastest(ROWS, num_tokens, able) == want


def test_nothing_follows_for_another_device_recipe_or_number_of_ranks() -> None:
    for device, recipe, ranks in (("tpu", "bf16", 1), ("gpu", "mxfp4", 1), ("gpu", "bf16", 2)):
        assert measured.fastest(ROWS, device, recipe, ranks, 8, ALL) is None


def test_several_models_count_alike() -> None:
    """A large layer's microseconds do not outweigh a small one's."""
    rows = [row(8, "small", deep_gemm=1, xla=3), row(8, "large", deep_gemm=120, xla=100)]
    assert fastest(rows, 8) == "deep_gemm"
    rows.append(row(8, "partly", grouped=1, xla=2))
    assert fastest(rows, 8, ("deep_gemm", "xla")) == "deep_gemm"


def test_the_table() -> None:
    """What an H200 showed: grouped kernels first for few tokens, the fused FP8 one for many."""
    rows = measured.table()
    assert len(rows) > 40
    for each in rows:
        assert each.recipe in RECIPES or " x " in each.recipe
        assert set(each.microseconds) <= {*ALL, "reference"} and min(each.microseconds.values()) > 0

    def best(recipe: str, ranks: int, num_tokens: int, *able: str) -> str | None:
        return measured.fastest(rows, "NVIDIA H200", recipe, ranks, num_tokens, able)

    assert best("fp8_block", 1, 64, "deep_gemm", "grouped") == "grouped"
    assert best("fp8_block", 1, 4096, "deep_gemm", "grouped") == "deep_gemm"
    assert best("fp8_block", 2, 1024, "deep_gemm", "xla") is None
    assert best("bf16", 1, 64, "grouped", "xla") == "xla"
    assert best("bf16", 1, 1024, "grouped", "xla") == "grouped"
    assert best("mxfp4_block", 1, 64, "deep_gemm", "grouped") == "grouped"
    assert best("mxfp4", 1, 64, "grouped", "xla") is None


def test_a_table_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.json"
    path.write_text(measured.dump(ROWS, "by hand"))
    monkeypatch.setenv(measured.VARIABLE, str(path))
    assert measured.table() == tuple(ROWS)
    wrong = tmp_path / "wrong.json"
    for text, said in (
        ("{", "JSONDecodeError"),
        ("{}", "KeyError"),
        ('{"rows": [1]}', "TypeError"),
    ):
        wrong.write_text(text)
        with pytest.raises(ValueError, match=rf"wrong.json: expected a file that bench.*{said}"):
            measured.parse(text, str(wrong))
    monkeypatch.setenv(measured.VARIABLE, str(wrong))
    with pytest.raises(ValueError, match=r"JAX_MEGAMOE_MEASURED, .*wrong.json: expected a file"):
        measured.table()


@pytest.mark.parametrize("xla_is_faster", [True, False])
def test_a_call_goes_by_the_table(
    xla_is_faster: bool,
    emulation: Emulation,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    emulation.device = H200
    config = mm.MoEConfig(
        num_experts=2, top_k=1, hidden_size=512, intermediate_size=256, max_num_tokens=8,
        weight_format="fp8_block",
    )  # fmt: skip
    times = {"deep_gemm": 2.0, "xla": 1.0 if xla_is_faster else 3.0}
    kind = jax.devices()[0].device_kind
    rows = (measured.Measured(kind, 1, "fp8_block", "any", 8, times),)
    monkeypatch.setattr(measured, "table", lambda: rows)
    op._log_measured.cache_clear()
    gate = np.zeros((2, 256, 512), np.float32)
    weights = mm.quantize_experts(config, gate, gate, np.zeros((2, 512, 256), np.float32))
    x = jax.numpy.zeros((8, 512), jax.numpy.bfloat16)
    ids, factors = np.zeros((8, 1), np.int32), np.ones((8, 1), np.float32)
    with caplog.at_level(logging.INFO, logger="jax_megamoe"):
        mm.mega_moe(x, ids, factors, weights, config=config)
    said = "faster than deep_gemm where measured" in caplog.text
    assert said == xla_is_faster
    assert bool(emulation.driver.launches()) != xla_is_faster


@pytest.mark.parametrize(
    ("most_tokens", "want"), [(1, "grouped"), (8, "grouped"), (64, None), (4096, None)]
)
def test_fastest_throughout(most_tokens: int, want: str | None) -> None:
    """One that is the fastest at some of the numbers alone is not; the smallest always counts."""
    times = {1: (2.0, 1.0), 8: (3.0, 2.0), 64: (4.0, 5.0)}
    rows = [
        measured.Measured("gpu", 1, "bf16", "a", count, dict(deep_gemm=fused, grouped=products))
        for count, (fused, products) in times.items()
    ]
    able = ("deep_gemm", "grouped")
    found = measured.fastest_throughout(rows, "gpu", "bf16", 1, most_tokens, able)
    assert found == want
    assert measured.fastest_throughout(rows, "gpu", "bf16", 2, most_tokens, able) is None
    assert measured.fastest_throughout((), "gpu", "bf16", 1, most_tokens, able) is None
