"""What the planner needs to know of a device."""

from dataclasses import dataclass

SM100_SHARED_MEMORY = 232_448
"""Opt-in shared memory of one block on SM90 and SM100, bytes (CUDA C++ Programming Guide)."""


@dataclass(frozen=True)
class DeviceSpec:
    """A device, as far as a launch depends on it.

    Attributes:
        arch: compute capability times ten: 90, 100 or 103.
        num_sms: streaming multiprocessors the launch may use (reserved ones already taken off).
        smem_capacity: opt-in shared memory of one block, bytes.
        reserved_sms: those it leaves to others; which ones they are is not its choice.
    """

    arch: int
    num_sms: int
    smem_capacity: int = SM100_SHARED_MEMORY
    reserved_sms: int = 0

    @property
    def all_sms(self) -> int:
        """Streaming multiprocessors of the device."""
        return self.num_sms + self.reserved_sms
