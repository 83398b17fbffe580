"""What needs a process of its own: no CUDA driver, no compiled module, another process's cache."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import recording

FOLDER = Path(__file__).parent

LAUNCH = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", 1)
import plans
from jax_megamoe.runtime import extension
from jax_megamoe.launch import launcher
{setup}
x = plans.operands()["x"]
plan = plans.pointer_plan("processes")
run = jax.jit(lambda x: launcher.launch(plan, {{"x": x}}, plans.RESULTS)["y"])
try:
    jax.block_until_ready(run(x))
except Exception as error:
    print(json.dumps(dict(type=type(error).__name__, text=str(error))))
else:
    print(json.dumps({result}))
"""

CACHED = """
import pathlib
import recording
hits = []
def listen(name, **_):
    if "cache_hits" in name:
        hits.append(name)
jax.monitoring.register_event_listener(listen)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
driver = recording.start(pathlib.Path(sys.argv[2]))
"""


def python(code: str, *arguments: str, **environment: str) -> Any:
    """Runs code in a new interpreter and returns the JSON of its last line."""
    paths = os.pathsep.join([str(FOLDER), str(FOLDER.parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("library", "text"),
    [
        ("/nowhere/libcuda.so.1", "expected the CUDA driver library, got"),
        ("libm.so.6", "expected the function cuInit, got none"),
        (
            "/nowhere/caf\udce9.so",
            "expected the CUDA driver library, got /nowhere/caf\\xe9.so: can",
        ),
    ],
)
def test_without_a_driver_the_call_says_what_to_install(library: str, text: str) -> None:
    setup = "extension.register_cpu(); extension.module().set_cubin_provider(lambda spec: b'k 8 8')"
    error = python(LAUNCH.format(setup=setup, result="None"), JAX_MEGAMOE_LIBCUDA=library)
    shown = library.replace("\udce9", r"\xe9")
    assert f"jax_megamoe: {shown}: {text}" in error["text"]
    assert "install an NVIDIA driver of release 580 or newer" in error["text"]


def test_importing_opens_no_driver() -> None:
    code = """
import json, jax_megamoe
from jax_megamoe.launch import launcher
maps = open("/proc/self/maps").read()
print(json.dumps(["_ffi" in maps, "libcuda.so" in maps, "librecording" in maps]))
"""
    assert python(code, JAX_MEGAMOE_LIBCUDA="") == [True, False, False]


def test_a_copy_that_was_not_built_imports_and_says_so() -> None:
    error = python(LAUNCH.format(setup="", result="None").replace(
        "import json, sys\n", "import json, sys\nsys.modules['jax_megamoe.runtime._ffi'] = None\n"
    ))  # fmt: skip
    assert error["type"] == "ImportError"
    assert error["text"].startswith("jax_megamoe: expected its compiled module _ffi, got ")
    assert error["text"].endswith(
        "`pip install .` in the repository, which needs a C++20 compiler (g++)"
    )


def test_a_cached_executable_runs_in_another_process(tmp_path: Path) -> None:
    code = LAUNCH.format(setup=CACHED, result="[len(hits), driver.launches()[0]['kernel']]")
    driver = tmp_path / "driver"
    driver.mkdir()
    recording.build(driver)
    arguments = [str(tmp_path / "cache"), str(driver)]
    first, second = python(code, *arguments), python(code, *arguments)
    assert first == [0, "processes"]
    assert second[0] > 0
    assert second[1] == "processes"
