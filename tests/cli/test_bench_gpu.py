"""cli/gpu: what is timed, what becomes of the times, and what a machine without a GPU is told."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command_line import RUN, run
from emulation import H200, Emulation

import jax_megamoe as mm
from jax_megamoe.cli.gpu import contenders, measure, routings
from jax_megamoe.cli.gpu.compiled import LATE
from jax_megamoe.cli.gpu.machine import line_of
from jax_megamoe.cli.gpu.measure import Request, recipes_of
from jax_megamoe.cli.gpu.models import BF16_ROWS, MODELS, TINY, Model
from jax_megamoe.cli.gpu.picture import save_picture
from jax_megamoe.cli.gpu.result import Ceilings, GpuResult, Timing, compared, read_result
from jax_megamoe.cli.gpu.routings import ROUTINGS
from jax_megamoe.cli.main import main
from jax_megamoe.launch import grouped
from jax_megamoe.launch import measured as measured_times
from jax_megamoe.weights.drawn import random_experts

CEILINGS = Ceilings(copy_bytes_per_second=4e12, bf16_flops=8e14, fp8_flops=1.5e15)


def timing(implementation: str, recipe: str, num_tokens: int, taken: float | None) -> Timing:
    """Of Qwen3-30B's layer, with the bytes and FLOP of an H200's record at 64 tokens."""
    why = "" if taken else "device: expected another"
    work = dict(weight_bytes=597e6, flops=4.83e9)
    return Timing("qwen3_30b", recipe, implementation, num_tokens, taken, **work, why=why)


RESULT = GpuResult(
    "bench gpu --models qwen3_30b",
    "NVIDIA H200",
    {"jax": "0.11.2"},
    CEILINGS,
    (
        timing("deep_gemm", "fp8_block", 64, 191.3),
        timing("deep_gemm", "fp8_block", 1024, 248.1),
        timing("xla", "fp8_block", 64, 8981.9),
        timing("xla", "fp8_block", 1024, None),
        timing("grouped", "fp8_block", 64, None),
        timing("grouped", "fp8_block", 1024, None),
    ),
)
"""Of recorded times."""


def test_table() -> None:
    report = RESULT.report()
    assert report.heading == "NVIDIA H200: copy 4 TB/s, bf16 800 TFLOP/s, fp8 1500 TFLOP/s"
    assert report.columns == ("layer", "64", "1024")
    assert report.rows == (
        ("qwen3_30b deep_gemm fp8_block", "*191 (0.78)", "*248 (0.60)"),
        ("qwen3_30b xla fp8_block", "8982 (0.02)", "-"),
    )
    assert RESULT.missing() == ["qwen3_30b grouped fp8_block: device: expected another"]


@pytest.mark.parametrize(
    ("recipe", "work", "want"),
    [
        ("fp8_block", dict(weight_bytes=4e6, flops=0.0), 1.0),
        ("fp8_block", dict(weight_bytes=4e6, flops=3e9), 2.0),
        ("bf16", dict(weight_bytes=4e6, flops=8e9), 10.0),
        ("mxfp4_bf16", dict(weight_bytes=0.0, flops=8e9), 10.0),
    ],
)
def test_ceilings(recipe: str, work: dict[str, float], want: float) -> None:
    each = Timing("qwen3_30b", recipe, "xla", 1, 20.0, **work)
    assert CEILINGS.microseconds(each) == pytest.approx(want)
    assert CEILINGS.share(each) == pytest.approx(want / 20)


def test_json_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    RESULT.write(path)
    assert read_result(path) == RESULT
    assert json.loads(path.read_text())["versions"] == {"jax": "0.11.2"}
    path.write_text('{"device": "gpu"}')
    with pytest.raises(ValueError, match=r"expected a JSON object of \[.*\], got \['device'\]"):
        read_result(path)


def test_two_runs() -> None:
    faster = dataclasses.replace(RESULT.timings[0], microseconds=95.65)
    new = dataclasses.replace(RESULT, versions={"jax": "0.12"}, timings=(faster,))
    both = compared(new, RESULT)
    assert both.heading == "NVIDIA H200, then NVIDIA H200: jax 0.11.2 -> 0.12"
    assert both.rows == (("qwen3_30b deep_gemm fp8_block", "64", "191.3", "95.7", "0.500"),)
    assert compared(RESULT, new).rows[0][-1] == "2.000"


def test_a_comparison_says_that_programs_are_made_otherwise() -> None:
    unrolled = RESULT.versions | {routings.PROGRAMS: routings.UNROLLED}
    both = compared(dataclasses.replace(RESULT, versions=unrolled), RESULT)
    assert both.heading == ("NVIDIA H200, then NVIDIA H200: layers of a program none -> unrolled")


def test_picture(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    save_picture(path, RESULT.timings, CEILINGS, caption="recorded")
    data = path.read_bytes()
    assert data[:4] == b"\x89PNG" and len(data) > 10_000


def test_every_row_is_timed_and_progress_is_told() -> None:
    """The clock replaced: every program takes 1600 us, a layer of its 16 100."""
    said: list[tuple[str, float]] = []
    saved: list[GpuResult] = []
    series = (("grouped", "mxfp4"), ("xla", "mxfp4"), ("ragged_dot", "bf16"))
    request = Request({"tiny": TINY}, token_counts=(1, 8), series=series)
    result = measure.measure(
        request,
        timer=lambda _: 1600.0,
        progress=lambda *each: said.append(each),
        save=saved.append,
    )
    rows = {(e.implementation, e.recipe, e.num_tokens): e for e in result.timings}
    ran = {key for key, each in rows.items() if each.microseconds == 100}
    assert ran == {
        ("xla", "mxfp4", 1), ("xla", "mxfp4", 8), ("ragged_dot", "bf16", 1),
        ("ragged_dot", "bf16", 8),
    }  # fmt: skip
    assert "expected a CUDA device" in rows["grouped", "mxfp4", 1].why
    weights = 3 * 256 * 128
    assert rows["ragged_dot", "bf16", 1].weight_bytes == 4 * weights * 2
    assert rows["xla", "mxfp4", 1].weight_bytes == 4 * weights * 17 / 32
    assert rows["xla", "mxfp4", 8].flops == 2 * 8 * 4 * weights
    assert result.ceilings.copy_bytes_per_second == pytest.approx(2 * (1 << 20) / 1600e-6)
    assert result.versions["layers of a program"] == "unrolled"
    assert [share for _, share in said] == sorted(share for _, share in said)
    assert said[1] == ("compiling", 0.0) and said[-1] == ("done", 1.0)
    # Ours are timed first, then what XLA alone compiles; the table has the order of the request.
    turns = [text.split(" bf16")[0] for text, _ in said if "tokens: 100" in text]
    assert turns[0] == "tiny ragged_dot" and said[2][0].startswith("tiny grouped mxfp4 1 tokens")
    assert [len(each.timings) for each in saved] == [1, 2, 3, 4, 5, 6, 6]
    assert [e.series for e in result.timings[::2]] == list(series)


def test_no_time_is_left() -> None:
    """Layers that were not reached say so; nothing of them runs."""
    request = Request(
        {"tiny": TINY}, token_counts=(1,), series=(("ragged_dot", "bf16"),), seconds=0.0
    )
    (row,) = measure.measure(request, timer=lambda _: 1600.0).timings
    assert (row.microseconds, row.why) == (None, LATE)


def test_slow_calls_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of a second runs twice, one of a millisecond as often as fills the time."""
    now = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    for taken, times in ((1.0, 2), (1e-3, 2 + 5 * 49)):
        calls = []

        def call(taken: float = taken, calls: list[int] = calls) -> None:
            now[0] += taken
            calls.append(1)

        assert measure.timed(call) == pytest.approx(1e6 * taken)
        assert len(calls) in (times, times + 5)


