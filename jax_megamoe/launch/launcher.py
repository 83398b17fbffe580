"""From a LaunchPlan to a call of the FFI target that replays it.

The plan travels as attributes of the custom call, one attribute a value, named by its path:
``steps.0.arguments.3.dims``. A list ``steps`` of n entries is the attribute ``steps`` = n and the
attributes below ``steps.0`` to ``steps.<n-1>``. They hold nothing of the process (no address, rank
or path), so that an executable may be cached on disk and run by another process; what is the
process's own, C++ looks up: the symmetric buffer by its key, machine code by the kernel's
specification. `ffi/launch_plan.cc` decodes them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_megamoe import compile as compiler
from jax_megamoe._checks import message
from jax_megamoe.mesh import vary, varying_axes
from jax_megamoe.plan.kernel import KernelSpec
from jax_megamoe.plan.launch import (
    Bool,
    Fill,
    Float32,
    KernelArgument,
    KernelLaunch,
    LaunchPlan,
    Pointer,
    Struct,
    SymmetricBuffer,
    TensorMap,
    Uint32,
)
from jax_megamoe.plan.operand import SYMMETRIC_BUFFER, Operand
from jax_megamoe.plan.tensor_map import TensorMapSpec
from jax_megamoe.routing.replicas import ReplicaMap
from jax_megamoe.runtime import extension

Attribute = int | float | bool | str | np.ndarray


def launch(
    plan: LaunchPlan,
    operands: Mapping[str, jax.Array],
    results: Mapping[str, jax.ShapeDtypeStruct],
    *,
    buffer_key: str = "",
    command_buffer: bool = False,
) -> dict[str, jax.Array]:
    """Runs `plan` as one custom call on the device (each device) that computes the operands.

    Args:
        plan: what to launch.
        operands: arrays that the plan names, and others that only order this call after theirs.
        results: shapes and dtypes of the arrays that the plan writes. One that is also an operand
            is updated in place, where XLA can spare the operand.
        buffer_key: name under which every rank registered its symmetric buffer; empty if the plan
            uses none.
        command_buffer: XLA may capture the launches into a CUDA graph, which holds the symmetric
            buffer's address from then on.

    Returns:
        The results by name. Inside `shard_map` they vary over every axis that an operand does.

    Raises:
        ImportError: the compiled module is missing.
        ValueError: the plan names an array that is neither operand, result nor constant, or uses
            the symmetric buffer and `buffer_key` is empty.
    """
    extension.module()
    arrays: dict[str, Any] = dict(operands)
    arrays.update({name: np.frombuffer(data, np.uint8) for name, data in plan.constants})
    names, result_names = list(arrays), list(results)
    attributes = encode(plan, names, result_names, buffer_key=buffer_key)
    call = jax.ffi.ffi_call(
        extension.GRAPH_TARGET if command_buffer else extension.TARGET,
        tuple(results.values()),
        input_output_aliases={
            names.index(name): index for index, name in enumerate(result_names) if name in arrays
        },
    )
    varying = [varying_axes(array) for array in operands.values()]
    axes: frozenset[str] = frozenset().union(*varying)
    outputs = call(*(vary(array, axes) for array in arrays.values()), **attributes)
    return {name: vary(y, axes) for name, y in zip(result_names, outputs, strict=True)}


def build(plan: LaunchPlan) -> None:
    """Has the kernels of a plan compiled, or read from the cache."""
    for step in plan.launches:
        compiler.build(step.kernel)


def token_operands(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array,
    padding_mask: jax.Array | None = None,
    eplb: ReplicaMap | None = None,
) -> dict[str, jax.Array]:
    """What a layer's call has beside its parameters, by operand of a plan."""
    operands = {"x": x, "topk_ids": topk_ids, "topk_weights": topk_weights}
    if padding_mask is not None:
        operands["padding_mask"] = padding_mask
    if eplb is not None:
        operands["logical_to_physical"] = eplb.logical_to_physical
        operands["num_replicas"] = eplb.num_replicas
    return operands


def launch_layer(
    plan: LaunchPlan,
    operands: Mapping[str, jax.Array],
    *,
    counted_experts: int = 0,
    buffer_key: str = "",
) -> dict[str, jax.Array]:
    """`launch` of a layer's call, which XLA may capture; its kernels are compiled first.

    Args:
        plan: what to launch.
        operands: `token_operands` and parameters.
        counted_experts: experts whose tokens are counted; 0: none are.
        buffer_key: as of `launch`.

    Returns:
        ``y``, like ``x``; int32 [E] ``stats`` where experts are counted; the plan's scratch.
    """
    build(plan)
    x = operands["x"]
    results = {"y": jax.ShapeDtypeStruct(x.shape, x.dtype)}
    if counted_experts:
        operands = {**operands, "stats": jnp.zeros(counted_experts, jnp.int32)}
        results["stats"] = jax.ShapeDtypeStruct((counted_experts,), jnp.int32)
    results |= {name: jax.ShapeDtypeStruct(*like) for name, *like in plan.scratch}
    return launch(plan, operands, results, buffer_key=buffer_key, command_buffer=True)


