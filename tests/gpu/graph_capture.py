"""Whether XLA captured our launches into CUDA graphs: seen by a library in front of the driver."""

import ctypes
import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
GRAPH_FLAGS = {
    "on": "--xla_gpu_graph_min_graph_size=1",
    "off": "--xla_gpu_enable_command_buffer=",
}
"""XLA_FLAGS that capture everything that can be, and nothing."""


class Launches(NamedTuple):
    """Kernel launches of jax_megamoe: while a graph was recorded, and straight to a stream."""

    captured: int
    direct: int


def build(folder: Path) -> Path:
    """Compiles launch_counter.cc against this process's libcuda; needs g++."""
    ctypes.CDLL("libcuda.so.1")
    loaded = re.search(r"(/\S*libcuda\.so\S*)", Path("/proc/self/maps").read_text())
    assert loaded is not None
    library = folder / "liblaunch_counter.so"
    source = Path(__file__).with_name("launch_counter.cc")
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", f"-I{ROOT}", "-Wl,--no-as-needed"]
    subprocess.run(["g++", *flags, source, loaded[1], "-ldl", "-o", library], check=True)
    return library


def environment(graphs: str, library: Path) -> dict[str, str]:
    """This process's variables for one that runs with graphs ``"on"`` or ``"off"``, counted."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {GRAPH_FLAGS[graphs]}".strip()
    return {**os.environ, "XLA_FLAGS": flags, "JAX_MEGAMOE_LIBCUDA": str(library)}


def launches() -> Launches:
    """What was counted in this process so far."""
    counter = ctypes.CDLL(os.environ["JAX_MEGAMOE_LIBCUDA"])
    for function in (counter.launches_captured, counter.launches_direct):
        function.restype = ctypes.c_long
    return Launches(counter.launches_captured(), counter.launches_direct())
