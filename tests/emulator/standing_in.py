"""CPU devices that stand for GPUs of a kind, their launches carried out by the emulator.

`mega_moe` runs as it is: its checks, its choice of kernel, `shard_map`, tracing, plans. In place of
the custom call stands a callback. A call is run twice: the first time the callback keeps each
rank's operands and returns zeros; then the plans of all ranks run together on the machine; the
second time it returns what they wrote. So everything around the launch counts too. A plan without a
symmetric buffer needs no other rank: it runs within the callback.

`driver.py` is the other way: nothing in Python is replaced, launches reach a libcuda that carries
them out; but it does not know which array is how long.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from emulator import planned
from emulator.machine import EmulatorError
from jax_megamoe import compile as compiler
from jax_megamoe import symmetric_memory
from jax_megamoe.launch import deep_gemm, grouped, launcher, runnable
from jax_megamoe.mesh import vary, varying_axes
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.launch import LaunchPlan


@dataclasses.dataclass(frozen=True)
class Captured:
    """One rank's launch: its plan and arrays."""

    plan: LaunchPlan
    operands: dict[str, np.ndarray]
    results: planned.Results


class StandIn:
    """Carries out the launches of one call at a time.

    Attributes:
        captured: of the last call, by rank, what runs together.
        last: its run.
        alone: plans and runs of the last call that needed no other rank.
    """

    def __init__(self, device: DeviceSpec) -> None:
        self.device = device
        self.captured: dict[int, Captured] = {}
        self.last: planned.Run | None = None
        self.alone: list[tuple[LaunchPlan, planned.Run]] = []
        self._settings: Mapping[str, float] | None = None
        self._captures = False
        self._error: EmulatorError | None = None

    def spec_of(self, _: Any, reserved_sms: int = 0, __: str = "") -> DeviceSpec:
        """In place of the product's own: what every CPU device stands for."""
        left = self.device.num_sms - reserved_sms
        return dataclasses.replace(self.device, num_sms=left, reserved_sms=reserved_sms)

    def capture(self, call: Callable[[], Any]) -> list[Captured]:
        """What a call of `mega_moe` would launch, by rank."""
        self._captures = True
        try:
            self._first(call)
        finally:
            self._captures = False
        return self._ranks()

    def _ranks(self) -> list[Captured]:
        ranks = [self.captured[rank] for rank in sorted(self.captured)]
        assert len(ranks) == (ranks[0].plan.num_ranks if ranks else 0)
        return ranks

    def _first(self, call: Callable[[], Any]) -> Any:
        self.captured, self.last, self.alone, self._error = {}, None, [], None
        result = jax.block_until_ready(call())
        if self._error:
            raise self._error
        return result

    def run(
        self, call: Callable[[], Any], *, buffers: planned.Buffers | None = None,
        settings: Mapping[str, float] | None = None,
    ) -> Any:  # fmt: skip
        """The result of a call, its launches carried out.

        Args:
            call: calls `mega_moe` once, without arguments, in the same way each time.
            buffers: symmetric buffers of an earlier call.
            settings: of the machine.

        Raises:
            EmulatorError: a kernel did something wrong.
        """
        self._settings = settings
        result = self._first(call)
        if not self.captured:  # no token on any rank, or all is done
            return result
        ranks = self._ranks()
        self.last = planned.run(
            [each.plan for each in ranks],
            [each.operands for each in ranks],
            [each.results for each in ranks],
            buffers=buffers,
            settings=settings,
        )
        return jax.block_until_ready(call())

    def _alone(
        self, plan: LaunchPlan, operands: dict[str, np.ndarray], results: planned.Results
    ) -> planned.Run | None:
        """Runs a plan at once; None if it fails, as XLA would wrap the error."""
        try:
            run = planned.run([plan], [operands], [results], settings=self._settings)
        except EmulatorError as error:
            self._error = error
            return None
        self.alone.append((plan, run))
        return run

    def launch(
        self, plan: LaunchPlan, operands: Mapping[str, jax.Array],
        results: Mapping[str, jax.ShapeDtypeStruct], *, buffer_key: str = "",
        command_buffer: bool = False,
    ) -> dict[str, jax.Array]:  # fmt: skip
        """In place of `launcher.launch`."""
        axes: frozenset[str] = frozenset().union(*map(varying_axes, operands.values()))
        rank = jax.lax.axis_index(tuple(sorted(axes))) if axes else jnp.int32(0)
        named = {name: (like.shape, like.dtype) for name, like in results.items()}

        def callback(rank: Any, *arrays: Any) -> tuple[np.ndarray, ...]:
            index = int(rank)
            if self.last is None:
                copies = [np.array(array) for array in arrays]
                kept = dict(zip(operands, copies, strict=True))
                if plan.buffer.num_bytes or self._captures:
                    self.captured[index] = Captured(plan, kept, named)
                elif run := self._alone(plan, kept, named):
                    return tuple(run.results[0][name] for name in named)
                return tuple(np.zeros(shape, dtype) for shape, dtype in named.values())
            return tuple(self.last.results[index][name] for name in named)

        arrays = [vary(array, axes) for array in operands.values()]
        outputs = jax.pure_callback(callback, tuple(results.values()), rank, *arrays)
        return {name: vary(y, axes) for name, y in zip(named, outputs, strict=True)}


@contextlib.contextmanager
def standing_in(device: DeviceSpec) -> Iterator[StandIn]:
    """Every CPU device stands for `device` for a while; needs no kernel to be compiled."""
    stand_in = StandIn(device)
    jax.clear_caches()  # traces hold what was in force when they were made
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (launcher, "launch", stand_in.launch),
            (compiler, "build", lambda spec: b""),
            (symmetric_memory, "allocate", lambda *_, **__: None),
            (symmetric_memory, "keys", lambda start="": [start]),
            *((owner, "spec_of", stand_in.spec_of) for owner in (deep_gemm, grouped, runnable)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield stand_in
    jax.clear_caches()
