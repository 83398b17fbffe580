"""What a plan depends on of a JAX device."""

import jax

from jax_megamoe import _checks
from jax_megamoe.plan.device import DeviceSpec

KNOWN_DEVICES = {
    "h100": DeviceSpec(90, 132),
    "h200": DeviceSpec(90, 132),
    "b200": DeviceSpec(100, 148),
    "gb200": DeviceSpec(100, 152),
    "b300": DeviceSpec(103, 148),
    "gb300": DeviceSpec(103, 152),
}
"""Devices to plan or compile for where they are not; a part with other SMs needs its own kernels.

The H200's numbers were read off one, the others are those of the recorded launches' devices.
"""


def device_spec(device: jax.Device, reserved_sms: int = 0) -> DeviceSpec:
    """The planner's view of a CUDA device.

    Args:
        device: a JAX device.
        reserved_sms: streaming multiprocessors that the kernel leaves to others.

    Raises:
        NotImplementedError: not a CUDA device.
        ValueError: reserved_sms leaves none.
    """
    capability = getattr(device, "compute_capability", None)
    num_sms = getattr(device, "core_count", None)
    if device.platform != "gpu" or capability is None or num_sms is None:
        expected = "a CUDA device for implementation deep_gemm"
        raise NotImplementedError(_checks.message("device", expected, device.device_kind))
    if reserved_sms >= num_sms:
        raise ValueError(
            _checks.message("reserved_sms", f"fewer than the device's {num_sms} SMs", reserved_sms)
        )
    arch = round(10 * float(capability))
    return DeviceSpec(arch, num_sms - reserved_sms, reserved_sms=reserved_sms)
