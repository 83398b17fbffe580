"""Faults put into a launch: what the emulator must notice.

A mutation changes one thing of a captured call: an argument, a tensor map, a launch's shape, an
operand's bytes. It is noticed if the emulator says an error, or the output is far from the right
one. `MUTATIONS` are of an MXFP8 call of sgl's kernel, `SORTED` of a call of the grouped products of
BF16 weights whose rows two blocks sort. `OVERLAPS` are of such calls by form: kernels that start
early and do not wait, whose output is right here, and what the emulator says of each.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from emulator import planned
from emulator.machine import EmulatorError
from emulator.standing_in import Captured
from jax_megamoe.plan.grouped import humming_unit
from jax_megamoe.plan.launch import (
    KernelArgument,
    KernelLaunch,
    LaunchPlan,
    Pointer,
    TensorMap,
    Uint32,
)
from jax_megamoe.plan.operand import Operand

Mutation = Callable[[Captured], Captured]
NOTICED = 0.2
"""A relative error beyond which a wrong output is noticed by any comparison."""

UINT8, U4_PADDED = 0, 14  # CUtensorMapDataType
SWIZZLE_32, SWIZZLE_64 = 1, 2  # CUtensorMapSwizzle
ONE = (1, 1, 1)


def _arguments(step: int, **changes: Callable[[Any], Any]) -> Mutation:
    """Changes arguments of a step by name; `_config` its launch shape, `_all` the whole list."""

    def mutate(captured: Captured) -> Captured:
        steps = list(captured.plan.steps)
        launch = steps[step]
        assert isinstance(launch, KernelLaunch)
        named = {argument.name for argument in launch.arguments}
        assert set(changes) - {"_config", "_all"} <= named, named
        arguments = tuple(changes.get(a.name, lambda a: a)(a) for a in launch.arguments)
        arguments = tuple(changes.get("_all", lambda a: a)(arguments))
        config = changes.get("_config", lambda c: c)(launch.config)
        steps[step] = dataclasses.replace(launch, arguments=arguments, config=config)
        return dataclasses.replace(captured, plan=_with_steps(captured.plan, steps))

    return mutate


def _with_steps(plan: LaunchPlan, steps: list[Any]) -> LaunchPlan:
    return dataclasses.replace(plan, steps=tuple(steps))


def _mega(**changes: Callable[[Any], Any]) -> Mutation:
    return _arguments(-1, **changes)


def _map(**fields: Any) -> Callable[[TensorMap], TensorMap]:
    """Fields of a tensor map; a function is applied to the field."""

    def change(argument: TensorMap) -> TensorMap:
        values = {
            name: value(getattr(argument.spec, name)) if callable(value) else value
            for name, value in fields.items()
        }
        return dataclasses.replace(argument, spec=dataclasses.replace(argument.spec, **values))

    return change


def _swap(first: str, second: str) -> Mutation:
    """Two arguments take each other's place."""

    def exchange(arguments: tuple[KernelArgument, ...]) -> list[KernelArgument]:
        known = {argument.name: argument for argument in arguments}
        other = {first: second, second: first}
        return [
            dataclasses.replace(known[other.get(a.name, a.name)], name=a.name) for a in arguments
        ]

    return _mega(_all=exchange)


def _shift(num_bytes: int) -> Callable[[Operand], Operand]:
    return lambda operand: dataclasses.replace(operand, offset=operand.offset + num_bytes)


def _moved(num_bytes: int) -> Callable[[Pointer], Pointer]:
    def move(argument: Pointer) -> Pointer:
        assert argument.operand is not None
        return dataclasses.replace(argument, operand=_shift(num_bytes)(argument.operand))

    return move


def _fewer(argument: Uint32) -> Uint32:
    return dataclasses.replace(argument, value=argument.value - 1)


def _staged(name: str, num_bytes: int) -> Mutation:
    """The staging kernel writes a region elsewhere."""

    return _arguments(0, **{name: _moved(num_bytes)})


def _config(**fields: Any) -> Mutation:
    return _mega(_config=lambda config: dataclasses.replace(config, **fields))


def _less_shared_memory(captured: Captured) -> Captured:
    launch = captured.plan.steps[-1]
    assert isinstance(launch, KernelLaunch)
    return _config(smem=launch.config.smem - 16)(captured)