@pytest.mark.parametrize("unrolled", [True, False])
def test_routings_take_turns(unrolled: bool) -> None:
    """Of 32 experts, 16 layers use others by two each, one after the other; the tokens stay."""
    seen: list[int] = []

    def layer(x: jax.Array, ids: jax.Array) -> jax.Array:
        jax.debug.callback(lambda each: seen.append(int(each[0, 0])), ids, ordered=True)
        return x

    x = jnp.ones((1, 4), jnp.bfloat16)
    turns = routings.turns(jnp.full((1, 1), 3, jnp.int32), 32)
    found = routings.in_turn(layer, unrolled=unrolled)(x, turns)
    jax.effects_barrier()
    assert seen == [(3 + 2 * n) % 32 for n in range(ROUTINGS)]
    assert len(jax.tree.leaves(found)) == (ROUTINGS if unrolled else 1)
    for y in jax.tree.leaves(found):
        np.testing.assert_array_equal(np.asarray(y, np.float32), 1)


def test_a_timed_program_has_every_layer_in_order() -> None:
    """Layers that need nothing of each other are all there, and have an order."""

    def layer(x: jax.Array, ids: jax.Array) -> jax.Array:
        return x + ids

    x = jnp.ones((1, 1), jnp.int32)
    turns = routings.turns(jnp.full((1, 1), 3, jnp.int32), 32)
    lowered = routings.in_turn(layer, unrolled=True).lower(x, turns).as_text()
    assert lowered.count("stablehlo.add") == ROUTINGS
    assert lowered.count("stablehlo.optimization_barrier") == ROUTINGS


