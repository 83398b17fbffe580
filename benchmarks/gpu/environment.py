"""What this machine has: the first thing to run on a new one.

    PYTHONPATH=.:benchmarks/gpu python benchmarks/gpu/environment.py

Says, and never fails, what is missing; the scripts beside it need all of it.
"""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "torch", "flax", "numpy"),
    *("cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-cccl"),
    *("nvidia-cuda-crt", "nvidia-cuda-nvcc", "sgl-deep-gemm", "filelock", "jaxtyping", "rich"),
)


def packages() -> str:
    """Versions of what is installed, and what is not."""
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return ", ".join(found) + (f"; missing: {', '.join(missing)}" if missing else "")


def command(*words: str) -> str:
    """The last lines that a program prints."""
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return "; ".join(done.stdout.split("\n")[-4:]).strip("; ")


def gpu() -> str:
    """Name, memory, driver and clocks of each GPU."""
    fields = "name,compute_cap,memory.total,memory.used,driver_version,clocks.sm,clocks.max.sm"
    return command("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")


def jax_device() -> str:
    """The device that JAX computes on, as a plan sees it."""
    import jax  # noqa: PLC0415 (each step may fail alone)

    from jax_megamoe.runtime.devices import device_spec  # noqa: PLC0415

    device = jax.devices()[0]
    return f"{device.device_kind}: {device_spec(device)}"


def extension() -> str:
    """Where the compiled module lies."""
    from jax_megamoe.runtime import extension  # noqa: PLC0415

    return str(extension.module().__file__)


def toolchain() -> str:
    """What kernels are compiled with, and what is missing for it."""
    from jax_megamoe.compile import describe_toolchain  # noqa: PLC0415

    return "\n".join(f"  {f.part}: {f.found or 'NO: ' + f.problem}" for f in describe_toolchain())


FACTS: dict[str, Callable[[], str]] = {
    "machine": lambda: f"{platform.platform()}, {os.cpu_count()} CPUs, {platform.libc_ver()[1]}",
    "python": platform.python_version,
    "packages": packages,
    "gpu": gpu,
    "nvcc": lambda: command("nvcc", "--version"),
    "g++": lambda: command("g++", "-dumpfullversion"),
    "programs": lambda: ", ".join(filter(None, map(shutil.which, ("nvcc", "g++", "cuobjdump")))),
    "variables": lambda: json.dumps(
        {k: v for k, v in os.environ.items() if k.startswith(("JAX_", "XLA_", "CUDA_"))}
    ),
    "extension": extension,
    "jax device": jax_device,
    "toolchain": toolchain,
}


def main() -> None:
    """Prints every fact and writes them to $OUT/environment.json."""
    found: dict[str, str] = {}
    for name, read in FACTS.items():
        try:
            found[name] = read()
        except Exception as error:
            found[name] = f"NO: {type(error).__name__}: {error}"
        print(f"{name}: {found[name]}", flush=True)
    out = Path(os.environ.get("OUT") or tempfile.mkdtemp())
    (out / "environment.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
