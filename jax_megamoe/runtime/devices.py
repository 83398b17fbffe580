"""What a plan depends on of a JAX device."""

from dataclasses import replace

import jax

from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.refusal import Refusal, missing, unfit

KNOWN_DEVICES = {
    "h100": DeviceSpec(90, 132),
    "h200": DeviceSpec(90, 132),
    "b200": DeviceSpec(100, 148),
    "gb200": DeviceSpec(100, 152),
    "b300": DeviceSpec(103, 148),
    "gb300": DeviceSpec(103, 152),
}
"""Devices to plan or compile for where they are not; a part with other SMs needs its own kernels.

The H200's numbers were read off one, the others off recorded launches.
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
    spec = spec_of(device, reserved_sms)
    if isinstance(spec, Refusal):
        raise spec.error()
    return spec


def spec_of(
    device: jax.Device, reserved_sms: int = 0, implementation: str = "deep_gemm"
) -> DeviceSpec | Refusal:
    """`device_spec`, or why the implementation runs on no such device as a value."""
    capability = getattr(device, "compute_capability", None)
    num_sms = getattr(device, "core_count", None)
    if device.platform != "gpu" or capability is None or num_sms is None:
        expected = f"a CUDA device for implementation {implementation}"
        return missing("device", expected, device.device_kind)
    arch = round(10 * float(capability))
    return _reserving(DeviceSpec(arch, num_sms), reserved_sms)


def known_device(name: str, reserved_sms: int = 0) -> DeviceSpec:
    """One of `KNOWN_DEVICES`, of which the kernel leaves some SMs to others.

    Raises:
        ValueError: reserved_sms leaves none.
    """
    spec = _reserving(KNOWN_DEVICES[name], reserved_sms)
    if isinstance(spec, Refusal):
        raise spec.error()
    return spec


def _reserving(device: DeviceSpec, reserved_sms: int) -> DeviceSpec | Refusal:
    if reserved_sms >= device.num_sms:
        return unfit("reserved_sms", f"fewer than the device's {device.num_sms} SMs", reserved_sms)
    return replace(device, num_sms=device.num_sms - reserved_sms, reserved_sms=reserved_sms)
