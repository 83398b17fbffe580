"""What the compiled program of a `mega_moe` call holds: collectives, named scopes; retracing."""

import re
from functools import partial

import cases
import jax
import jax.numpy as jnp
import pytest
from emulation import Emulation, config
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_megamoe as mm

TOKENS = 32
KINDS = pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)


def compiled_text(cfg: mm.MoEConfig, kind: AxisType, implementation: str) -> str:
    mesh, weights = cases.ep_mesh(8, kind), cases.weights(cfg)
    inputs = cases.sharded(cases.tokens(cfg, 64), (P("ep"), P("ep"), P("ep")), mesh)
    weights = cases.sharded(weights, weights.partition_specs("ep"), mesh)
    place = dict(mesh=mesh, axis="ep", implementation=implementation)
    call = jax.jit(partial(mm.mega_moe, config=cfg, return_stats=True, **place))
    return call.lower(*inputs, weights).compile().as_text()


def collectives(text: str) -> dict[str, list[str]]:
    """Results of the collective operations in an HLO text, by name."""
    found: dict[str, list[str]] = {}
    pattern = r"^.*? = (.*) (all-[a-z-]+|reduce-scatter|collective-[a-z-]+)\("
    for result, name in re.findall(pattern, text, re.MULTILINE):
        found.setdefault(name.removesuffix("-start"), []).append(result)
    return found


@KINDS
@pytest.mark.parametrize("form", cases.FORMATS)
def test_no_parameter_is_gathered(form: str, kind: AxisType) -> None:
    cfg = cases.config(form, num_shared_experts=int(form in cases.FUSING), max_num_tokens=8)
    found = collectives(compiled_text(cfg, kind, "xla"))
    assert "all-to-all" in found
    assert not found.keys() & {"all-gather", "collective-permute"}, found
    # Counts, rounds and NVFP4's input scale are reduced; nothing as long as a matrix is.
    for shapes in found.get("all-reduce", []) + found.get("reduce-scatter", []):
        assert all(int(size) <= cfg.num_experts for size in re.findall(r"\[(\d+)", shapes)), shapes


def test_reference_gathers_tokens_and_no_parameters() -> None:
    cfg = cases.config("nvfp4", max_num_tokens=8)
    gathered = collectives(compiled_text(cfg, AxisType.Auto, "reference"))["all-gather"]
    sizes = {
        tuple(map(int, s.split(","))) for g in gathered for s in re.findall(r"\[([\d,]+)\]", g)
    }
    assert sizes and all(size[0] == 64 for size in sizes), sizes


@pytest.mark.parametrize("jitted", [True, False])
def test_second_call_does_not_retrace(jitted: bool, caplog: pytest.LogCaptureFixture) -> None:
    cfg = cases.config("mxfp8", num_shared_experts=1)
    mesh = cases.ep_mesh(4)
    call = partial(mm.mega_moe, config=cfg, mesh=mesh, axis="ep", return_stats=True)
    call = jax.jit(call) if jitted else call
    x, ids, factors = cases.tokens(cfg, TOKENS)
    mask = jnp.zeros(TOKENS, bool)
    call(x, ids, factors, cases.weights(cfg), padding_mask=mask)
    again = cases.config("mxfp8", num_shared_experts=1)
    assert again == cfg and hash(again) == hash(cfg)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        call(x + x, (ids + 1) % 16, factors, cases.weights(cfg), padding_mask=~mask)
    compiled = [record.message for record in caplog.records if "mega_moe" in record.message]
    compiled += [record.message for record in caplog.records if "_run" in record.message]
    assert not compiled


# Named scopes.


def scopes(text: str) -> set[str]:
    """The scopes of this package in the names of an HLO text's operations."""
    return set(re.findall(r'op_name="[^"]*(mega_moe/[a-z]+)[^"]*"', text))


@pytest.mark.parametrize("ranks", [1, 4])
def test_xla_names_its_steps(ranks: int) -> None:
    cfg = cases.config("nvfp4", num_shared_experts=1)
    place = {} if ranks == 1 else dict(mesh=cases.ep_mesh(ranks), axis="ep")
    call = partial(mm.mega_moe, config=cfg, implementation="xla", **place)
    inputs = *cases.tokens(cfg, TOKENS), cases.weights(cfg)
    steps = {f"mega_moe/{name}" for name in ("staging", "experts", "shared", "combine")}
    assert scopes(jax.jit(call).lower(*inputs).compile().as_text()) == steps

    def loss(x: jax.Array) -> jax.Array:
        return call(x, *inputs[1:]).astype(jnp.float32).sum()

    backward = scopes(jax.jit(jax.grad(loss)).lower(inputs[0]).compile().as_text())
    assert backward >= {"mega_moe/staging", "mega_moe/experts", "mega_moe/shared"}


def test_deep_gemm_names_its_launch(emulation: Emulation) -> None:
    """Staging is a kernel of the same custom call."""
    cfg = config()
    place = dict(mesh=cases.ep_mesh(4), axis="ep")
    call = jax.jit(partial(mm.mega_moe, config=cfg, implementation="deep_gemm", **place))
    text = call.lower(*cases.tokens(cfg, TOKENS), cases.weights(cfg)).compile().as_text()
    (launch,) = (line for line in text.splitlines() if "custom-call(" in line and "ffi" in line)
    assert scopes(launch) == {"mega_moe/launch"} == scopes(text)
