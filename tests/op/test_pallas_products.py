"""The Pallas kernel of `xla`: interpreted on a CPU beside the loop; lowered for CUDA."""

import itertools
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_megamoe as mm
from jax_megamoe.op import pallas_experts, pallas_products
from jax_megamoe.op.pallas_products import (
    Matrix,
    Rows,
    Tiles,
    Weighed,
    product,
    row_blocks,
    tiles_of,
)

TOKENS = 64
TARGET = "__gpu$xla.gpu.triton"
CONSUMER_SHARED_BYTES = 99 * 1024


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if every CUDA device could run the kernel; nothing traced before counts."""
    jax.clear_caches()
    monkeypatch.setattr(pallas_experts, "available", lambda: True)
    yield
    jax.clear_caches()


@pytest.fixture
def interpreted(on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernel interpreted on the CPU; what was traced of it, by name."""
    traced: list[str] = []

    def interpret(rows: Rows, matrix: Matrix, *arguments: Any, **options: Any) -> Any:
        traced.append(str(matrix.weight.dtype))
        return product(rows, matrix, *arguments, **options, interpret=True)

    monkeypatch.setattr(pallas_experts, "product", interpret)
    choose = lax.platform_dependent

    def on_cuda(*operands: Any, **branches: Any) -> Any:
        # Roundings have branches for CPUs too, and keep them.
        return branches["cuda"](*operands) if "cuda" in branches else choose(*operands, **branches)

    monkeypatch.setattr(lax, "platform_dependent", on_cuda)
    return traced


def ids_of(load: str, num_slots: int, num_experts: int) -> np.ndarray:
    """Experts of some slots; num_experts for none."""
    rng = np.random.default_rng(4)
    match load:
        case "random":
            return rng.integers(0, num_experts + 1, num_slots)
        case "idle experts":
            return rng.choice([1, num_experts - 1, num_experts], num_slots)
        case "skewed":
            return np.where(rng.random(num_slots) < 0.9, 2, rng.integers(0, num_experts, num_slots))
        case "one expert":
            return np.full(num_slots, num_experts - 1)
        case _:
            return np.full(num_slots, num_experts)


LOADS = ("random", "idle experts", "skewed", "one expert", "nothing")


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(
    ("num_slots", "num_experts", "rows"), [(1, 1, 16), (37, 5, 16), (400, 7, 64)]
)
def test_row_blocks_hold_every_row_once(
    load: str, num_slots: int, num_experts: int, rows: int
) -> None:
    ids = ids_of(load, num_slots, num_experts) if num_experts > 2 else np.zeros(num_slots, int)
    blocks = row_blocks(jnp.asarray(ids, jnp.int32), num_experts, rows)
    expert, start, stop = map(np.asarray, blocks)
    by_row = np.full(num_slots, num_experts)
    for e, first, last in zip(expert, start, stop, strict=True):
        if e >= 0:
            covered = slice(first, min(first + rows, last))
            assert last > first and (by_row[covered] == num_experts).all()
            by_row[covered] = e
    np.testing.assert_array_equal(by_row, np.sort(ids))
    assert (np.diff(np.flatnonzero(expert >= 0)) == 1).all(), "idle blocks come last"


