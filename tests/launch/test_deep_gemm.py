"""deep_gemm.py: what the kernels are launched with, however `mega_moe` is called."""

import dataclasses
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulation import H200, MEGA, STAGING, Emulation, call, config, kernel_name, sym_buffer
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_megamoe as mm
from jax_megamoe.launch import deep_gemm
from jax_megamoe.launch.factors import FACTORS
from jax_megamoe.op import mega_moe as op
from jax_megamoe.runtime import extension

TOKENS = 32
KINDS = pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)


def buffers(emulation: Emulation) -> dict[int, bytes]:
    """The SymBuffer that each device's one MegaMoE launch was given."""
    launches = emulation.launches(MEGA).items()
    return {device: bytes.fromhex(each["parameters"][7]) for device, each in launches}


def group(*devices: int) -> dict[int, bytes]:
    """What `buffers` gives for one expert-parallel group in rank order."""
    return {device: sym_buffer(devices, rank) for rank, device in enumerate(devices)}


def watch(
    emulation: Emulation, cfg: mm.MoEConfig, ranks: int, rows: int, argument: str, like: np.ndarray
) -> Callable[[], dict[int, np.ndarray]]:
    """Has the staging kernel's launches record what an argument points to.

    Args:
        emulation: the emulated devices.
        cfg: of the call.
        ranks: of the call.
        rows: tokens of a rank.
        argument: its name.
        like: an array of the shape and dtype that it should point to.

    Returns:
        A function that gives the arrays by device.
    """
    plan = deep_gemm.Route(emulation.device, "sgl", ranks, "").plan(cfg, rows)
    (step,) = (each for each in plan.launches if each.kernel.symbol == STAGING)
    index = [each.name for each in step.arguments].index(argument)
    name = kernel_name(extension.encode_kernel(step.kernel))
    emulation.driver.peek(name, index, like.nbytes)

    def read() -> dict[int, np.ndarray]:
        return {
            device: np.frombuffer(bytes.fromhex(each["peeked"]), like.dtype).reshape(like.shape)
            for device, each in emulation.launches(STAGING).items()
        }

    return read


# Devices, groups and buffers.


@KINDS
@pytest.mark.parametrize("ranks", [2, 8])
def test_outside_shard_map(ranks: int, kind: AxisType, emulation: Emulation) -> None:
    call(config(), mesh=cases.ep_mesh(ranks, kind), axis="ep")
    assert buffers(emulation) == group(*range(ranks))


@KINDS
def test_current_mesh(kind: AxisType, emulation: Emulation) -> None:
    """Outside jit it has devices."""
    with jax.set_mesh(cases.ep_mesh(4, kind)):
        mm.allocate_buffers(config(), mesh=cases.ep_mesh(4, kind), axis="ep")
        call(config(), axis="ep")
    assert buffers(emulation) == group(0, 1, 2, 3)


def test_ranks_follow_the_mesh(emulation: Emulation) -> None:
    devices = np.array(jax.devices())[[6, 1, 3, 4]]
    call(config(), mesh=Mesh(devices, ("ep",)), axis="ep")
    assert buffers(emulation) == group(6, 1, 3, 4)


def test_axis_of_two_mesh_axes(emulation: Emulation) -> None:
    """The last varies fastest, whichever order the mesh has."""
    mesh = jax.make_mesh((4, 2), ("chip", "host"), axis_types=(AxisType.Auto,) * 2)
    call(config(), mesh=mesh, axis=("host", "chip"))
    ids = [device.id for device in np.ravel(mesh.devices.T)]
    assert buffers(emulation) == group(*ids)


@KINDS
def test_groups_of_an_unused_mesh_axis(kind: AxisType, emulation: Emulation) -> None:
    mesh = jax.make_mesh((2, 4), ("dp", "ep"), axis_types=(kind,) * 2)
    call(config(), mesh=mesh, axis="ep")
    assert buffers(emulation) == group(0, 1, 2, 3) | group(4, 5, 6, 7)


def test_meshes_of_one_axis_have_their_own_buffers(emulation: Emulation) -> None:
    devices = np.array(jax.devices())
    for ids in ([0, 1], [2, 3], [1, 0], [0, 1]):
        emulation.driver.clear()
        call(config(), mesh=Mesh(devices[ids], ("ep",)), axis="ep")
        assert buffers(emulation) == group(*ids)
    assert len(emulation.memory.allocated) == 3


