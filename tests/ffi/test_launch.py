"""Jitted calls on the CPU platform, down to what the recording driver was asked to do."""

import struct
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from recording import RecordingDriver

from jax_megamoe.launch import launcher
from jax_megamoe.runtime import extension

BASE = 1 << 40
STRIDE = 1 << 20  # between the made-up bases of ranks
KEY = "test/ep"
MAX_RANKS = 72


def register(num_ranks: int, key: str = KEY, num_bytes: int = plans.BUFFER_BYTES) -> None:
    """Names made-up buffers for ranks on devices 0, 1, ...; rank r's is at BASE + r * STRIDE."""
    bases = [BASE + rank * STRIDE for rank in range(num_ranks)]
    for rank, base in enumerate(bases):
        extension.module().register_symmetric_buffer(key, rank, base, bases, rank, num_bytes)


def unregister(num_ranks: int, key: str = KEY) -> None:
    """Forgets them."""
    for rank in range(num_ranks):
        extension.module().unregister_symmetric_buffer(key, rank)


@pytest.fixture(params=[1, 2, 4, 8])
def num_ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """A number of ranks whose buffers are registered."""
    register(request.param)
    yield request.param
    unregister(request.param)


def call(symbol: str, num_ranks: int, **options: bool) -> Callable[[], jax.Array]:
    """A call of whole_plan, jitted over a mesh of that many CPU devices."""
    plan = plans.whole_plan(num_ranks, symbol)
    mesh = jax.make_mesh((num_ranks,), ("ep",), devices=jax.devices()[:num_ranks])

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P("ep"), P()), out_specs=P("ep"))
    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        return launcher.launch(plan, {"x": x, "w": w}, plans.RESULTS, buffer_key=KEY, **options)[
            "y"
        ]

    def sharded() -> jax.Array:
        one = plans.operands()
        x = jnp.concatenate([one["x"]] * num_ranks)
        x = jax.device_put(x, NamedSharding(mesh, P("ep")))
        w = jax.device_put(one["w"], NamedSharding(mesh, P()))
        return jax.block_until_ready(run(x, w))

    return sharded


def u64(text: str) -> int:
    """A pointer parameter."""
    return struct.unpack("<Q", bytes.fromhex(text))[0]


def test_launches_what_the_plan_says(driver: RecordingDriver, num_ranks: int) -> None:
    call(f"whole_{num_ranks}", num_ranks)()
    assert sorted(each["device"] for each in driver.launches()) == list(range(num_ranks))
    for launch in driver.launches():
        rank = launch["device"]
        assert launch["kernel"] == f"whole_{num_ranks}"
        assert launch["stream"] == rank + 1
        assert (launch["grid"], launch["block"]) == ([132, 1, 1], [384, 1, 1])
        assert launch["smem"] == 200_000
        assert launch["launch_attrs"] == [[4, [2, 1, 1]], [6, 1]]
        _, stats, tokens, scale, symmetric, acts, weights, _, fast, factors = launch["parameters"]
        assert bytes.fromhex(fast) == b"\1"
        rows = BASE + rank * STRIDE + 2048
        values = struct.pack("<I?3xffQQI4x", 3_000_000_000, True, 0.5, -2.0, 0, rows, 7)
        assert bytes.fromhex(factors[16:]) == values
        assert u64(factors[:16]) == weights["base"] + 16
        assert stats == "00" * 8
        assert bytes.fromhex(tokens) == struct.pack("<I", 4_000_000_000)
        assert bytes.fromhex(scale) == struct.pack("<f", 0.1)
        assert acts == {
            "base": BASE + rank * STRIDE + 1024,
            "dtype": 0, "dims": [128, 8], "strides": [128], "box": [128, 4], "elem_strides": [1, 1],
            "interleave": 0, "swizzle": 3, "l2": 3, "oob": 0,
        }  # fmt: skip
        assert weights.pop("base") % 16 == 0
        assert weights == {
            "dtype": 14, "dims": [256, 4, 2, 2], "strides": [128, 512, 1024], "box": [128, 4, 1, 1],
            "elem_strides": [1, 1, 1, 1], "interleave": 0, "swizzle": 3, "l2": 2, "oob": 1,
        }  # fmt: skip
        offsets = [(peer - rank) * STRIDE for peer in range(num_ranks)]
        offsets += [0] * (MAX_RANKS - num_ranks)
        expected = struct.pack("<Q72qI4x", BASE + rank * STRIDE, *offsets, rank)
        assert bytes.fromhex(symmetric) == expected


def test_fills_before_it_launches(driver: RecordingDriver) -> None:
    register(1)
    call("fills", 1)()
    unregister(1)
    fill, launch = driver.calls()[-2:]
    assert fill == {
        "call": "cuMemsetD8Async", "device": 0, "address": BASE + 128, "value": 0, "count": 576,
        "stream": 1,
    }  # fmt: skip
    assert launch["call"] == "cuLaunchKernelEx"


def test_pointers_are_the_arrays(driver: RecordingDriver) -> None:
    x = plans.operands()["x"]
    run = jax.jit(lambda x: launcher.launch(plans.pointer_plan(), {"x": x}, plans.RESULTS)["y"])
    y = jax.block_until_ready(run(x))
    (launch,) = driver.launches()
    assert [u64(each) for each in launch["parameters"]] == [
        x.unsafe_buffer_pointer(),
        y.unsafe_buffer_pointer(),
    ]
    assert launch["launch_attrs"] == []
    assert driver.calls("cuFuncSetAttribute") == []


def test_constants_are_operands(driver: RecordingDriver) -> None:
    register(1)
    driver.peek("constants", 7, len(plans.TABLE) - 4)
    call("constants", 1)()
    unregister(1)
    assert bytes.fromhex(driver.launches()[0]["peeked"]) == plans.TABLE[4:]