TILES = [
    Tiles(16, 64, 128, 4, 4),
    Tiles(64, 128, 64, 4, 3),
    Tiles(128, 128, 64, 8, 3),
]


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("tiles", TILES, ids=lambda tiles: f"{tiles.rows} rows")
def test_product(load: str, tiles: Tiles) -> None:
    """Tokens gathered and rows left sorted, with biases; sorted rows put back, with weights too."""
    rng = np.random.default_rng(5)
    num_experts, top_k, tokens, depth, width = 5, 3, 47, 256, 128
    ids = ids_of(load, tokens * top_k, num_experts)
    order = np.argsort(ids, kind="stable")
    x = jnp.asarray(rng.standard_normal((tokens, depth)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((num_experts, width, depth)), jnp.bfloat16)
    bias = jnp.asarray(rng.standard_normal((num_experts, width)), jnp.float32)
    factor = jnp.asarray(rng.random(ids.size), jnp.float32)
    blocks = row_blocks(jnp.asarray(ids, jnp.int32), num_experts, tiles.rows)
    call = partial(
        product, matrix=Matrix(w), order=jnp.asarray(order, jnp.int32), blocks=blocks, tiles=tiles,
        dtype=jnp.float32, interpret=True,
    )  # fmt: skip
    real = ids < num_experts
    sorted_rows = Rows(x[order // top_k])
    slots = np.asarray(x, np.float32)[np.arange(ids.size) // top_k]
    matrices = np.asarray(w, np.float32)[np.minimum(ids, num_experts - 1)]
    sums, biases = np.einsum("rk,rnk->rn", slots, matrices), np.asarray(bias)[ids[real]]
    first = np.asarray(call(Rows(x), weighed=Weighed(bias), top_k=top_k))
    close = partial(np.testing.assert_allclose, rtol=0, atol=1e-4)
    close(first[: real.sum()], (sums[real] + biases)[np.argsort(ids[real], kind="stable")])
    plain = np.asarray(call(sorted_rows, top_k=None))
    close(plain[real], sums[real])
    weighed = np.asarray(call(sorted_rows, weighed=Weighed(bias, factor), top_k=None))
    close(weighed[real], sums[real] + biases * np.asarray(factor)[real, None])


def test_tiles_fit_every_gpu_and_divide_every_size() -> None:
    for experts in (1, 8, 128, 256):
        for rows, decoded in itertools.product((1, 8, 64, 512, 4096, 65536), (False, True)):
            tiles = tiles_of(rows, experts, decoded=decoded)
            step = (2 * tiles.rows + (1 if decoded else 2) * tiles.columns) * tiles.depth
            assert tiles.depth == 128 or not decoded
            assert step * tiles.stages <= CONSUMER_SHARED_BYTES, (rows, experts)
            assert not 128 % tiles.columns and not 128 % tiles.depth
            assert tiles.rows in (16, 32, 64, 128)
    assert tiles_of(64 * 8, 128).rows == 16 and tiles_of(4096 * 8, 128).rows == 128


# Whole layers.


def outputs(cfg: mm.MoEConfig, weights: mm.ExpertWeights, ranks: int = 1) -> dict[str, np.ndarray]:
    """Of every routing; over ranks inside a `shard_map` that does not look at varying axes, which
    Pallas' interpreter does not keep."""
    x, _, factors = cases.tokens(cfg, TOKENS)
    call = partial(mm.mega_moe, config=cfg, implementation="xla")
    if ranks > 1:
        of_rows = P("ep")
        call = jax.shard_map(
            lambda x, ids, factors, weights, mask: mm.mega_moe(
                x, ids, factors, weights,
                config=cfg, implementation="xla", axis="ep", padding_mask=mask,
            ),
            mesh=cases.ep_mesh(ranks),
            in_specs=(of_rows, of_rows, of_rows, weights.partition_specs("ep"), of_rows),
            out_specs=of_rows,
            check_vma=False,
        )  # fmt: skip
    run = jax.jit(call)
    return {
        name: np.asarray(
            run(x, ids, factors, weights, mask)
            if ranks > 1
            else run(x, ids, factors, weights, padding_mask=mask),
            np.float32,
        )
        for name, (ids, mask) in cases.routings(cfg, TOKENS).items()
    }


CASES = [
    (form, ranks, biased, changes)
    for form in pallas_experts.FORMATS
    for ranks, biased, changes in (
        (1, False, {}),
        (2, True, {"activation": cases.ACTIVATIONS["gpt_oss"]}),
    )
]
CASES.append(("bf16", 2, False, {"num_shared_experts": 1}))
CASES.append(("bf16", 1, True, {"activation": cases.ACTIVATIONS["clamped"]}))


@pytest.mark.parametrize(("form", "ranks", "biased", "changes"), CASES)
def test_layer_equals_the_loop(
    form: str, ranks: int, biased: bool, changes: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    cfg = cases.config(form, **changes)
    weights = cases.weights(cfg, biased=biased)
    want = outputs(cfg, weights)
    traced = request.getfixturevalue("interpreted")
    got = outputs(cfg, weights, ranks)
    assert len(traced) == 2
    for name, y in got.items():
        cases.assert_agree(y, want[name], form, name)
        _, mask = cases.routings(cfg, TOKENS)[name]
        assert not y[mask].any()


def test_vmap_folds_its_batch_into_rows(interpreted: list[str]) -> None:
    cfg = cases.config("bf16")
    weights, inputs = cases.weights(cfg), cases.tokens(cfg, TOKENS)
    call = partial(mm.mega_moe, config=cfg, implementation="xla")
    want = call(*inputs, weights)
    halves = [array.reshape(2, TOKENS // 2, -1) for array in inputs]
    got = jax.vmap(call, in_axes=(0, 0, 0, None))(*halves, weights)
    np.testing.assert_array_equal(
        np.asarray(got, np.float32).reshape(TOKENS, -1), np.asarray(want, np.float32)
    )
    assert interpreted


# Where it runs.


def lowered_for(platform: str, traced: Any) -> str:
    """The text of a traced call for a platform."""
    if platform == "cuda" and hasattr(pallas_products.triton, "get_gpu_info"):
        pytest.skip("JAX 0.11 and newer lower Triton's kernels where a GPU is")
    return traced.lower(lowering_platforms=(platform,)).as_text()


def lowered(platform: str, ranks: int = 1, form: str = "bf16", **options: Any) -> str:
    """A call lowered for a platform, without a device of it."""
    cfg = cases.config(form)
    place = {} if ranks == 1 else dict(mesh=cases.ep_mesh(ranks, **options), axis="ep")
    call = jax.jit(partial(mm.mega_moe, config=cfg, implementation="xla", **place))
    return lowered_for(platform, call.trace(*cases.tokens(cfg, TOKENS), cases.weights(cfg)))


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {}), (2, {"kind": AxisType.Auto}), (4, {"kind": AxisType.Explicit})],
    ids=["one", "auto axes", "explicit axes"],
)
def test_lowers_for_cuda(ranks: int, options: dict[str, Any], on_gpu: None) -> None:
    assert lowered("cuda", ranks, **options).count(TARGET) == 2


@pytest.mark.parametrize("form", pallas_experts.FORMATS)
def test_lowers_every_format_that_it_has(form: str, on_gpu: None) -> None:
    assert lowered("cuda", form=form).count(TARGET) == 2


@pytest.mark.parametrize("form", sorted(set(cases.RECIPES) - set(pallas_experts.FORMATS)))
def test_other_formats_keep_the_loop(form: str, on_gpu: None) -> None:
    assert TARGET not in lowered("cuda", form=form)


@pytest.mark.parametrize("platform", ["cpu", "rocm", "tpu"])
def test_other_platforms_keep_the_loop(platform: str, on_gpu: None) -> None:
    assert TARGET not in lowered(platform)


def test_gradients_keep_the_loop(on_gpu: None) -> None:
    cfg = cases.config("bf16")
    weights = cases.weights(cfg)

    def loss(x: jax.Array, *rest: jax.Array) -> jax.Array:
        return mm.mega_moe(x, *rest, weights, config=cfg, implementation="xla").sum()

    traced = jax.jit(jax.grad(loss)).trace(*cases.tokens(cfg, TOKENS))
    assert lowered_for("cuda", traced).count(TARGET) in (0, 2), "once forward at most"


def test_a_symbolic_number_of_tokens_keeps_the_loop(on_gpu: None) -> None:
    cfg = cases.config("bf16")
    (rows,) = export.symbolic_shape("t", constraints=["t >= 1", "t <= 64"])
    shapes = [
        jax.ShapeDtypeStruct((rows, *array.shape[1:]), array.dtype)
        for array in cases.tokens(cfg, TOKENS)
    ]
    call = jax.jit(partial(mm.mega_moe, config=cfg, implementation="xla"))
    assert TARGET not in export.export(call)(*shapes, cases.weights(cfg)).mlir_module()


@pytest.mark.parametrize(
    ("capabilities", "expected"), [((9.0,), True), ((8.0, 12.0), True), ((7.5, 8.6), False)]
)
def test_available_on_gpus_with_bf16_tensor_cores(
    capabilities: tuple[float, ...], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [SimpleNamespace(compute_capability=str(each)) for each in capabilities]
    monkeypatch.setattr(jax, "local_devices", lambda backend: found)
    assert pallas_products.available() is expected
    monkeypatch.setenv(pallas_products.SWITCH, "0")
    assert not pallas_products.available()


def test_not_available_without_a_gpu() -> None:
    assert not pallas_products.available()