def program(
    plan: LaunchPlan, operands: Sequence[str], results: Sequence[str], *, buffer_key: str = ""
) -> Any:
    """The plan as a `jax_megamoe.runtime._ffi.Program`, to launch outside XLA on one's own streams.

    Args:
        plan: what to launch.
        operands: names of the arrays that `Program.launch` is given, constants among them.
        results: names of the arrays that the plan writes.
        buffer_key: as of `launch`. Ranks that share a device each have a key.

    Raises:
        ImportError, ValueError: as `launch` does.
        RuntimeError: a kernel could not be had.
    """
    attributes = encode(plan, operands, results, buffer_key=buffer_key)
    plain = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in attributes.items()}
    return extension.module().Program(plain)


def encode(
    plan: LaunchPlan, operands: Sequence[str], results: Sequence[str], *, buffer_key: str
) -> dict[str, Attribute]:
    """The attributes of a call whose operands (the plan's constants among them) and results have
    these names. Raises ValueError as `launch` does."""
    places: dict[str, tuple[str, int]] = {
        **{name: ("operand", index) for index, name in enumerate(operands)},
        **{name: ("result", index) for index, name in enumerate(results)},
    }
    if buffer_key:
        places[SYMMETRIC_BUFFER] = (SYMMETRIC_BUFFER, 0)
    kernels: dict[KernelSpec, int] = {}
    attributes: dict[str, Attribute] = {
        "plan_version": plan.plan_version,
        "num_ranks": plan.num_ranks,
        "num_operands": len(operands),
        "num_results": len(results),
        "buffer_key": buffer_key,
        "buffer_bytes": plan.buffer.num_bytes if buffer_key else 0,
        "steps": len(plan.steps),
    }
    for index, step in enumerate(plan.steps):
        prefix = f"steps.{index}"
        if isinstance(step, Fill):
            fields = _address(step.operand, places)
            attributes.update(
                _prefixed(prefix, {"kind": "fill", "num_bytes": step.num_bytes, **fields})
            )
        else:
            kernel = kernels.setdefault(step.kernel, len(kernels))
            attributes.update(_prefixed(prefix, _kernel_launch(step, kernel, places)))
    attributes["kernels"] = len(kernels)
    for spec, index in kernels.items():
        attributes.update(_prefixed(f"kernels.{index}", _kernel(spec)))
    return attributes


def _prefixed(prefix: str, fields: Mapping[str, Attribute]) -> dict[str, Attribute]:
    return {f"{prefix}.{name}": value for name, value in fields.items()}


def _integers(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int64)


def _kernel(spec: KernelSpec) -> dict[str, Attribute]:
    return {"symbol": spec.symbol, "spec": extension.encode_kernel(spec)}


def _kernel_launch(
    step: KernelLaunch, kernel: int, places: Mapping[str, tuple[str, int]]
) -> dict[str, Attribute]:
    config = step.config
    fields: dict[str, Attribute] = {
        "kind": "launch",
        "kernel": kernel,
        "grid": _integers(config.grid),
        "block": _integers(config.block),
        "cluster": _integers(config.cluster),
        "smem": config.smem,
        "programmatic_serialization": config.programmatic_serialization,
    }
    return fields | _named("arguments", step.arguments, places)


def _named(
    name: str, arguments: Sequence[KernelArgument], places: Mapping[str, tuple[str, int]]
) -> dict[str, Attribute]:
    """A list of arguments, or of a struct's fields."""
    found: dict[str, Attribute] = {name: len(arguments)}
    for index, argument in enumerate(arguments):
        value = {"name": argument.name, **_argument(argument, places)}
        found.update(_prefixed(f"{name}.{index}", value))
    return found


_NUMBERS = {Bool: ("bool", bool), Uint32: ("uint32", int), Float32: ("float32", float)}


def _argument(
    argument: KernelArgument, places: Mapping[str, tuple[str, int]]
) -> dict[str, Attribute]:
    match argument:
        case Pointer(operand=operand):
            address = _address(operand, places) if operand else {"base": "null"}
            return {"kind": "pointer", **address}
        case Bool() | Uint32() | Float32():
            kind, type_ = _NUMBERS[type(argument)]
            return {"kind": kind, "value": type_(argument.value)}
        case SymmetricBuffer():
            if SYMMETRIC_BUFFER not in places:
                raise _unknown(SYMMETRIC_BUFFER, places)
            return {"kind": "symmetric_buffer"}
        case TensorMap(spec=spec):
            return {"kind": "tensor_map", **_tensor_map(spec, places)}
        case Struct(fields=fields):
            return {"kind": "struct", **_named("fields", fields, places)}


def _tensor_map(spec: TensorMapSpec, places: Mapping[str, tuple[str, int]]) -> dict[str, Attribute]:
    return {
        **_address(spec.base, places),
        "dtype": spec.dtype,
        "rank": len(spec.dims),
        "dims": _integers(spec.dims),
        "strides": _integers(spec.strides),
        "box": _integers(spec.box),
        "interleave": spec.interleave,
        "swizzle": spec.swizzle,
        "l2_promotion": spec.l2_promotion,
        "oob_fill": spec.oob_fill,
    }


def _address(operand: Operand, places: Mapping[str, tuple[str, int]]) -> dict[str, Attribute]:
    if operand.name not in places:
        raise _unknown(operand.name, places)
    base, index = places[operand.name]
    return {"base": base, "index": index, "offset": operand.offset}


def _unknown(name: str, places: Mapping[str, tuple[str, int]]) -> ValueError:
    hint = "pass buffer_key" if name == SYMMETRIC_BUFFER else "pass it as an operand or a result"
    return ValueError(message("plan", f"arrays among {sorted(places)}", repr(name), hint))
