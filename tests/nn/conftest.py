"""CPU devices that stand for GPUs where a layer chooses its recipe, its sizes and its layout."""

from collections.abc import Callable

import pytest

from jax_megamoe.launch import grouped, runnable
from jax_megamoe.plan.device import DeviceSpec


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets CPU devices stand for another kind, with the grouped products installed or not."""

    def stand_for(device: DeviceSpec, *, products: bool = False) -> None:
        for module in (runnable, grouped):
            monkeypatch.setattr(module, "spec_of", lambda *_: device)
        absent = None if products else runnable.Unavailable("no humming")
        monkeypatch.setattr(grouped, "_installed", lambda config: absent)

    return stand_for