def test_an_array_that_is_operand_and_result_is_updated_in_place(driver: RecordingDriver) -> None:
    counts = jnp.arange(512, dtype=jnp.int32)
    plan = plans.pointer_plan("in_place")

    def run(x: jax.Array, y: jax.Array) -> jax.Array:
        results = {"y": jax.ShapeDtypeStruct(y.shape, y.dtype)}
        return launcher.launch(plan, {"x": x, "y": y}, results)["y"]

    text = jax.jit(run).lower(plans.operands()["x"], counts).as_text()
    assert "output_operand_alias<output_tuple_indices = [], operand_index = 1" in text
    # The recording driver writes nothing, so the operand's values come through.
    np.testing.assert_array_equal(jax.jit(run)(plans.operands()["x"], counts), np.arange(512))
    assert len(driver.launches()) == 1


def test_loads_a_kernel_once_and_on_every_device_before_any_launch(driver: RecordingDriver) -> None:
    register(4)
    run = call("loaded_once", 4)
    run()
    run()
    unregister(4)
    functions = [each["call"] for each in driver.calls()]
    assert functions.count("cuLibraryLoadData") == 1
    loaded = driver.calls("cuFuncLoad")
    assert [each["device"] for each in loaded] == [0, 1, 2, 3]
    allowed = driver.calls("cuFuncSetAttribute")
    assert [each["device"] for each in allowed] == [0, 1, 2, 3]
    assert {(each["attribute"], each["value"]) for each in allowed} == {(8, 200_000)}
    last_load = max(i for i, name in enumerate(functions) if name == "cuFuncLoad")
    assert last_load < functions.index("cuLaunchKernelEx")
    assert functions.count("cuLaunchKernelEx") == 8


def test_eight_devices_at_once(driver: RecordingDriver) -> None:
    register(8)
    run = call("at_once", 8)
    for _ in range(25):
        run()
    unregister(8)
    launches = driver.launches()
    assert len(launches) == 8 * 25
    for launch in launches:
        rank = launch["device"]
        assert launch["stream"] == rank + 1
        assert launch["parameters"][5]["base"] == BASE + rank * STRIDE + 1024
        assert u64(launch["parameters"][4][:16]) == BASE + rank * STRIDE


def test_inside_a_scan_every_step_launches(driver: RecordingDriver) -> None:
    plan = plans.pointer_plan("scanned")

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return launcher.launch(plan, {"x": x}, plans.RESULTS)["y"], None

        return jax.lax.scan(step, x, None, length=5)[0]

    jax.block_until_ready(run(plans.operands()["x"]))
    assert len(driver.launches()) == 5


def test_results_vary_over_the_axis(driver: RecordingDriver) -> None:
    mesh = jax.make_mesh((2,), ("ep",), devices=jax.devices()[:2])

    def replicated(x: jax.Array) -> jax.Array:
        return launcher.launch(plans.pointer_plan("varying"), {"x": x}, plans.RESULTS)["y"]

    run = jax.shard_map(replicated, mesh=mesh, in_specs=P("ep"), out_specs=P())
    x = jax.ShapeDtypeStruct((16, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P("ep")))
    with pytest.raises(ValueError, match=r"out_specs.*replication|varying"):
        jax.jit(run).lower(x)


def test_a_graph_holds_the_buffer(driver: RecordingDriver) -> None:
    register(1)
    run = call("graph", 1, command_buffer=True)
    run()
    with pytest.raises(
        RuntimeError, match=r"expected no executable .* got 1 with CUDA graphs; drop"
    ):
        unregister(1)
    del run
    jax.clear_caches()
    unregister(1)
    assert len(driver.launches()) == 1


def test_without_xla_ranks_share_a_device(driver: RecordingDriver) -> None:
    module = extension.module()
    keys = ["direct/0", "direct/1"]
    bases = [BASE, BASE + STRIDE]
    for rank, key in enumerate(keys):
        module.register_symmetric_buffer(key, 0, bases[rank], bases, rank, plans.BUFFER_BYTES)
    programs = [
        launcher.program(plans.whole_plan(2, "direct"), ["x", "w", "table"], ["y"], buffer_key=key)
        for key in keys
    ]
    arrays = [(BASE * 2, 1024), (BASE * 3, 2048), (BASE * 4, 16)], [(BASE * 5, 1024)]
    for each in programs:
        each.prepare(0, *arrays)
    assert driver.launches() == []
    for rank, each in enumerate(programs):
        each.launch(0, 77 + rank, *arrays)
        module.unregister_symmetric_buffer(keys[rank], 0)
    for rank, launch in enumerate(driver.launches()):
        assert (launch["device"], launch["stream"]) == (0, 77 + rank)
        y, *_, symmetric, acts, weights, table, _, factors = launch["parameters"]
        assert (u64(factors[:16]), u64(factors[64:80])) == (BASE * 3 + 16, bases[rank] + 2048)
        assert (u64(y), u64(table)) == (BASE * 5 + 64, BASE * 4 + 4)
        assert (acts["base"], weights["base"]) == (bases[rank] + 1024, BASE * 3)
        assert struct.unpack("<Qqq", bytes.fromhex(symmetric)[:24]) == (
            bases[rank], -rank * STRIDE, (1 - rank) * STRIDE
        )  # fmt: skip
    with pytest.raises(RuntimeError, match='"direct/0" on device 0: expected one allocated in'):
        programs[0].launch(0, 77, *arrays)
    with pytest.raises(ValueError, match="number of operands: expected 3, got 2"):
        fresh = launcher.program(plans.pointer_plan("direct_x"), ["x", "w", "table"], ["y"])
        fresh.prepare(0, arrays[0][:2], arrays[1])
