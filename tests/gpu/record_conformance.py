"""Records what an H200 makes of the emulator's conformance set (tests/emulator/conformance).

    PYTHONPATH=.:tests:benchmarks/gpu python tests/gpu/record_conformance.py [FOLDER]

Writes conformance.npz, one array a case, to FOLDER or $OUT: tests/golden/conformance.npz. It runs
every case twice and says which differ: those must not be recorded. With a record there already it
says how many results are equal to it.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import driver
import numpy as np
from cuda.bindings import driver as cuda
from emulator import machine
from emulator.conformance import cases
from emulator.conformance.cases import Case

RECORD = Path(__file__).parents[1] / "golden" / "conformance.npz"


def compiled(file: str, folder: Path) -> Any:
    """A module of one source file."""
    path = folder / f"{file}.cu"
    path.write_text(cases.source(file))
    target = path.with_suffix(".cubin")
    options = [f"-arch={cases.ARCH}", "-std=c++20", f"-I{cases.FOLDER}"]
    subprocess.run(["nvcc", "-cubin", *options, "-o", target, path], check=True)
    return driver.call("cuModuleLoadData", target.read_bytes())


def tensor_map(spec: machine.TensorMap, address: int) -> Any:
    """The driver's tensor map of a case's."""
    kinds = list(cuda.CUtensorMapDataType)
    rank = len(spec.dims)
    return driver.call(
        "cuTensorMapEncodeTiled",
        kinds[machine.TENSOR_TYPES[spec.type]],
        rank,
        address,
        [cuda.cuuint64_t(size) for size in spec.dims],
        [
            cuda.cuuint64_t(size) for size in spec.strides or (16,)
        ],  # the driver wants one, even of a 1-D map
        [cuda.cuuint32_t(size) for size in spec.box],
        [cuda.cuuint32_t(1)] * rank,
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        list(cuda.CUtensorMapSwizzle)[machine.SWIZZLES[spec.swizzle]],
        cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        list(cuda.CUtensorMapFloatOOBfill)[spec.fill],
    )


def run(module: Any, case: Case) -> list[np.ndarray]:
    """The recorded arguments of a case after one launch."""
    function = driver.call("cuModuleGetFunction", module, case.kernel.encode())
    limit = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    driver.call("cuFuncSetAttribute", function, limit, case.shared_bytes)
    buffers = {}
    for i, argument in enumerate(case.arguments):
        if isinstance(argument, np.ndarray):
            buffers[i] = driver.Buffer(argument.nbytes)
            place = buffers[i].address
            driver.call("cuMemcpyHtoD", place, argument.ctypes.data, argument.nbytes)
    values = []
    for i, argument in enumerate(case.arguments):
        if i in buffers:
            values.append(np.array([buffers[i].address], np.uint64))
        else:
            values.append(tensor_map(argument, buffers[argument.array].address))
    places = [
        each.ctypes.data if isinstance(each, np.ndarray) else each.getPtr() for each in values
    ]
    pointers = np.array(places, np.uint64)
    config = cuda.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = case.grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = case.block, 1, 1
    config.sharedMemBytes = case.shared_bytes
    stream = driver.Stream()
    config.hStream = stream.handle
    attribute = cuda.CUlaunchAttribute()
    attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x, attribute.value.clusterDim.y = case.cluster, 1
    attribute.value.clusterDim.z = 1
    config.attrs, config.numAttrs = [attribute], 1
    driver.call("cuLaunchKernelEx", config, function, pointers.ctypes.data, 0)
    stream.wait(20)
    results = [
        buffers[i].read(case.arguments[i].shape, case.arguments[i].dtype) for i in case.results
    ]
    for buffer in buffers.values():
        buffer.free()
    return results


def main() -> None:
    driver.use_device()
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ["OUT"])
    records, unequal = {}, []
    with tempfile.TemporaryDirectory() as work:
        modules: dict[str, Any] = {}
        for case in cases.cases():
            if case.file not in modules:
                modules[case.file] = compiled(case.file, Path(work))
            try:
                first, second = run(modules[case.file], case), run(modules[case.file], case)
            except RuntimeError as error:
                sys.exit(f"{case.name}: {error}")
            if any((a != b).any() for a, b in zip(first, second, strict=True)):
                unequal.append(case.name)
            (records[case.name],) = first
    np.savez_compressed(folder / "conformance.npz", **records)
    print(f"{driver.device_name()}, driver {driver.driver_release()}: {len(records)} cases")
    print(f"two runs differ: {unequal or 'none'}")
    if RECORD.exists():
        with np.load(RECORD) as before:
            same = [name for name, array in records.items() if (before[name] == array).all()]
        print(f"equal to the record: {len(same)} of {len(records)}")


if __name__ == "__main__":
    main()
