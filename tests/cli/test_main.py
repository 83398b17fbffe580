"""Command lines: what is refused, with which words and status; bench and doctor at small sizes."""

import re
from pathlib import Path

import pytest
from command_line import RUN, TINY, run

from jax_megamoe.cli.bench import Shape, bench_cpu
from jax_megamoe.cli.bench_load import LoadShape, bench_load
from jax_megamoe.cli.main import COMMANDS, main
from jax_megamoe.formats import RECIPES

SMALL_BENCH = TINY.replace("--ranks 2 ", "")


def refused(capsys: pytest.CaptureFixture[str], line: str) -> str:
    """What a refused command line writes to stderr."""
    try:
        status = main(line.split())
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    return capsys.readouterr().err


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert re.search(rf"^ +{command.__name__} +\w", text, re.M)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("dance", "invalid choice: 'dance'"),
        ("demo --color", "unrecognized arguments: --color"),
        ("demo --formats fp5", "invalid choice: 'fp5'"),
        ("demo --experts many", "argument --experts: invalid int value: 'many'"),
        ("demo --experts 7 --top-k 8", "top_k: expected at most num_logical_experts = 7, got 8"),
        ("demo --hidden 500", "demo: error: hidden_size: expected a multiple of 128, got 500"),
        ("demo --ranks 3", "num_experts: expected a multiple of the 3 expert-parallel ranks"),
        ("demo --ranks 0", "num_ranks: expected an integer >= 1, got 0"),
        (
            "demo --tokens 30",
            "num_tokens: expected a multiple of 8, got 30; ranks get equally many",
        ),
        ("demo --seed -1", "seed: expected an integer >= 0, got -1"),
        ("demo --seed 4294967296", "seed: expected at most 2^32 - 1 = 4294967295, got 4294967296"),
        (
            "compile --tokens 8 --device h200 --reserved-sms 132",
            "reserved_sms: expected fewer than the device's 132 SMs, got 132",
        ),
        ("bench gpu2", "invalid choice: 'gpu2'"),
        ("bench", "the following arguments are required: what"),
        ("bench load --top-k 2", "unrecognized arguments: --top-k"),
        ("doctor --top-k 65", "top_k: expected at most num_logical_experts = 64, got 65"),
        ("sources", "the following arguments are required: what"),
        ("sources fetch", "the following arguments are required: source"),
        ("sources fetch torch", "invalid choice: 'torch'"),
        ("sources fetch vllm --version 0.32.0", "expected one of ['0.33.0'], got '0.32.0'"),
        ("doctor --ranks 5", "num_experts: expected a multiple of the 5 expert-parallel ranks"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], line: str, text: str) -> None:
    assert text in refused(capsys, line)


def test_measurements_are_refused() -> None:
    """Without a command line, which would make its own devices."""
    for measure, shape in ((bench_cpu, Shape()), (bench_load, LoadShape())):
        with pytest.raises(ValueError, match=r"seed: expected at most 2\^32 - 1 = 4294967295"):
            measure(shape, ["bf16"], seed=2**64)
    with pytest.raises(ValueError, match="num_experts: expected an integer >= 1, got 0"):
        bench_cpu(Shape(num_experts=0), ["bf16"])


def test_traceback_on_request() -> None:
    with pytest.raises(ValueError, match="hidden_size: expected a multiple of 128"):
        main("--traceback demo --hidden 500".split())


def test_bench_cpu(tmp_path: Path) -> None:
    line = f"bench cpu {SMALL_BENCH} --formats bf16 mxfp4 bf16 --repeats 1 --output made/cpu.md"
    done = run(tmp_path, *RUN, *line.split())
    assert done.returncode == 0, done.stderr
    assert "…" not in done.stdout
    page = (tmp_path / "made/cpu.md").read_text()
    assert f"`python -m jax_megamoe {line}`" in page
    assert re.search(r"\d{4}-\d\d-\d\d\. .+, \d+ CPUs; Python 3\..*, jax \d", page)
    table = [[cell.strip() for cell in row.split("|")[1:-1]] for row in page.splitlines()[-5:]]
    assert [row[0] for row in table] == ["layer", "---", "einsum bf16", "xla bf16", "xla mxfp4"]
    assert len({len(row) for row in table}) == 1
    assert table[2][2] == "1.00 x"
    # 16 tokens, all 4 experts or the 2 chosen, 3 matrices of 128 x 128, 2 FLOPs each.
    assert [row[3] for row in table[2:]] == ["0.01", "0.00", "0.00"]
    assert [row[6] for row in table[2:]] == ["0.4", "0.4", "0.1"]


def test_doctor_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_MEGAMOE_CACHE", str(tmp_path))
    done = run(tmp_path, *RUN, "doctor")
    assert done.returncode == 0, done.stderr
    words = " ".join(re.sub("[│┃]", " ", done.stdout).split())
    assert "1 x cpu" in words
    assert "recipe deep_gemm grouped" in words and "xla runs all of them" in words
    for recipe in RECIPES:
        assert recipe in words[words.index("recipe deep_gemm") :]
    assert words.count("device: expected") == words.count("needs a CUDA device") == 1
    assert "compile policy auto" in words
    assert "mxfp4 none, mxfp8 any alpha, beta vllm" in words
