"""Compiling ahead of time: lower and compile, the persistent cache, and jax.export."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulation import Emulation, config
from jax import export
from jax.sharding import PartitionSpec as P

import jax_megamoe as mm
from jax_megamoe import symmetric_memory
from jax_megamoe.runtime import extension

ROOT = Path(__file__).parents[2]
TOKENS = 16
RANKS = pytest.mark.parametrize("ranks", [1, 4])


def call_of(form: str, ranks: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A jitted call by xla and what it takes, over ranks on its devices."""
    cfg = cases.config(form, num_shared_experts=int(form in cases.FUSING))
    inputs = *cases.tokens(cfg, TOKENS), cases.weights(cfg)
    call = partial(mm.mega_moe, config=cfg, implementation="xla", return_stats=True)
    if ranks == 1:
        return jax.jit(call), inputs
    mesh = cases.ep_mesh(ranks)
    specs = (P("ep"), P("ep"), P("ep"), inputs[3].partition_specs("ep"))
    return jax.jit(partial(call, mesh=mesh, axis="ep")), cases.sharded(inputs, specs, mesh)


def assert_equal(got: Any, want: Any) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(g, np.float32), np.asarray(w, np.float32))


@RANKS
def test_lower_and_compile(ranks: int) -> None:
    """From shapes alone, too."""
    call, inputs = call_of("mxfp8", ranks)
    compiled = call.lower(*inputs).compile()
    want = call(*inputs)
    assert_equal(compiled(*inputs), want)
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), inputs
    )
    assert_equal(call.lower(*shapes).compile()(*inputs), want)


# The persistent compilation cache.

CACHED = """
import jax
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_compilation_cache_dir", {folder!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from functools import partial
import jax.monitoring
import jax.numpy as jnp
import jax_megamoe as mm
config = mm.MoEConfig(num_experts=8, top_k=2, hidden_size=128, intermediate_size=128,
                      max_num_tokens=16, weight_format="mxfp4")
ones = jnp.ones((8, 128, 128), jnp.bfloat16) / 16
weights = mm.quantize_experts(config, ones, ones, ones)
inputs = jnp.ones((16, 128), jnp.bfloat16), jnp.zeros((16, 2), jnp.int32), jnp.ones((16, 2))
mesh = jax.make_mesh((4,), ("ep",))
call = jax.jit(partial(mm.mega_moe, config=config, mesh=mesh, axis="ep", implementation="xla"))
found = []
jax.monitoring.register_event_listener(lambda event, **_: found.append(event.split("/")[-1]))
call.lower(*inputs, weights).compile()
print(found.count("cache_hits"), found.count("cache_misses"))
print(float(call(*inputs, weights).astype(jnp.float32).sum()))
"""


def test_a_second_process_hits_the_persistent_cache(tmp_path: Path) -> None:
    def run() -> list[str]:
        code = CACHED.format(folder=str(tmp_path / "cache"))
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HOME": str(tmp_path),
            "JAX_PLATFORMS": "cpu",
        }
        result = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.split()

    hits, misses, total = run()
    assert (hits, misses) == ("0", "1")
    assert run() == ["1", "0", total]


# jax.export.


def exported(call: Callable[..., Any], *inputs: Any, **options: Any) -> export.Exported:
    """The function written down and read again."""
    pytest.importorskip("flatbuffers", reason="jax.export writes with flatbuffers")
    return export.deserialize(export.export(call, **options)(*inputs).serialize())


@RANKS
@pytest.mark.parametrize("form", ["mxfp8", "nvfp4"])
def test_xla_is_exported_and_called(form: str, ranks: int) -> None:
    call, inputs = call_of(form, ranks)
    back = exported(call, *inputs)
    assert back.nr_devices == ranks
    assert_equal(back.call(*inputs), call(*inputs))


def test_gradients_are_exported() -> None:
    call, (x, *others) = call_of("mxfp8", 1)

    def loss(x: jax.Array, *others: Any) -> jax.Array:
        return call(x, *others)[0].astype(jnp.float32).sum()

    of_x = jax.jit(jax.grad(loss))
    assert_equal(exported(of_x, x, *others).call(x, *others), of_x(x, *others))


def test_xla_is_exported_for_other_platforms() -> None:
    call, inputs = call_of("fp8_block", 1)
    assert exported(call, *inputs, platforms=("cuda", "tpu")).platforms == ("cuda", "tpu")


