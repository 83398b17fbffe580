"""Replays recorded SM90 launches of DeepGEMM through the CUDA driver alone, and times them.

    PYTHONPATH=.:benchmarks/gpu python benchmarks/gpu/bare_launch.py [--quick]

No planner, launcher, compiler or extension of jax_megamoe has a part in it: template arguments,
grids, tensor maps and offsets are those that DeepGEMM's own host code passed (recorded in
sm90_launches.jsonl), nvcc compiles the kernels with its flags, and cuda-bindings launches them.
jax_megamoe only draws the random parameters. The result is the floor for the jitted layer.
"""

import argparse
import ctypes
import faulthandler
import hashlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import driver
import jax
import numpy as np
import workload
from cuda.bindings import driver as cuda

from jax_megamoe.compile import find_source
from jax_megamoe.config import MoEConfig
from jax_megamoe.weights.params import ExpertWeights

RECORDS = Path(__file__).with_name("sm90_launches.jsonl")
FLASHINFER_RECORDS = Path(__file__).with_name("flashinfer_launches.jsonl")
"""What FlashInfer's own host code plans for the same calls with MXFP4 weights, on buffers that its
own layout.cuh lays out; the staging before it is sgl's, into those buffers."""
HEADERS = {"<package>/deep_gemm/include": "sgl", "<flashinfer>": "flashinfer"}
"""Kernel sources by what recorded flags call their headers."""
SYM_BUFFER_WORDS = 74
PROGRAMMATIC_SERIALIZATION = 6
REPEATS_IN_GRAPH = 64

Json = dict[str, Any]


@dataclass(frozen=True)
class Recorded:
    """One recorded call: its staging launch, its MegaMoE launch, bytes of its symmetric buffer."""

    name: str
    staging: Json
    mega: Json
    buffer_bytes: int


def read_records(path: Path = RECORDS) -> dict[str, Recorded]:
    """The recorded calls by name, ``"<shape>-<tokens>"``."""
    found = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        found[record["inputs"]["id"]] = record["outputs"]
    return {
        name: Recorded(
            name,
            found[f"{name}-pre"]["launches"][0],
            outputs["launches"][0],
            outputs["sym_buffer_bytes"],
        )
        for name, outputs in found.items()
        if not name.endswith("-pre")
    }