def test_one_device_is_the_arrays_own(emulation: Emulation) -> None:
    cfg = config()
    for device in jax.devices()[3:5]:
        emulation.driver.clear()
        arrays = jax.device_put((*cases.tokens(cfg, TOKENS), cases.weights(cfg)), device)
        jax.block_until_ready(mm.mega_moe(*arrays, config=cfg))
        assert buffers(emulation) == group(device.id)


def test_replicated_arrays_run_on_each_of_their_devices(emulation: Emulation) -> None:
    cfg, mesh = (
        config(),
        jax.make_mesh((3,), ("copy",), (AxisType.Auto,), devices=jax.devices()[:3]),
    )
    arrays = jax.device_put(
        (*cases.tokens(cfg, TOKENS), cases.weights(cfg)), NamedSharding(mesh, P())
    )
    jax.block_until_ready(mm.mega_moe(*arrays, config=cfg))
    assert buffers(emulation) == group(0) | group(1) | group(2)


def test_traced_arrays_run_on_the_default_device(emulation: Emulation) -> None:
    cfg = config()
    arrays = jax.tree.map(np.asarray, (*cases.tokens(cfg, TOKENS), cases.weights(cfg)))
    for device, ordinal in ((jax.devices()[5], 5), ("cpu", 0), (None, 0)):
        emulation.driver.clear()
        with jax.default_device(device):
            jax.block_until_ready(jax.jit(partial(mm.mega_moe, config=cfg))(*arrays))
        assert buffers(emulation) == group(ordinal)


@pytest.mark.parametrize(("implementation", "want"), [(None, [4]), ("deep_gemm", [4]), ("xla", [])])
def test_a_call_looks_for_its_devices_once(
    implementation: str | None,
    want: list[int],
    emulation: Emulation,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cfg, found, devices_of = config(), [], op._devices

    def watched(*arguments: Any) -> list[jax.Device]:
        found.extend(devices_of(*arguments))
        return devices_of(*arguments)

    monkeypatch.setattr(op, "_devices", watched)
    arrays = jax.device_put((*cases.tokens(cfg, TOKENS), cases.weights(cfg)), jax.devices()[4])
    jax.block_until_ready(mm.mega_moe(*arrays, config=cfg, implementation=implementation))
    assert [device.id for device in found] == want
    assert buffers(emulation) == group(*want)


def test_configs_of_one_size_share_a_buffer(emulation: Emulation) -> None:
    first, other = config(), config(activation=mm.Activation("swiglu", clamp=7.0))
    larger = config(max_num_tokens=4000)
    for cfg in (first, other, larger):
        call(cfg, mesh=cases.ep_mesh(2), axis="ep")
    assert len(emulation.memory.allocated) == 2


def test_layouts_of_one_size_have_their_own_buffers(emulation: Emulation) -> None:
    """One has its counters where the other has tokens."""
    emulation.device = H200
    sizes = dict(num_experts=16, hidden_size=2048)
    first = config("fp8_block", top_k=2, intermediate_size=512, max_num_tokens=1024, **sizes)
    other = config("fp8_block", top_k=4, intermediate_size=768, max_num_tokens=512, **sizes)
    num_bytes = []
    for cfg in (first, other, first):
        mm.allocate_buffers(cfg)
        num_bytes.append(emulation.memory.num_bytes)
    assert num_bytes == [21_860_352] * 3
    assert len(emulation.memory.allocated) == 2


def test_reserved_multiprocessors_are_left_out(emulation: Emulation) -> None:
    call(config(reserved_sms=8), mesh=cases.ep_mesh(2), axis="ep")
    assert {each["grid"][0] for each in emulation.launches(MEGA).values()} == {140}


# Inside the caller's shard_map.


def inside(cfg: mm.MoEConfig, around: Mesh, *, check_vma: bool = True, **kwargs: Any) -> Any:
    """The call from inside a shard_map that adds something of its own."""
    weights, rows = cases.weights(cfg), P(around.axis_names)

    def local(x: Any, ids: Any, factors: Any, weights: mm.ExpertWeights) -> Any:
        options = dict(axis="ep", implementation="deep_gemm", return_stats=True) | kwargs
        y, counts = mm.mega_moe(x, ids, factors, weights, config=cfg, **options)
        return 2 * y, counts[None]

    run = jax.shard_map(
        local,
        mesh=around,
        in_specs=(rows, rows, rows, weights.partition_specs("ep")),
        out_specs=(rows, rows),
        check_vma=check_vma,
    )
    return jax.block_until_ready(jax.jit(run)(*cases.tokens(cfg, TOKENS), weights))


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma: bool, emulation: Emulation) -> None:
    mesh = jax.make_mesh((2, 4), ("dp", "ep"), axis_types=(AxisType.Auto,) * 2)
    mm.allocate_buffers(config(), mesh=mesh, axis="ep")
    y, counts = inside(config(), mesh, check_vma=check_vma)
    assert y.shape == (TOKENS, 256) and counts.shape == (8, 4)
    assert buffers(emulation) == group(0, 1, 2, 3) | group(4, 5, 6, 7)


