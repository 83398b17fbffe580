"""What a plan depends on of a JAX device."""

import jax

from jax_megamoe import _checks
from jax_megamoe.plan.device import DeviceSpec


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
    return DeviceSpec(round(10 * float(capability)), num_sms - reserved_sms)