class Compiler:
    """nvcc with the recorded flags; what it made is kept in a folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir(), "bare_launch")
        self._folder.mkdir(parents=True, exist_ok=True)

    def compile_all(self, launches: Iterable[Json]) -> None:
        """Compiles every kernel, several at a time."""
        distinct = {self._source(launch): launch for launch in launches}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self.cubin, distinct.values()))

    def cubin(self, launch: Json) -> bytes:
        """The kernel of a launch."""
        source = self._source(launch)
        stem = self._folder / hashlib.sha256(source.encode()).hexdigest()[:24]
        cubin = stem.with_suffix(".cubin")
        if not cubin.exists():
            stem.with_suffix(".cu").write_text(source)
            flags = [
                str(find_source(HEADERS[flag]).include_dir) if flag in HEADERS else flag
                for flag in launch["nvcc_flags"]
            ]
            command = ["nvcc", stem.with_suffix(".cu"), "--output-file", cubin, *flags]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"nvcc: {done.stderr[-2000:]}")
        return cubin.read_bytes()

    @staticmethod
    def _source(launch: Json) -> str:
        arguments = ", ".join(launch["template_args"])
        return (
            f"{launch.get('prelude', '')}#include <{launch['include']}>\n"
            f"using namespace {launch.get('namespace', 'deep_gemm')};\n"
            f"static auto* const kernel = &{launch['entry']}<{arguments}>;\n"
            "void* instantiate() { return reinterpret_cast<void*>(kernel); }\n"
        )


class BareLaunch:
    """One recorded launch on given arrays: its parameters packed, its kernel loaded."""

    def __init__(self, launch: Json, cubin: bytes, addresses: Mapping[str, int]) -> None:
        """Packs and loads.

        Args:
            launch: the recorded launch.
            cubin: its kernel.
            addresses: device addresses of the arrays it names, of one rank.
        """
        self._name = launch["entry"]
        self._function = _load(cubin, launch["smem"])
        self._values = [_pack(argument, addresses) for argument in launch["args"]]
        self._pointers = (ctypes.c_void_p * len(self._values))(*map(_address, self._values))
        self._config = _config(launch)

    def enqueue(self, stream: driver.Stream) -> None:
        """Launches on a stream."""
        self._config.hStream = stream.handle
        pointers = ctypes.addressof(self._pointers)
        driver.call("cuLaunchKernelEx", self._config, self._function, pointers, 0)


def _load(cubin: bytes, shared_memory: int) -> Any:
    library = driver.call("cuLibraryLoadData", cubin, [], [], 0, [], [], 0)
    (kernel,) = driver.call("cuLibraryEnumerateKernels", 1, library)
    function = driver.call("cuKernelGetFunction", kernel)
    limit = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    if shared_memory:
        driver.call("cuFuncSetAttribute", function, limit, shared_memory)
    return function


def _pack(argument: Json, addresses: Mapping[str, int]) -> Any:
    """A kernel parameter as an object that holds its bytes."""

    def resolve(place: Json | None) -> int:
        return addresses[place["tensor"]] + place["offset"] if place else 0

    if "ptr" in argument:
        return ctypes.c_uint64(resolve(argument["ptr"]))
    if "u32" in argument:
        return ctypes.c_uint32(argument["u32"])
    if "f32" in argument:
        return ctypes.c_float(argument["f32"])
    if "sym" in argument:
        # Own base, 72 offsets of peers from it (one rank: all 0), rank.
        words = (ctypes.c_int64 * SYM_BUFFER_WORDS)()
        words[0], words[-1] = resolve(argument["sym"]["base"]), argument["sym"]["rank"]
        return words
    spec = argument["tmap"]
    return driver.call(
        "cuTensorMapEncodeTiled",
        cuda.CUtensorMapDataType(spec["dtype"]),
        len(spec["dims"]),
        resolve(spec["base"]),
        [cuda.cuuint64_t(each) for each in spec["dims"]],
        [cuda.cuuint64_t(each) for each in spec["strides"]],
        [cuda.cuuint32_t(each) for each in spec["box"]],
        [cuda.cuuint32_t(each) for each in spec["elem_strides"]],
        cuda.CUtensorMapInterleave(spec["interleave"]),
        cuda.CUtensorMapSwizzle(spec["swizzle"]),
        cuda.CUtensorMapL2promotion(spec["l2"]),
        cuda.CUtensorMapFloatOOBfill(spec["oob"]),
    )


def _address(value: Any) -> int:
    return int(value.getPtr()) if hasattr(value, "getPtr") else ctypes.addressof(value)


def _config(launch: Json) -> Any:
    config = cuda.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch["grid"]
    config.blockDimX, config.blockDimY, config.blockDimZ = launch["block"]
    config.sharedMemBytes = launch["smem"]
    attributes = []
    if launch["cluster"] != [1, 1, 1]:
        cluster = cuda.CUlaunchAttribute()
        cluster.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = cluster.value.clusterDim
        size.x, size.y, size.z = launch["cluster"]
        attributes.append(cluster)
    if [PROGRAMMATIC_SERIALIZATION, 1] in launch["launch_attrs"]:
        early = cuda.CUlaunchAttribute()
        early.id = cuda.CUlaunchAttributeID(PROGRAMMATIC_SERIALIZATION)
        early.value.programmaticStreamSerializationAllowed = 1
        attributes.append(early)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


class BareLayer:
    """A recorded call on one rank: staging, then the kernel; it owns y and its own buffer."""

    def __init__(
        self,
        recorded: Recorded,
        compiler: Compiler,
        operands: Mapping[str, int],
        routings: Sequence[Mapping[str, int]] = ({},),
    ) -> None:
        """Loads the kernels and allocates.

        Args:
            recorded: the call.
            compiler: has its kernels.
            operands: addresses of the arrays of the call but y and the buffer.
            routings: other addresses of some of them, one mapping for each further call.
        """
        sizes = {each["name"]: each.get("u32") for each in recorded.staging["args"]}
        self.shape = (sizes["num_tokens"], sizes["hidden"])
        self._y = driver.Buffer(2 * sizes["num_tokens"] * sizes["hidden"])
        self._buffer = driver.Buffer(recorded.buffer_bytes)
        own = {"y": self._y.address, "sym_buffer": self._buffer.address}
        cubins = compiler.cubin(recorded.staging), compiler.cubin(recorded.mega)
        self._mega = BareLaunch(recorded.mega, cubins[1], {**operands, **own})
        self._staging = [
            BareLaunch(recorded.staging, cubins[0], {**operands, **own, **routing})
            for routing in routings
        ]

    def enqueue(self, stream: driver.Stream, call: int = 0) -> None:
        """Launches both kernels with the nth routing."""
        self._staging[call % len(self._staging)].enqueue(stream)
        self._mega.enqueue(stream)

    def run(self, stream: driver.Stream) -> np.ndarray:
        """y of the first routing as BF16 bits, uint16 [T, H]; unwritten values are 0xFFFF, NaN."""
        self._y.fill(0xFF)
        self.enqueue(stream)
        stream.wait()
        return self._y.read(self.shape, np.uint16)

    def microseconds(self, stream: driver.Stream, calls: int = REPEATS_IN_GRAPH) -> float:
        """Median device time of a call, from a CUDA graph of `calls` calls in a row."""

        def enqueue() -> None:
            for index in range(calls):
                self.enqueue(stream, index)

        return 1e3 * stream.milliseconds(stream.capture(enqueue)) / calls

    def free(self) -> None:
        """Gives the memory back."""
        self._y.free()
        self._buffer.free()


def main() -> None:
    """Runs and times each recorded call."""
    parser = argparse.ArgumentParser(description="Recorded launches, bare.")
    parser.add_argument("--quick", action="store_true", help="one shape")
    quick = parser.parse_args().quick
    faulthandler.dump_traceback_later(300, exit=True)
    records = read_records()
    compiler = Compiler()
    start = time.perf_counter()
    compiler.compile_all(part for each in records.values() for part in (each.staging, each.mega))
    print(f"compiled in {time.perf_counter() - start:.1f} s", flush=True)
    jax.block_until_ready(jax.numpy.zeros(1))
    driver.use_device()
    stream, copy = driver.Stream(), driver.copy_rate()
    print(f"{driver.device_name()}, copy {copy / 1e12:.2f} TB/s (read plus written)", flush=True)
    rows: dict[str, Json] = {}
    for shape in ["qwen3_30b"] if quick else workload.SHAPES:
        cfg = workload.config(shape)
        params = workload.weights(cfg)
        for recorded in (each for each in records.values() if each.name.startswith(shape)):
            rows[recorded.name] = measure(recorded, compiler, stream, cfg, params)
            print(recorded.name, json.dumps(rows[recorded.name]), flush=True)
    results = {"device": driver.device_name(), "copy_bytes_per_second": copy, "calls": rows}
    out = Path(os.environ.get("OUT") or tempfile.mkdtemp())
    (out / "bare_launch.json").write_text(json.dumps(results, indent=1))
    wrong = [name for name, row in rows.items() if not (row["written"] and row["repeats_bits"])]
    print(f"{len(rows) - len(wrong)} checks passed" + (f", FAILED: {wrong}" if wrong else ""))
    raise SystemExit(bool(wrong))


def measure(
    recorded: Recorded,
    compiler: Compiler,
    stream: driver.Stream,
    cfg: MoEConfig,
    params: ExpertWeights,
) -> Json:
    """One recorded call on random tokens: is every value written, twice alike, and how fast."""
    num_tokens = int(recorded.name.rpartition("-")[2])
    x, ids, factors = workload.tokens(cfg, num_tokens)
    layer = BareLayer(recorded, compiler, workload.record_operands(x, ids, factors, params))
    first, second = layer.run(stream), layer.run(stream)
    microseconds = layer.microseconds(stream, 16)
    layer.free()
    matrix = 3 * cfg.hidden_size * cfg.intermediate_size
    used = len(np.unique(np.asarray(ids)))
    return {
        "written": bool((first & 0x7F80 != 0x7F80).all()),
        "repeats_bits": bool((first == second).all()),
        "us": round(microseconds, 2),
        "weights_TB_per_s": round(used * matrix / microseconds / 1e6, 3),
        "TFLOP_per_s": round(2 * num_tokens * cfg.top_k * matrix / microseconds / 1e6, 1),
    }


if __name__ == "__main__":
    main()
