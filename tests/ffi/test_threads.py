"""What may run at once: launches, and buffers that come and go."""

import threading
from typing import Any

import plans
import pytest
from recording import RecordingDriver

from jax_megamoe.launch import launcher
from jax_megamoe.runtime import extension

KEY = "test/threads"
BASE = 1 << 40
ARRAYS = [(BASE * 2, 1024), (BASE * 3, 2048), (BASE * 4, 16)], [(BASE * 5, 1024)]
NO_BUFFER = f'"{KEY}" on device 0: expected one allocated in this process, got none'


def register() -> None:
    """Names a made-up buffer."""
    extension.module().register_symmetric_buffer(KEY, 0, BASE, [BASE], 0, plans.BUFFER_BYTES)


def unregister() -> None:
    """Forgets it."""
    extension.module().unregister_symmetric_buffer(KEY, 0)


def program(symbol: str) -> Any:
    """whole_plan, without XLA."""
    plan = plans.whole_plan(1, symbol)
    return launcher.program(plan, ["x", "w", "table"], ["y"], buffer_key=KEY)


def test_a_buffer_goes_after_the_launches_that_found_it(driver: RecordingDriver) -> None:
    register()
    held, other = program("held"), program("other")
    for each in (held, other):
        each.prepare(0, *ARRAYS)
    launch = threading.Thread(target=held.launch, args=(0, 7, *ARRAYS))
    close = threading.Thread(target=unregister)
    with driver.held("held") as wait_for_launch:
        launch.start()
        wait_for_launch()
        close.start()
        with pytest.raises(RuntimeError, match=NO_BUFFER):  # once `close` runs, later launches end
            while True:
                other.launch(0, 7, *ARRAYS)
        assert close.is_alive()
    launch.join()
    close.join()
    assert driver.launches()[-1]["kernel"] == "held"


def test_launches_beside_buffers_that_come_and_go(driver: RecordingDriver) -> None:
    programs = [program("beside") for _ in range(200)]
    texts: list[str] = []

    def launch() -> None:
        for each in programs:
            try:
                each.launch(0, 7, *ARRAYS)
            except Exception as error:
                texts.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=launch)
    thread.start()
    while thread.is_alive():
        register()
        unregister()
    thread.join()
    expected = f"RuntimeError: symmetric buffer {NO_BUFFER}"
    assert {text.partition(";")[0] for text in texts} <= {expected}