def test_inside_shard_map_the_mesh_must_be_known(emulation: Emulation) -> None:
    mesh = cases.ep_mesh(4)
    text = (
        "mesh: expected the mesh of the shard_map around this call, got None; pass mesh= too, or "
        r"call jax_megamoe.allocate_buffers\(config, mesh=mesh, axis=axis\) once before"
    )
    with pytest.raises(ValueError, match=f"^{text}"):
        inside(config(), mesh)
    mm.allocate_buffers(config(), mesh=mesh, axis="ep")
    inside(config(), mesh)
    assert buffers(emulation) == group(0, 1, 2, 3)


def test_inside_shard_map_with_the_mesh_named(emulation: Emulation) -> None:
    mesh = cases.ep_mesh(4)
    inside(config(), mesh, mesh=mesh)
    assert buffers(emulation) == group(0, 1, 2, 3)


def test_inside_shard_map_two_meshes_are_ambiguous(emulation: Emulation) -> None:
    devices = np.array(jax.devices())
    meshes = [Mesh(devices[ids], ("ep",)) for ids in ([0, 1], [2, 3])]
    for mesh in meshes:
        mm.allocate_buffers(config(), mesh=mesh, axis="ep")
    text = "mesh: expected the mesh .*, got None, and 2 meshes with buffers; pass mesh= too"
    with pytest.raises(ValueError, match=text):
        inside(config(), meshes[0])
    inside(config(), meshes[1], mesh=meshes[1])
    assert buffers(emulation) == group(2, 3)


