"""The kernels as PTX, by nvcc, kept in the emulator's folder."""

import functools
import hashlib
import subprocess
import tempfile
from pathlib import Path

import pytest

from emulator.build import folder
from emulator.conformance import cases
from jax_megamoe.compile import MissingDependency
from jax_megamoe.compile.toolkit import find_toolkit


@functools.cache
def ptx(file: str) -> str:
    """PTX of a source file. Skips the test where there is no nvcc."""
    try:
        nvcc = find_toolkit(nvcc=True).nvcc
    except MissingDependency as missing:
        pytest.skip(str(missing))
    head = (cases.FOLDER / "rows.cuh").read_text()
    key = hashlib.sha256((head + cases.source(file)).encode()).hexdigest()[:16]
    kept = folder() / f"{file}-{key}.ptx"
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=folder()) as work:
            source = Path(work) / f"{file}.cu"
            source.write_text(cases.source(file))
            made = source.with_suffix(".ptx")
            options = [f"-arch={cases.ARCH}", "-std=c++20", f"-I{cases.FOLDER}"]
            subprocess.run([nvcc, "-ptx", *options, "-o", made, source], check=True)
            made.replace(kept)
    return kept.read_text()
