"""The CUDA driver through cuda-bindings, as far as the scripts beside this file need it.

Nothing here imports jax_megamoe: what it launches is the floor that jax_megamoe is held against.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda.bindings import driver as cuda


def call(function: str, *arguments: Any) -> Any:
    """The result of a driver function, a tuple if it has several; raises RuntimeError."""
    status, *results = getattr(cuda, function)(*arguments)
    if status != cuda.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{function}: {status.name}")
    return results[0] if len(results) == 1 else tuple(results)


def use_device(ordinal: int = 0) -> None:
    """Makes a device's primary context, which JAX uses too, this thread's."""
    call("cuInit", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", ordinal)))


def device_name(ordinal: int = 0) -> str:
    """Name of a device, for example ``"NVIDIA H200"``."""
    call("cuInit", 0)
    raw = call("cuDeviceGetName", 128, call("cuDeviceGet", ordinal))
    return raw.split(b"\0")[0].decode()


def driver_release() -> str:
    """The installed driver, for example ``"580.159.03"``."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]


class Buffer:
    """Device memory outside JAX's pool."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = max(num_bytes, 1)
        self.address = int(call("cuMemAlloc", self.num_bytes))
        self.fill(0)

    def fill(self, byte: int) -> None:
        """Sets every byte, after all that the device was given to do."""
        call("cuCtxSynchronize")
        call("cuMemsetD8", self.address, byte, self.num_bytes)
        call("cuCtxSynchronize")

    def read(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """The first bytes as an array."""
        host = np.empty(shape, dtype)
        if host.nbytes:
            call("cuMemcpyDtoH", host.ctypes.data, self.address, host.nbytes)
        return host

    def free(self) -> None:
        """Gives the memory back."""
        call("cuMemFree", self.address)


class Stream:
    """A stream that waits for no other."""

    def __init__(self) -> None:
        self.handle = call("cuStreamCreate", cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)

    def wait(self, seconds: float = 30) -> None:
        """Waits for the stream. One that is not done in time ends the process with status 3: a
        kernel that waits for a peer cannot be stopped, and neither can a clean exit pass it."""
        end = time.monotonic() + seconds
        while (status := cuda.cuStreamQuery(self.handle)[0]) == cuda.CUresult.CUDA_ERROR_NOT_READY:
            if time.monotonic() > end:
                print(f"a stream was not done after {seconds} s", file=sys.stderr, flush=True)
                os._exit(3)
        if status != cuda.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"cuStreamQuery: {status.name}")

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """What `enqueue` puts on this stream as a CUDA graph; returns what launches the graph."""
        mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        call("cuStreamBeginCapture", self.handle, mode)
        enqueue()
        graph = call("cuGraphInstantiate", call("cuStreamEndCapture", self.handle), 0)
        return lambda: call("cuGraphLaunch", graph, self.handle)

    def milliseconds(
        self, enqueue: Callable[[], None], *, repeats: int = 9, warmup: int = 2
    ) -> float:
        """Median device time of `enqueue`, by events on this stream around each repeat."""
        for _ in range(warmup):
            enqueue()
        flags = cuda.CUevent_flags.CU_EVENT_DEFAULT
        events = [[call("cuEventCreate", flags) for _ in range(2)] for _ in range(repeats)]
        for start, end in events:
            call("cuEventRecord", start, self.handle)
            enqueue()
            call("cuEventRecord", end, self.handle)
        self.wait(120)
        times = [call("cuEventElapsedTime", start, end) for start, end in events]
        for pair in events:
            for event in pair:
                call("cuEventDestroy", event)
        return statistics.median(times)


def copy_rate(num_bytes: int = 1 << 30) -> float:
    """Bytes a second of a device-to-device copy, read plus written."""
    source, target, stream = Buffer(num_bytes), Buffer(num_bytes), Stream()
    source.fill(0x5A)
    copy = ("cuMemcpyDtoDAsync", target.address, source.address, num_bytes, stream.handle)
    rate = 2 * num_bytes / stream.milliseconds(lambda: call(*copy)) * 1e3
    source.free()
    target.free()
    return rate
