"""Golden launch records as calls of `mega_moe`, and recorded driver calls in the records' form."""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from emulation import Emulation, base_of, kernel_of, sym_buffer, u64
from golden_launches import Record, read
from golden_plans import RECORDED_NAMES, device_of
from golden_plans import record as planned
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_megamoe as mm
from jax_megamoe.launch import deep_gemm, launcher
from jax_megamoe.plan import check_sizes
from jax_megamoe.plan.kernel import KernelSpec
from jax_megamoe.weights.params import parameter_shapes

MAX_TOKEN_BYTES = 20 << 20
NUM_DEVICES = 8

_FACTORS = {"l1_alphas", "l2_alphas", "l2_act_scales", "l2_alpha"}
BY_POINTER = "l2_activation_scale"
"""What the records have by value, and the kernel is given by pointer here."""

_DERIVED = _FACTORS | {"topk_idx", "topk_weights", "sm_locality_domains"}
"""What is computed in the jitted program, at an address that nobody else knows."""

_TENSORS = RECORDED_NAMES | {
    "x": "x",
    "w13_weight_scale_2": "l1_alpha",
    "stats": "cumulative_local_expert_recv_stats",
}
"""The records' names of our arrays."""


def config_of(inputs: Record) -> mm.MoEConfig | None:
    """The config whose calls make a record's launch; None where no call of `mega_moe` does."""
    weight_format = _weight_format(inputs)
    factors = [inputs["use_x_scales"]]
    if not inputs["kernel"].startswith("pre_dispatch"):
        factors += [inputs["l1_alphas"], inputs["l2_alphas"]]
        factors += [inputs["l2_act_scales"]] * (inputs["provider"] == "sgl")
    unused = ("post_norm", "global_num_tokens", "env", "expert_scales")
    if (
        any(inputs.get(name) for name in unused)
        or inputs["weight_layout"] != "megamoe"
        or inputs["mma_type"] in ("mxf4xmxf4", "fp4xfp4")
        or any(factor != (weight_format == "nvfp4") for factor in factors)
        or inputs["activation"] == "swiglustep"
        or inputs["routed_scaling_factor"] != 1.0
        or inputs["num_tokens"] > inputs["max_tokens_per_rank"]
        or bool(inputs["num_shared_experts"]) != bool(inputs["shared_dtype"])
    ):
        return None
    sizes = {
        "num_experts": inputs["num_experts"],
        "top_k": inputs["top_k"],
        "hidden_size": inputs["hidden"],
        "intermediate_size": inputs["intermediate"],
        "max_num_tokens": inputs["max_tokens_per_rank"],
        "num_shared_experts": inputs["num_shared_experts"],
    }
    try:
        config = mm.MoEConfig(
            **sizes,
            weight_format=weight_format,
            activation=_activation(inputs),
            shared_format=inputs["shared_dtype"],
            kernel_source=inputs["provider"],
            fast_math=inputs["fast_math"],
        )
        check_sizes(config, device_of(inputs), inputs["num_ranks"])
    except ValueError:  # the op does not fuse that shared format, or the kernel cannot work
        return None
    return config


def _weight_format(inputs: Record) -> str:
    if inputs["arch"] == 90:
        return "fp8_block"
    by_type = {"bf16xbf16": "bf16", "fp8xfp4": "mxfp4", "fp8xfp8": "mxfp8", "nvfp4xnvfp4": "nvfp4"}
    name: str = inputs["weight_dtype"] or by_type.get(inputs["mma_type"], "")
    return name


def _activation(inputs: Record) -> mm.Activation:
    name, clamp = inputs["activation"], inputs["clamp"]
    if name == "swigluoai":
        return mm.Activation("swiglu", clamp=clamp, alpha=1.702, beta=1.0)
    if inputs["provider"] == "sgl":  # whose records leave alpha and beta at 1 and 0 always
        return mm.Activation(name, clamp=clamp)
    return mm.Activation(name, clamp=clamp, alpha=inputs["alpha"], beta=inputs["beta"])


def replays(file: str, max_weight_bytes: int) -> list[Record]:
    """The records of a file that a call over eight devices can make, with experts small enough."""
    found: list[Record] = []
    for record in read(file):
        inputs = record["inputs"]
        config = None if "rejected" in record else config_of(inputs)
        if config is None or inputs["num_ranks"] > NUM_DEVICES or not _knows_bound(record):
            continue
        num_bytes = parameter_shapes(config, has_biases=True).num_bytes
        token_bytes = 2 * inputs["num_ranks"] * inputs["num_tokens"] * inputs["hidden"]
        if num_bytes <= max_weight_bytes and token_bytes <= MAX_TOKEN_BYTES:
            found.append(record)
    return found