def symbolic(cfg: mm.MoEConfig, *constraints: str) -> list[jax.ShapeDtypeStruct]:
    """The arguments of a call with a symbolic number of tokens."""
    (rows,) = export.symbolic_shape("T", constraints=constraints)
    tokens = cases.tokens(cfg, 1)
    return [jax.ShapeDtypeStruct((rows, *each.shape[1:]), each.dtype) for each in tokens]


def test_one_program_for_any_number_of_tokens() -> None:
    cfg = cases.config("mxfp8")
    weights = cases.weights(cfg)
    call = jax.jit(lambda *tokens: mm.mega_moe(*tokens, weights, config=cfg, implementation="xla"))
    back = export.export(call)(*symbolic(cfg, f"T <= {cfg.max_num_tokens}"))
    for num_tokens in (1, 27):
        tokens = cases.tokens(cfg, num_tokens)
        assert_equal(back.call(*tokens), call(*tokens))


def test_symbolic_numbers_of_tokens_that_are_refused() -> None:
    cfg = cases.config("mxfp8")
    weights, bound = cases.weights(cfg), f"T <= {cfg.max_num_tokens}"

    def lower(*constraints: str, **options: Any) -> None:
        call = partial(mm.mega_moe, config=cfg, **options)
        export.export(jax.jit(call))(*symbolic(cfg, *constraints), weights)

    message = (
        r"^x rows: expected a size with the constraint T <= 64, got T; pass it to "
        r"jax.export.symbolic_shape\(..., constraints=\)"
    )
    with pytest.raises(ValueError, match=message):
        lower()
    message = r"^implementation: expected xla or reference for a symbolic number of tokens: "
    with pytest.raises(NotImplementedError, match=message):
        lower(bound, implementation="deep_gemm")
    message = r"^x rows: expected a number where experts are on several ranks, got T; export a "
    with pytest.raises(NotImplementedError, match=message):
        lower(bound, mesh=cases.ep_mesh(8), axis="ep")


def test_maps_and_stats_are_exported() -> None:
    cfg = cases.config("bf16", num_logical_experts=12)
    eplb = mm.replica_map(np.asarray([*range(12), 3, 3, 7, 0]), 12)
    count = jax.jit(lambda ids, eplb: mm.moe_stats(ids, config=cfg, eplb=eplb))
    ids = cases.tokens(cfg, TOKENS)[1]
    got = exported(count, ids, eplb).call(ids, eplb)
    assert isinstance(got, mm.MoEStats)
    assert_equal(got, count(ids, eplb))


def test_a_capture_is_not_exported() -> None:
    call, inputs = call_of("bf16", 1)
    with mm.capture_routing(print), pytest.raises(Exception, match="callback"):
        exported(call, *inputs)


def deep_gemm_call(**changes: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    cfg = config(**changes)
    call = jax.jit(partial(mm.mega_moe, config=cfg, implementation="deep_gemm"))
    return call, (*cases.tokens(cfg, TOKENS), cases.weights(cfg))


def test_jax_does_not_export_a_launch_and_names_it(emulation: Emulation) -> None:
    call, inputs = deep_gemm_call()
    text = "(?s)no compatibility guarantees.*@jax_megamoe_launch_graph"
    with pytest.raises(ValueError, match=text):
        exported(call, *inputs)


def test_an_exported_launch_runs_where_its_buffer_is(
    emulation: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let through by the user; elsewhere it says what is missing."""
    check = export.DisabledSafetyCheck.custom_call(extension.GRAPH_TARGET)
    call, inputs = deep_gemm_call()
    back = exported(call, *inputs, disabled_checks=[check])
    jax.block_until_ready(back.call(*inputs))
    assert len(emulation.driver.launches()) == 2
    monkeypatch.setattr(symmetric_memory, "allocate", lambda *_, **__: None)
    call, inputs = deep_gemm_call(max_num_tokens=1999, num_experts=24, top_k=3)
    back = exported(call, *inputs, disabled_checks=[check])
    text = (
        'symmetric buffer "none/.*" on device 0: expected one allocated in this process, got none; '
        "allocate it before the first launch, on every rank"
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(back.call(*inputs))


def test_the_package_can_be_reloaded() -> None:
    """A notebook's autoreload: JAX refuses to register a pytree twice."""
    program = "import importlib, jax_megamoe; importlib.reload(jax_megamoe); print('again')"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "again\n", done.stderr
