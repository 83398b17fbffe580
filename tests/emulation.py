"""CPU devices that stand for GPUs of a given kind: plans are made for it, launches are recorded.

Nothing between `mega_moe` and the driver is replaced but what needs a GPU machine: the device's
kind, the kernel source and compiler, and the memory of symmetric buffers.
"""

import contextlib
import dataclasses
import hashlib
import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cases
import jax
import numpy as np
import pytest
from recording import SYM_BUFFER_BYTES, RecordingDriver, fake_cubin, provider

import jax_megamoe as mm
from jax_megamoe import compile, symmetric_memory
from jax_megamoe.launch import deep_gemm, runnable
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.kernel import KernelSpec
from jax_megamoe.runtime import extension

B200 = DeviceSpec(100, 148)
H200 = DeviceSpec(90, 132)

MEGA, STAGING = "sm100_fp8_fp4_mega_moe_impl", "stage_tokens"
"""Kernels of an MXFP8 call, the second one first."""

MAX_RANKS = 72
_BASE, _STRIDE = 1 << 44, 1 << 37

_specs: dict[str, KernelSpec] = {}  # by the name that `named_cubin` gave
_registered: dict[str, list[list[int]]] = {}  # device ids of each group, by buffer key


def kernel_name(spec: str) -> str:
    """What `named_cubin` calls the kernel of an encoded specification."""
    return hashlib.sha256(spec.encode()).hexdigest()


def named_cubin(spec: str) -> bytes:
    """A fake cubin whose kernel is named by a hash of the whole specification."""
    name = kernel_name(spec)
    _specs[name] = extension.decode_kernel(spec)
    return b" ".join([name.encode(), *fake_cubin(spec).split()[1:]])


def kernel_of(launch: dict[str, Any]) -> KernelSpec:
    """What a recorded launch's kernel was compiled from."""
    name = launch["kernel"]
    assert name in _specs, f"{name} was loaded before, by a test without `emulation`"
    return _specs[name]


def u64(text: str) -> int:
    """A recorded pointer parameter."""
    return struct.unpack("<Q", bytes.fromhex(text))[0]


def base_of(device: int) -> int:
    """Address of the made-up symmetric buffer on a device: not in the order of the devices."""
    return _BASE + (device * 5 + 3) % 8 * _STRIDE


class Memory:
    """Made-up symmetric buffers in place of `symmetric_memory`'s own.

    The compiled module remembers them for the rest of the process: executables may hold them. One
    key always stands for one set of groups.

    Attributes:
        allocated: the device ids of each group, by key, of one test.
        num_bytes: of the buffer that was last asked for.
    """

    def __init__(self) -> None:
        self.allocated: dict[str, list[list[int]]] = {}
        self.num_bytes = 0

    def allocate(
        self,
        key: str,
        num_bytes: int,
        groups: Sequence[Sequence[jax.Device]],
        *,
        prepare: Callable[[], object] | None = None,
        **_: Any,
    ) -> None:
        """Names a buffer on each device; again with the same key, nothing."""
        if key not in self.allocated:
            if prepare is not None:
                prepare()
        self.num_bytes = num_bytes
        ids = [[device.id for device in group] for group in groups]
        assert self.allocated.setdefault(key, ids) == ids, f"{key} on other devices"
        if _registered.setdefault(key, ids) is not ids:
            assert _registered[key] == ids, f"{key} on other devices than in another test"
            return
        assert num_bytes < _STRIDE
        for group in ids:
            bases = [base_of(device) for device in group]
            for rank, (device, base) in enumerate(zip(group, bases, strict=True)):
                extension.module().register_symmetric_buffer(
                    key, device, base, bases, rank, num_bytes
                )

    def keys(self, start: str = "") -> list[str]:
        """Keys beginning with `start` that `allocate` was called for in this test."""
        return [key for key in self.allocated if key.startswith(start)]


def config(form: str = "mxfp8", **changes: Any) -> mm.MoEConfig:
    """A small config that SM100's kernels take."""
    return cases.config(form, **(dict(intermediate_size=256) | changes))


def call(cfg: mm.MoEConfig, num_tokens: int = 32, **kwargs: Any) -> Any:
    """`mega_moe` on random tokens, by the kernels unless said otherwise."""
    weights = kwargs.pop("weights", None) or cases.weights(cfg)
    options = dict(implementation="deep_gemm") | kwargs
    y = mm.mega_moe(*cases.tokens(cfg, num_tokens), weights, config=cfg, **options)
    return jax.block_until_ready(y)


def fallback(cfg: mm.MoEConfig, caplog: pytest.LogCaptureFixture, **kwargs: Any) -> str:
    """The one log line of two calls without a named implementation, which give xla's result."""
    with caplog.at_level(logging.INFO, logger="jax_megamoe"):
        got = [call(cfg, implementation=None, **kwargs) for _ in range(2)]
    want = call(cfg, implementation="xla", **kwargs)
    for each in got:
        np.testing.assert_array_equal(np.asarray(each), np.asarray(want))
    lines = [record.getMessage() for record in caplog.records if record.name == "jax_megamoe"]
    assert len(lines) == 1, lines
    return lines[0]


def sym_buffer(group: Sequence[int], rank: int) -> bytes:
    """The SymBuffer struct that a rank of a group of device ids is launched with."""
    own = base_of(group[rank])
    offsets = [base_of(device) - own for device in group]
    offsets += [0] * (MAX_RANKS - len(group))
    data = struct.pack("<Q72qI4x", own, *offsets, rank)
    assert len(data) == SYM_BUFFER_BYTES
    return data


class Emulation:
    """The recording driver, the made-up memory, and which device every CPU device stands for.

    Attributes:
        built: kernels asked of the compiler, in order; each once, as it remembers them.
    """

    def __init__(self, driver: RecordingDriver, memory: Memory) -> None:
        self.driver = driver
        self.memory = memory
        self.device = B200
        self.built: list[KernelSpec] = []

    def device_spec(self, _: jax.Device, reserved_sms: int = 0) -> DeviceSpec:
        """In place of `devices.device_spec`."""
        num_sms = self.device.num_sms - reserved_sms
        return dataclasses.replace(self.device, num_sms=num_sms, reserved_sms=reserved_sms)

    def build(self, spec: KernelSpec) -> bytes:
        """In place of `compile.build`."""
        if spec not in self.built:
            self.built.append(spec)
        return b""

    def launches(self, entry: str) -> dict[int, dict[str, Any]]:
        """The one recorded launch of a kernel on each device, by device."""
        found = [each for each in self.driver.launches() if kernel_of(each).symbol == entry]
        by_device = {each["device"]: each for each in found}
        assert len(by_device) == len(found), f"several launches of {entry} on a device"
        return by_device


@contextlib.contextmanager
def emulate(driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulation]:
    """Every CPU device stands for a B200, until `device` is set to another; what the fixture
    `emulation` gives."""
    memory = Memory()
    emulated = Emulation(driver, memory)
    for module in (deep_gemm, runnable):
        monkeypatch.setattr(module, "spec_of", emulated.device_spec)
    monkeypatch.setattr(compile, "find_source", lambda name: None)
    monkeypatch.setattr(compile, "has_source", lambda name: True)
    monkeypatch.setattr(compile, "build", emulated.build)
    monkeypatch.setattr(symmetric_memory, "allocate", memory.allocate)
    monkeypatch.setattr(symmetric_memory, "keys", memory.keys)
    with provider(named_cubin):
        yield emulated