def test_ragged_layer_is_the_layer() -> None:
    config = TINY.config("bf16", 32)
    x, ids, factors = routings.tokens(TINY, 32)
    w13, w2 = contenders.PEERS["ragged_dot"](TINY, "bf16", 32).make(jax.random.key(0))
    gate, up = jnp.split(w13.swapaxes(1, 2), 2, axis=1)
    weights = mm.quantize_experts(config, gate, up, w2.swapaxes(1, 2))
    want = mm.einsum_moe(x, ids, factors, weights, config=config, exact=True)
    got = contenders.ragged_layer(x, ids, factors, (w13, w2))
    off = np.asarray(got, np.float64) - np.asarray(want, np.float64)
    assert np.linalg.norm(off) / np.linalg.norm(np.asarray(want, np.float64)) < 0.01


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [("mxfp4_block", "humming_fp8"), ("fp8_block", "humming_fp8"), (BF16_ROWS, "humming_bf16"),
     ("mxfp4_block", None)],
)  # fmt: skip
def test_parameters_made_in_a_program_are_those_of_a_user(recipe: str, layout: str | None) -> None:
    """Traced, they have the arrays and shapes that the public functions give."""
    config = TINY.config(recipe, 8)
    got = jax.jit(lambda key: contenders.random_weights(config, layout, key))(jax.random.key(3))
    want = random_experts(config, jax.random.key(3))
    want = want if layout is None else mm.to_layout(want, layout)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        off = np.asarray(ours).view(np.uint8) != np.asarray(theirs).view(np.uint8)
        assert off.mean() < 0.01  # XLA may round a normal number otherwise in a larger program


def test_models_are_layers() -> None:
    for model in MODELS.values():
        config = model.config("mxfp4", 64)
        assert config.hidden_size % 128 == 0 and config.recipe.name == "mxfp4"
    assert MODELS["qwen3_30b"].flops(64) == 4831838208  # that of the records
    assert recipes_of(MODELS["qwen3_30b"], 64, jax.devices()[0]) == ("bf16",)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            "bench gpu",
            "bench: error: device: expected a GPU that JAX sees: pip install 'jax-megamoe[cuda13]' "
            "on a machine with one, got cpu; --device cpu tries the command without one",
        ),
        ("bench gpu --device cpu --hidden 256", "sizes: expected all of --experts, --top-k, "
         "--hidden, --intermediate, got only ['hidden_size']"),
        ("bench gpu --device cpu --tokens 0", "tokens: expected an integer >= 1, got 0"),
        ("bench gpu --device cpu --compare none.json", "No such file or directory: 'none.json'"),
        ("bench gpu --models gpt5", "invalid choice: 'gpt5'"),
    ],
)  # fmt: skip
def test_refusals(line: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(line.split())
    except SystemExit as stop:
        status = stop.code
    said = capsys.readouterr().err
    assert status == 2 and text in said
    assert line.endswith("gpt5") or len(said.splitlines()) == 1


def test_command(tmp_path: Path) -> None:
    """For real, on a CPU: a table on stdout, progress on stderr alone, three files."""
    sizes = "--experts 4 --top-k 2 --hidden 128 --intermediate 128 --tokens 1 --recipes mxfp8"
    files = "--json made/a.json --picture made/a.png --output made/a.md --table made/t.json"
    line = f"bench gpu --device cpu --no-peers {sizes} {files}"
    done = run(tmp_path, *RUN, *line.split())
    assert done.returncode == 0, done.stderr
    assert re.search(r"custom xla mxfp8 +\*\d+", done.stdout)
    assert "parameters" not in done.stdout
    result = read_result(tmp_path / "made/a.json")
    assert [each.implementation for each in result.timings] == ["deep_gemm", "grouped", "xla"]
    assert "| custom xla mxfp8 | *" in (tmp_path / "made/a.md").read_text()
    assert (tmp_path / "made/a.png").stat().st_size > 10_000
    (row,) = measured_times.parse((tmp_path / "made/t.json").read_text())
    assert (row.device, row.num_ranks, row.recipe, row.num_tokens) == ("cpu", 1, "mxfp8", 1)
    assert list(row.microseconds) == ["xla"]


def test_every_series_on_a_device_that_stands_for_an_h200(
    emulation: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled as on a GPU, several at a time; the launches are recorded, not carried out."""
    emulation.device = H200
    monkeypatch.setattr(grouped, "spec_of", lambda *_, **__: H200)
    monkeypatch.setattr(contenders, "spec_of", lambda *_, **__: H200)
    model = Model("a layer", 16, 4, 1024, 512)
    series = tuple(each for each in contenders.FIRST if each[0] in contenders.OURS)
    request = Request({"layer": model}, token_counts=(1, 64), series=series)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        result = measure.measure(request, timer=lambda _: 1600.0)
    rows = {each.series: each for each in result.timings}
    for each in series:
        assert rows[each].microseconds == 100, rows[each].why
    few, many = rows["grouped", "mxfp4_block"], rows["deep_gemm", "fp8_block"]
    assert few.weight_bytes / many.weight_bytes == pytest.approx(17 / 32, rel=0.01)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no kernel\nmore", "no kernel"),
        ("", "ValueError"),
        ("at 26:15:\n    arange(0, K)\n    ^\nno power of two", "at 26:15: no power of two"),
        ("nothing behind:", "nothing behind:"),
        ("a" * 300, "a" * 200),
    ],
)  # fmt: skip
def test_errors_in_a_line(text: str, expected: str) -> None:
    assert line_of(ValueError(text)) == expected