def _knows_bound(record: Record) -> bool:
    """Whether DeepGEMM would launch the same with the most tokens of any rank known, as we do."""
    inputs = record["inputs"]
    if inputs["kernel"] != "sm90_fp8_mega_moe":
        return True
    bounded = planned(inputs | {"num_tokens_bound": inputs["num_tokens"]})
    return bounded["launches"] == planned(inputs)["launches"]


def zeros(mesh: Mesh, shape: tuple[int, ...], dtype: Any, spec: P) -> jax.Array:
    """An array of zeros over the mesh."""
    sharding = NamedSharding(mesh, spec)
    part = np.zeros(sharding.shard_shape(shape), dtype)
    return jax.make_array_from_callback(shape, sharding, lambda _: part)


def zero_weights(config: mm.MoEConfig, mesh: Mesh, input_scale: float) -> mm.ExpertWeights:
    """A config's parameters without biases, all 0 but NVFP4's scale of second inputs, experts split
    over the mesh's axis."""
    shapes = parameter_shapes(config)
    place = partial(zeros, mesh)
    weights = jax.tree.map(
        lambda each, spec: place(each.shape, each.dtype, spec), shapes, shapes.partition_specs("ep")
    )
    scale = weights.routed.w2_input_scale
    return (
        weights
        if scale is None
        else weights.with_routed(w2_input_scale=scale + np.float32(input_scale))
    )


Known = list[tuple[str, int, int]]
"""(the records' name, first byte, end) of each array on one device."""


@dataclass(frozen=True)
class Replay:
    """One record's call, ready to run.

    Attributes:
        group: device ids in rank order.
        kernels: what it launches, in order.
        run: runs it; returns where each device's arrays were.
    """

    group: list[int]
    kernels: list[KernelSpec]
    run: Callable[[], dict[int, Known]]


def replay(record: Record, emulation: Emulation) -> Replay:
    """Compiles a record's call: of `mega_moe` under jit over a mesh of the record's ranks.

    A launch without tokens, which XLA would drop for its empty result, goes through the launcher.
    """
    inputs, config = record["inputs"], config_of(record["inputs"])
    assert config is not None
    emulation.device = device_of(inputs)
    num_ranks = inputs["num_ranks"]
    mesh = jax.make_mesh((num_ranks,), ("ep",), devices=jax.devices()[:num_ranks])
    if not inputs["num_tokens"]:
        return _without_tokens(config, mesh, inputs["stats"], inputs["l2_activation_scale"])
    rows = inputs["num_tokens"] * num_ranks
    arrays = {
        "x": zeros(mesh, (rows, config.hidden_size), "bfloat16", P("ep")),
        "topk_ids": zeros(mesh, (rows, config.top_k), "int32", P("ep")),
        "topk_weights": zeros(mesh, (rows, config.top_k), "float32", P("ep")),
    }
    weights = zero_weights(config, mesh, inputs["l2_activation_scale"])
    options = dict(return_stats=inputs["stats"], implementation="deep_gemm")
    call = partial(mm.mega_moe, config=config, mesh=mesh, axis="ep", **options)
    emulation.built.clear()
    compiled = jax.jit(call).lower(**arrays, weights=weights).compile()

    def run() -> dict[int, Known]:
        results = jax.block_until_ready(compiled(**arrays, weights=weights))
        y, *stats = results if inputs["stats"] else [results]
        operands = deep_gemm.matrix_operands(weights, fuses_shared=True)
        named = arrays | operands | {"y": y} | ({"stats": stats[0]} if stats else {})
        return {device.id: _addresses(named, device.id) for device in mesh.devices}

    return Replay([device.id for device in mesh.devices], list(emulation.built), run)


def _addresses(arrays: Mapping[str, jax.Array], device: int) -> Known:
    found: Known = []
    for name, array in arrays.items():
        (part,) = (each.data for each in array.addressable_shards if each.device.id == device)
        start = part.unsafe_buffer_pointer()
        found.append((_TENSORS.get(name, name), start, start + part.nbytes))
    return found


