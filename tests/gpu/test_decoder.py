"""`benchmarks/gpu/decoder.py` on a CPU, and how it reads the profiler's traces."""

import gzip
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from scripts import load_script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def step_trace() -> ModuleType:
    return load_script(ROOT / "benchmarks" / "gpu" / "step_trace.py")


TEXT = """
  %fusion.3 = bf16[8]{0} fusion(%p.1), kind=kLoop, metadata={op_name="jit(step)/while/body/closed_call/attention/exp" stack_frame_id=1}
  %custom-call.7 = bf16[8]{0} custom-call(%p.1), metadata={op_type="x" op_name="jit(step)/while/body/closed_call/experts/mega_moe/launch/ffi_call"}
  %gemm_fusion.1 = bf16[8]{0} fusion(%p.2), metadata={op_name="jit(step)/while/body/closed_call/experts/mega_moe_block/router/dot_general"}
  ROOT %gemm.2 = f32[8]{0} custom-call(%p.2), metadata={op_name="jit(step)/dot_general"}
  %p.1 = bf16[8]{0} parameter(0)
"""  # noqa: E501 (lines of HLO)


def event(name: str, start: float, taken: float, tid: int = 22, **args: Any) -> dict[str, Any]:
    return dict(ph="X", pid=1, tid=tid, name=name, ts=start, dur=taken, args=args)


EVENTS = [
    dict(ph="M", pid=1, name="process_name", args={"name": "/device:GPU:0"}),
    dict(ph="M", pid=701, name="process_name", args={"name": "/host:CPU"}),
    dict(ph="M", pid=1, tid=22, name="thread_name", args={"name": "Stream #22(Compute)"}),
    dict(ph="M", pid=1, tid=9, name="thread_name", args={"name": "XLA Ops"}),
    event("while.2", 0, 100, tid=9, hlo_op="while.2"),
    event("fusion_3", 0, 10, hlo_op="fusion.3"),
    event("sm90_fp8_mega_moe_impl", 10, 30, hlo_op="custom-call.7"),
    # Starts before the one above ends: 5 of its 15 are the other's.
    event("combine_rows", 35, 15),
    event("gemm_fusion_1", 50, 5),
    event("nvjet_tst_64x8", 55, 20, hlo_op="gemm.2"),
    event("MemcpyD2H", 80, 1, hlo_op="while.2"),
    event("nvjet_tst_128x8", 90, 4),
    dict(ph="X", pid=701, tid=1, name="python", ts=0, dur=500, args={"hlo_op": "fusion.3"}),
    {},
]


def write(folder: Path, events: list[dict[str, Any]]) -> None:
    path = folder / "plugins" / "profile" / "now" / "vm.trace.json.gz"
    path.parent.mkdir(parents=True)
    with gzip.open(path, "wt") as file:
        json.dump({"displayTimeUnit": "ns", "traceEvents": events}, file)


def test_parts_of_a_gpus_trace(step_trace: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, EVENTS)
    events, scopes = step_trace.read(tmp_path, on_gpu=True), step_trace.scopes_of(TEXT)
    want = dict(experts=40.0, router=5.0, attention=10.0, rest=21.0, unknown=4.0)
    assert step_trace.parts(events, scopes) == want
    assert step_trace.largest(events, scopes, 2) == [
        ("experts", "sm90_fp8_mega_moe_impl", 30.0),
        ("rest", "nvjet_tst_64x8", 20.0),
    ]


def test_streams_of_another_name_count(step_trace: ModuleType, tmp_path: Path) -> None:
    renamed = {"name": "Compute 22"}
    write(
        tmp_path,
        [
            each | dict(args=renamed) if each.get("tid") == 22 and each["ph"] == "M" else each
            for each in EVENTS
        ],
    )
    assert len(step_trace.read(tmp_path, on_gpu=True)) == 7


def test_a_host_alone_has_no_kernels(step_trace: ModuleType, tmp_path: Path) -> None:
    assert step_trace.read(tmp_path, on_gpu=True) == []
    write(tmp_path, [each for each in EVENTS if each.get("pid") == 701])
    assert step_trace.read(tmp_path, on_gpu=True) == []
    assert [each.name for each in step_trace.read(tmp_path, on_gpu=False)] == ["python"]


def test_parts_of_a_program_on_this_machine(step_trace: ModuleType, tmp_path: Path) -> None:
    def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        with jax.named_scope("attention"):
            x = x @ weight
        with jax.named_scope("experts"):
            return jnp.sin(x) @ weight, None

    run = jax.jit(lambda x, weights: jax.lax.scan(layer, x, weights)[0])
    operands = jnp.ones((64, 64)), jnp.ones((4, 64, 64))
    run = run.lower(*operands).compile(compiler_options=step_trace.NO_GRAPHS)
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(run(*operands))
    parts = step_trace.parts(
        step_trace.read(tmp_path, on_gpu=False), step_trace.scopes_of(run.as_text())
    )
    assert parts["experts"] > 0 and parts["attention"] > 0 and parts["router"] == 0


def test_tiny_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process for each model, all rows in one file, with parts from the profiler; and a page."""
    folders = ROOT, ROOT / "examples", ROOT / "benchmarks/gpu"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "OUT": str(tmp_path),
        "JAX_PLATFORMS": "cpu",
    }
    models = ["qwen3_30b_mxfp4_block", "gpt_oss_120b_mxfp4"]
    command = [sys.executable, ROOT / "benchmarks/gpu/decoder.py", "--tiny", "--models", *models]
    sizes = ["--batches", "1", "2", "--profile", "2", "--context", "16", "--prompt", "8"]
    done = subprocess.run(
        [*command, *sizes, "--threads", "2"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "decoder_h200.json").read_text())["models"]
    assert list(found) == models
    for name, model in found.items():
        small, large, prompt = model["rows"]
        assert (small["batch"], large["batch"], prompt["prompt_tokens"]) == (1, 2, 8)
        assert model["finite"] and small["experts_touched"] == 2.0
        assert large["parts_from"] == "profiler" and large["parts_ms"]["experts"] > 0
        assert f"{name}, batch 2: " in done.stdout
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    page = importlib.import_module("pages").decoder(tmp_path)
    given = " ".join(["--tiny", *sizes, "--threads 2"])
    for name in models:
        assert f"python benchmarks/gpu/decoder.py {given} --models {name}\n" in page
    assert [row.split(" | ")[0] for row in page.splitlines()[-4:]] == [
        f"| {name}" for name in models for _ in range(2)
    ]