# What the kernels read.


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("argument", ["topk_idx", "padding_mask"])
def test_the_staging_kernel_masks(ranks: int, argument: str, emulation: Emulation) -> None:
    """It is given the ids as they came and the padding mask (tests/kernels: what it does)."""
    cfg, place = config(), dict(mesh=cases.ep_mesh(4), axis="ep") if ranks == 4 else {}
    x, ids, factors = cases.tokens(cfg, TOKENS)
    ids = ids.at[3, 1].set(16).at[9, 0].set(-7)
    mask = np.arange(TOKENS) % 8 >= 5
    want = np.asarray(ids if argument == "topk_idx" else mask)
    read = watch(emulation, cfg, ranks, TOKENS // ranks, argument, want[: TOKENS // ranks])
    apply = jax.jit(partial(mm.mega_moe, config=cfg, implementation="deep_gemm", **place))
    jax.block_until_ready(apply(x, ids, factors, cases.weights(cfg), padding_mask=mask))
    got = read()
    np.testing.assert_array_equal(np.concatenate([got[rank] for rank in range(ranks)]), want)


@pytest.mark.parametrize("field", ["logical_to_physical", "num_replicas"])
def test_the_staging_kernel_chooses_replicas(field: str, emulation: Emulation) -> None:
    cfg = config(num_experts=16, num_logical_experts=8)
    replicas = mm.replica_map(np.arange(16)[::-1] // 2, 8)
    want = np.asarray(getattr(replicas, field))
    read = watch(emulation, cfg, 4, TOKENS // 4, field, want)
    call(cfg, mesh=cases.ep_mesh(4), axis="ep", eplb=replicas)
    for got in read().values():
        np.testing.assert_array_equal(got, want)
    assert len(read()) == 4


def test_sgl_takes_nvfp4_factors_as_pairs_and_one_input_scale(emulation: Emulation) -> None:
    cfg = config("nvfp4", kernel_source="sgl")
    weights = cases.weights(cfg)
    largest = float(weights.routed.w2_input_scale.max())
    factors = jax.shard_map(
        lambda one: FACTORS["folded"](one, "ep"),
        mesh=cases.ep_mesh(4),
        in_specs=(weights.partition_specs("ep"),),
        out_specs=P("ep"),
    )(weights)
    np.testing.assert_array_equal(
        factors["w13_weight_scale_2"], np.stack([weights.routed.w13_weight_scale_2] * 2, axis=1)
    )
    np.testing.assert_allclose(factors["w2_input_scale"], np.full(16, 1 / largest), rtol=1e-6)
    np.testing.assert_allclose(
        factors["w2_weight_scale_2"], weights.routed.w2_weight_scale_2 * largest, rtol=1e-6
    )


def test_vllm_reads_nvfp4s_input_scale_from_an_array(emulation: Emulation) -> None:
    """Two layers that differ in it alone are one program."""
    cfg = config("nvfp4", kernel_source="vllm", hidden_size=512, num_shared_experts=1)
    weights, symbol = cases.weights(cfg), "sm100_nvfp4_mega_moe_impl"
    halved = weights.with_routed(w2_input_scale=weights.routed.w2_input_scale / 2)
    unscaled = weights.with_routed(w2_input_scale=jnp.zeros_like(weights.routed.w2_input_scale))
    apply = jax.jit(partial(mm.mega_moe, config=cfg, mesh=cases.ep_mesh(4), axis="ep"))
    inputs = cases.tokens(cfg, TOKENS)
    largest = float(weights.routed.w2_input_scale.max())
    for each, want in ((weights, largest), (halved, largest / 2), (unscaled, 1.0)):
        compiled = apply.lower(*inputs, each).compile()
        (spec,) = (spec for spec in emulation.built if spec.symbol == symbol)
        name = kernel_name(extension.encode_kernel(spec))
        emulation.driver.clear()
        emulation.driver.peek(name, 4, 4)
        jax.block_until_ready(compiled(*inputs, each))
        launches = emulation.launches(symbol)
        assert len(launches) == 4
        for launch in launches.values():
            assert struct.unpack("<f", bytes.fromhex(launch["peeked"]))[0] == np.float32(want)
            (staging,) = (
                other["parameters"]
                for device, other in emulation.launches(STAGING).items()
                if device == launch["device"]
            )
            alpha, scale = staging[14], staging[-1]  # what it writes is what the kernel reads
            assert alpha == launch["parameters"][3]
            assert struct.unpack("<f", bytes.fromhex(scale))[0] == 1
    assert apply._cache_size() <= 1
    # Before each call every rank clears the words that replays of a CUDA graph would repeat.
    fills = emulation.driver.calls("cuMemsetD8Async")
    assert [each["count"] for each in fills] == [576] * 4


def test_vllms_nvfp4_factors(emulation: Emulation) -> None:
    weights = cases.weights(config("nvfp4", kernel_source="vllm"))
    factors = jax.shard_map(
        lambda one: FACTORS["input_scale_apart"](one, "ep"),
        mesh=cases.ep_mesh(4),
        in_specs=(weights.partition_specs("ep"),),
        out_specs=dict(w2_weight_scale_2=P("ep"), l2_activation_scale=P()),
    )(weights)
    largest = weights.routed.w2_input_scale.max()
    np.testing.assert_array_equal(factors["l2_activation_scale"], largest[None])
    np.testing.assert_array_equal(
        factors["w2_weight_scale_2"], weights.routed.w2_weight_scale_2 * largest
    )


# Many calls.


def test_second_call_compiles_nothing(emulation: Emulation) -> None:
    cfg, mesh = config(max_num_tokens=57), cases.ep_mesh(4)
    call(cfg, mesh=mesh, axis="ep")
    built = len(emulation.built)
    call(dataclasses.replace(cfg), mesh=cases.ep_mesh(4), axis="ep")
    assert built == len(emulation.built) == 2
    assert len(emulation.driver.launches()) == 16


@pytest.mark.parametrize("ranks", [1, 4])
def test_scan_over_layers(ranks: int, emulation: Emulation) -> None:
    cfg = config(max_num_tokens=55)  # its own: a trace that another test left would build nothing
    place = dict(mesh=cases.ep_mesh(4), axis="ep") if ranks == 4 else {}
    layers = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), cases.weights(cfg))
    x, ids, factors = cases.tokens(cfg, TOKENS)
    apply = partial(mm.mega_moe, config=cfg, implementation="deep_gemm", **place)

    @jax.jit
    def model(x: Any, layers: mm.ExpertWeights) -> Any:
        return lax.scan(lambda x, layer: (apply(x, ids, factors, layer), None), x, layers)[0]

    jax.block_until_ready(model(x, layers))
    assert len(emulation.built) == 2 and len(emulation.memory.allocated) == 1
    launches = emulation.driver.launches()
    for rank in range(ranks):
        mine = [each["kernel"] for each in launches if each["device"] == rank]
        assert len(mine) == 6 and mine == mine[:2] * 3