def _without_tokens(
    config: mm.MoEConfig, mesh: Mesh, with_stats: bool, input_scale: float
) -> Replay:
    route = deep_gemm.find_route(config, [list(mesh.devices)], "ep")
    plan = route.plan(config, 0, with_stats=with_stats)
    local = config.num_experts // mesh.size
    sizes = {"x": 0, "topk_ids": 0, "topk_weights": 0}
    scale = np.full(1, input_scale, np.float32)
    shapes = deep_gemm.matrix_operands(parameter_shapes(config, local), fuses_shared=True)
    for name, each in shapes.items():
        sizes[name] = math.prod(each.shape) * each.dtype.itemsize
    results = {"y": 0} | ({"stats": 4 * local} if with_stats else {})
    results |= {name: 4 * math.prod(shape) for name, shape, _ in plan.scratch}
    places = {name: (index + 1) << 36 for index, name in enumerate([*sizes, *results])}
    tables = {name: np.frombuffer(data, np.uint8) for name, data in plan.constants}
    operands = [(places[name], size) for name, size in sizes.items()]
    tables[BY_POINTER] = scale.view(np.uint8)
    operands += [(table.ctypes.data, table.nbytes) for table in tables.values()]
    outputs = [(places[name], size) for name, size in results.items()]
    program = launcher.program(plan, [*sizes, *tables], [*results], buffer_key=route.buffer_key)
    group = [device.id for device in mesh.devices]

    def run() -> dict[int, Known]:
        for device in group:
            program.prepare(device, operands, outputs)
            program.launch(device, device + 1, operands, outputs)
        every = (sizes | results).items()
        known = [
            (_TENSORS.get(name, name), places[name], places[name] + size) for name, size in every
        ]
        return {device: known for device in group}

    kernels = [step.kernel for step in plan.launches]
    return Replay(group, kernels, run)


@dataclass(frozen=True)
class Observer:
    """Turns what one device's launch was given into a record.

    Attributes:
        group: device ids in rank order.
        rank: the device's.
        num_bytes: of the symmetric buffer.
        known: where the device's arrays are.
    """

    group: list[int]
    rank: int
    num_bytes: int
    known: Known

    def launch(self, launch: Record, recorded: Record) -> Record:
        """A recorded driver call in the form of a golden record's launch, with its keys.

        Args:
            launch: the driver call.
            recorded: the golden launch, whose argument names it takes.
        """
        kernel = kernel_of(launch)
        clusters = [value for number, value in launch["launch_attrs"] if number == 4]
        pairs = zip(recorded["args"], launch["parameters"], strict=True)
        return {
            "entry": kernel.symbol,
            "include": kernel.header,
            "template_args": list(kernel.template_args),
            "grid": launch["grid"],
            "block": launch["block"],
            "smem": launch["smem"],
            "cluster": clusters[0] if clusters else [1, 1, 1],
            "launch_attrs": launch["launch_attrs"],
            "args": [self.argument(want, parameter, launch) for want, parameter in pairs],
        }

    def argument(self, want: Record, parameter: Any, launch: Record) -> Record:
        """One parameter, read as the kind of argument that the record has in its place."""
        name = want["name"]
        if "tmap" in want:
            value = dict(parameter)
            base = self.target(value.pop("base"), name)
            return {"name": name, "tmap": {"base": base if all(value["dims"]) else None} | value}
        data = bytes.fromhex(parameter)
        if "ptr" in want:
            return {"name": name, "ptr": self.target(u64(parameter), name)}
        if "sym" in want:
            own = struct.unpack_from("<Q", data)[0]
            exact = data == sym_buffer(self.group, self.rank)
            return {
                "name": name,
                "sym": {
                    "base": self.target(own, name),
                    "rank": struct.unpack_from("<I", data, 8 + 72 * 8)[0],
                    "offsets_are_peer_minus_self_then_zero": exact,
                },
            }
        if "u32" in want:
            return {"name": name, "u32": struct.unpack("<I", data)[0]}
        if name == BY_POINTER:
            data = bytes.fromhex(launch["peeked"])
        # The records have nine digits, which tell every float32.
        return {"name": name, "f32": float(f"{struct.unpack('<f', data)[0]:.9g}")}

    def target(self, address: int, name: str) -> Record | None:
        """What an address points into, and where."""
        own = base_of(self.group[self.rank])
        places = [*self.known, ("sym_buffer", own, own + self.num_bytes)]
        for tensor, start, end in places:
            if start <= address < end:
                return {"tensor": tensor, "offset": address - start}
        if address and name in _DERIVED:
            return {"tensor": name, "offset": 0}
        return {"tensor": f"nothing known at {address:#x}", "offset": 0} if address else None


def launch_of(record: Record, rank: int) -> Record:
    """What a golden record's launch says of a rank, in `Observer.launch`'s form."""
    (launch,) = record["outputs"]["launches"]
    keys = ("entry", "include", "template_args", "grid", "block", "smem", "cluster")
    args = [
        each | {"sym": each["sym"] | {"rank": rank}} if "sym" in each else each
        for each in launch["args"]
    ]
    return {key: launch[key] for key in keys} | {
        "launch_attrs": launch["launch_attrs"],
        "args": args,
    }