def _operand(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Mutation:
    def mutate(captured: Captured) -> Captured:
        changed = captured.operands | {name: change(captured.operands[name])}
        return dataclasses.replace(captured, operands=changed)

    return mutate


def _constants(**values: bytes) -> Mutation:
    def mutate(captured: Captured) -> Captured:
        assert set(values) <= {name for name, _ in captured.plan.constants}
        plan = dataclasses.replace(captured.plan, constants=tuple(values.items()))
        return dataclasses.replace(captured, plan=plan)

    return mutate


def _unpermuted(scales: np.ndarray) -> np.ndarray:
    shape = scales.shape
    return scales.reshape(*shape[:2], -1, 32, 4).swapaxes(-1, -2).reshape(shape)


def _gate_and_up_swapped(weight: np.ndarray) -> np.ndarray:
    shape = weight.shape
    return weight.reshape(shape[0], -1, 2, 8, shape[2])[:, :, ::-1].reshape(shape)


def _sign_of_one_weight(weight: np.ndarray) -> np.ndarray:
    raw = weight.view(np.uint8).copy()
    raw.reshape(-1)[5] ^= 0x80
    return raw.view(weight.dtype)


ONE_WEIGHT = "one weight byte"
"""Too small for a relative error: MXFP4, whose outputs are equal bit for bit, shows it."""

MUTATIONS: dict[str, Mutation] = {
    "l1_weights in swizzle 64": _mega(l1_weights=_map(swizzle=SWIZZLE_64)),
    "l1_weights without swizzle": _mega(l1_weights=_map(swizzle=0)),
    "l1_output in swizzle 32": _mega(l1_output=_map(swizzle=SWIZZLE_32, box=(32, 8))),
    "l1_output without swizzle": _mega(l1_output=_map(swizzle=0)),
    "l2_acts without swizzle": _mega(l2_acts=_map(swizzle=0)),
    "l1_acts box a row short": _mega(l1_acts=_map(box=lambda b: (b[0], b[1] - 1))),
    "l1_acts_sf box of 64": _mega(l1_acts_sf=_map(box=(64, 1))),
    "l1_acts_sf stride": _mega(l1_acts_sf=_map(strides=lambda s: (s[0] + 16,))),
    "l1_acts_sf 16 bytes on": _mega(l1_acts_sf=_map(base=_shift(16))),
    "scales of the weights exchanged": _swap("l1_weights_sf", "l2_weights_sf"),
    "scales of the inputs exchanged": _swap("l1_acts_sf", "l2_acts_sf"),
    "l1_weights from the second half on": _mega(l1_weights=_map(base=_shift(131072))),
    "l2_weights of half the rows": _mega(l2_weights=_map(dims=lambda d: (d[0], d[1] // 2, *d[2:]))),
    "l1_weights of rank 2": _mega(
        l1_weights=_map(dims=(512, 2048), strides=(512,), box=(128, 128))
    ),
    "l1_weights of padded 4-bit elements": _mega(l1_weights=_map(dtype=U4_PADDED)),
    "l2_acts of 16 rows": _mega(l2_acts=_map(dims=(256, 16))),
    "a token less": _mega(num_tokens=_fewer),
    "a token more": _mega(num_tokens=lambda a: Uint32(a.name, a.value + 1)),
    "16 bytes less shared memory": _less_shared_memory,
    "block of 384": _config(block=(384, 1, 1)),
    "half of the grid": _config(grid=(2, 1, 1)),
    "no cluster": _config(cluster=(1, 1, 1)),
    "y and stats exchanged": _swap("y", "cumulative_local_expert_recv_stats"),
    "all SMs in one domain": _constants(sm_locality_domains=b"\1\1\1\1"),
    "domains of two SMs": _constants(sm_locality_domains=b"\0\0"),
    "staged tokens 16 bytes on": _staged("buf_x", 16),
    "staged scales 4 bytes on": _staged("buf_x_sf", 4),
    "staged ids 64 bytes on": _staged("buf_topk_idx", 64),
    "w13 scales unpermuted": _operand("w13_weight_scale", _unpermuted),
    "w2 scales unpermuted": _operand("w2_weight_scale", _unpermuted),
    "gate and up exchanged": _operand("w13_weight", _gate_and_up_swapped),
    "w2 rows rotated by 8": _operand("w2_weight", lambda w: np.roll(w, 8, 1)),
    "scale words in the other byte order": _operand("w2_weight_scale", lambda s: s.byteswap()),
    ONE_WEIGHT: _operand("w13_weight", _sign_of_one_weight),
}


def _placed(**changes: Callable[[Any], Any]) -> Mutation:
    """Of the kernel that sorts rows by the counts of all blocks."""
    mutate = _arguments(PLACES, **changes)

    def checked(captured: Captured) -> Captured:
        assert captured.plan.launches[PLACES].kernel.symbol == "place_rows"
        return mutate(captured)

    return checked


def _without(step: int) -> Mutation:
    """A step is not launched."""

    def mutate(captured: Captured) -> Captured:
        steps = [each for n, each in enumerate(captured.plan.steps) if n != step]
        return dataclasses.replace(captured, plan=_with_steps(captured.plan, steps))

    return mutate


PLACES = 1
"""The step of `place_rows`."""

SORTED: dict[str, Mutation] = {
    "rows counted and not placed": _without(PLACES),
    "counts of one block": _placed(num_sorters=_fewer),
    "rows of the first block placed": _placed(_config=lambda c: dataclasses.replace(c, grid=ONE)),
    "a row less placed": _placed(num_rows=_fewer),
    "counts of the next expert": _placed(row_counts=_moved(4)),
    "experts of the next row": _placed(row_experts=_moved(4)),
    "counts of one block written": _arguments(0, num_sorters=_fewer),
}


def _by_symbol(
    symbol: str, change: Callable[[KernelLaunch], KernelLaunch], *, last: bool = False
) -> Mutation:
    """Changes the first launch of a kernel, or the last."""

    def mutate(captured: Captured) -> Captured:
        steps: list[Any] = list(captured.plan.steps)
        of_symbol = [i for i, step in enumerate(steps) if step.kernel.symbol == symbol]
        at = of_symbol[-1 if last else 0]
        steps[at] = change(steps[at])
        return dataclasses.replace(captured, plan=_with_steps(captured.plan, steps))

    return mutate


def _without_wait(launch: KernelLaunch) -> KernelLaunch:
    """Compiled with kEarly false, launched to start early all the same."""
    assert launch.config.programmatic_serialization
    *others, early = launch.kernel.template_args
    assert early == "true"
    kernel = dataclasses.replace(launch.kernel, template_args=(*others, "false"))
    return dataclasses.replace(launch, kernel=kernel)


def _product_without_wait(launch: KernelLaunch) -> KernelLaunch:
    """Humming's, likewise."""
    assert launch.config.programmatic_serialization
    product, tiles = humming_unit.decoded(launch.kernel.unit)
    unit = humming_unit.encoded(product, dataclasses.replace(tiles, pdl=False))
    return dataclasses.replace(launch, kernel=dataclasses.replace(launch.kernel, unit=unit))


def _starts_early(launch: KernelLaunch) -> KernelLaunch:
    config = dataclasses.replace(launch.config, programmatic_serialization=True)
    return dataclasses.replace(launch, config=config)


_BEFORE = "before griddepcontrol.wait: {}, which wrote it, may still run"

OVERLAPS: dict[str, tuple[str, Mutation, str]] = {
    f"{symbol} does not wait": (
        "bf16",
        _by_symbol(symbol, _without_wait),
        f"{symbol} reads rank 0 {array} " + _BEFORE.format(writer),
    )
    for symbol, array, writer in (
        ("place_rows", "row_experts", "group_tokens"),
        ("gather_rows", "row_experts", "group_tokens"),
        ("activate_rows", "h", "sm90_bf16_gemm_impl"),
        ("combine_rows", "outputs", "sm90_bf16_gemm_impl"),
    )
} | {
    "the first product starts early and reads tables": (
        "mxfp4",
        _by_symbol("humming", _starts_early),
        "humming reads rank 0 num_slots " + _BEFORE.format("place_rows"),
    ),
    "the second product does not wait": (
        "mxfp4",
        _by_symbol("humming", _product_without_wait, last=True),
        "humming reads rank 0 hidden_rows " + _BEFORE.format("activate_rows"),
    ),
    "the call starts early": (
        "mxfp4",
        _by_symbol("group_tokens", _starts_early),
        "group_tokens is the first launch and may not start early",
    ),
}
"""By name: form, fault, and what is said of it, offsets left out."""


def run(captured: Captured) -> np.ndarray:
    """y of one rank's captured call, float64. Raises EmulatorError."""
    settings: Mapping[str, float] = dict(max_instructions=2e7, stall_rounds=1500)
    done = planned.run([captured.plan], [captured.operands], [captured.results], settings=settings)
    return done.results[0]["y"].astype(np.float64)


def noticed(captured: Captured, mutation: Mutation, want: np.ndarray) -> str:
    """What shows a fault: the emulator's error, or "relative error e"; "" if nothing does."""
    try:
        got = run(mutation(captured))
    except EmulatorError as error:
        return str(error).splitlines()[0]
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    return "" if error <= NOTICED else f"relative error {error:.2g}"
