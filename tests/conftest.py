"""Eight CPU devices, strict promotion, repeatable hypotheses, and a count of the golden records
compared."""

import os
from collections.abc import Iterator
from typing import Any

import golden_records
import jax
import numpy as np
import pytest
import recording
import slow
from emulation import Emulation, emulate
from hypothesis import settings

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# A change is judged by the same examples each time; HYPOTHESIS_PROFILE=default draws new ones.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator seeded by the test's name."""
    return np.random.default_rng(list(request.node.name.encode()))


@pytest.fixture
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[recording.RecordingDriver]:
    """The recording driver, with nothing recorded yet; launches on the CPU platform reach it."""
    recorder = recording.start(tmp_path_factory.getbasetemp())
    recorder.clear()
    yield recorder
    recorder.clear()


@pytest.fixture
def emulation(
    driver: recording.RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Emulation]:
    """Every CPU device stands for a B200, until `device` is set to another."""
    with emulate(driver, monkeypatch) as emulated:
        yield emulated


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of slow files."""
    for item in items:
        if slow.is_slow(item.path):
            item.add_marker(pytest.mark.slow)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hands an xdist worker's counts to the main process."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["golden"] = golden_records.counts()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Adds up the counts of an xdist worker that ended."""
    golden_records.add(getattr(node, "workeroutput", {}).get("golden", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints how many golden records were compared, by file."""
    for line in golden_records.summary():
        terminalreporter.write_line(line)
