"""The compiled half: FFI handlers that replay launch plans, and the registries behind them.

All of it may run at once on any threads, launches beside buffers that come and go included: a
launch whose buffer is unregistered meanwhile either enqueues all of its steps first, or raises.
Error texts are UTF-8 without control characters; other bytes become ``\\xNN``.
"""

from collections.abc import Callable, Mapping, Sequence

def cuda_handlers(*, captured: bool) -> dict[str, object]:
    """Capsules of the handlers by stage, for `jax.ffi.register_ffi_target`; `captured`: those that
    XLA may capture into CUDA graphs."""

def cpu_handlers(*, captured: bool) -> dict[str, object]:
    """The same for the CPU platform, to launch on the library in JAX_MEGAMOE_LIBCUDA; for tests."""

def cuda_type() -> dict[str, object]:
    """The state type of the CUDA handlers, for `jax.ffi.register_ffi_type`."""

def cpu_type() -> dict[str, object]:
    """The state type of the CPU handlers."""

class Program:
    """A decoded plan, to launch without XLA on any stream: several ranks on one device, say.

    Arrays are (address, bytes) pairs, in the order of the names that the plan was encoded with.
    The caller orders its streams, and keeps the arrays alive until they are done.
    """

    def __init__(self, attributes: Mapping[str, bool | int | float | str | Sequence[int]]) -> None:
        """Decodes attributes of `jax_megamoe.launch.launcher.encode`, arrays turned into lists.

        Raises:
            ValueError: an attribute is missing or wrong.
            RuntimeError: a kernel could not be had.
        """

    def prepare(
        self,
        device_ordinal: int,
        operands: Sequence[tuple[int, int]],
        results: Sequence[tuple[int, int]],
    ) -> None:
        """Checks the arrays and loads the kernels; before any rank launches.

        Raises:
            ValueError: arrays or the symmetric buffer do not fit the plan.
            RuntimeError: no symmetric buffer, no driver, or an error of the driver.
        """

    def launch(
        self,
        device_ordinal: int,
        stream: int,
        operands: Sequence[tuple[int, int]],
        results: Sequence[tuple[int, int]],
    ) -> None:
        """Enqueues the plan's steps on a stream (a CUstream as an integer). The arrays need not be
        those of `prepare`; raises as it does."""

def set_cubin_provider(provider: Callable[[str], bytes]) -> None:
    """Sets what turns a kernel's specification (JSON) into machine code. Called once per kernel and
    process, from any thread; its exception becomes the call's error."""

def register_symmetric_buffer(
    key: str,
    device_ordinal: int,
    base: int,
    peer_bases: Sequence[int],
    rank: int,
    num_bytes: int,
) -> None:
    """Names one rank's symmetric buffer.

    Args:
        key: the name that plans use; the same on every rank.
        device_ordinal: CUDA's ordinal of the device that launches with it.
        base: address of the own buffer.
        peer_bases: address of every rank's buffer as this device maps it, the own one included.
        rank: position of the own buffer in `peer_bases`.
        num_bytes: of the own buffer.

    Raises:
        ValueError: rank, addresses, alignment or num_bytes are wrong, or the name is taken on this
            device.
    """

def unregister_symmetric_buffer(key: str, device_ordinal: int) -> None:
    """Forgets a buffer, before it is freed. Waits until launches that found it are enqueued.

    Raises:
        RuntimeError: there is none, or the CUDA graph of a live executable holds its address.
    """
