"""devices.py: what a plan depends on of a device, and devices that no kernel runs on."""

import jax
import pytest
from fake_cuda import FakeDevice

from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.runtime.devices import device_spec


@pytest.mark.parametrize(("capability", "arch"), [("9.0", 90), ("10.0", 100), ("10.3", 103)])
def test_architecture_and_multiprocessors(capability: str, arch: int) -> None:
    device = FakeDevice(0, core_count=148, compute_capability=capability)
    assert device_spec(device) == DeviceSpec(arch, 148)
    reserving = device_spec(device, reserved_sms=8)
    assert reserving == DeviceSpec(arch, 140, reserved_sms=8)
    assert (reserving.all_sms, device_spec(device).all_sms) == (148, 148)


def test_cpu_is_refused_by_its_name() -> None:
    text = "device: expected a CUDA device for implementation deep_gemm, got cpu"
    with pytest.raises(NotImplementedError, match=f"^{text}$"):
        device_spec(jax.devices("cpu")[0])


def test_gpu_of_another_maker_is_refused() -> None:
    device = FakeDevice(0, compute_capability=None, device_kind="AMD Instinct MI300X")
    with pytest.raises(NotImplementedError, match="got AMD Instinct MI300X"):
        device_spec(device)


@pytest.mark.parametrize("reserved", [132, 200])
def test_reserving_every_multiprocessor_is_refused(reserved: int) -> None:
    text = f"reserved_sms: expected fewer than the device's 132 SMs, got {reserved}"
    with pytest.raises(ValueError, match=text):
        device_spec(FakeDevice(0), reserved)
