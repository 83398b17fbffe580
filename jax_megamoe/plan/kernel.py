"""A kernel, and the shape of its launch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CodeOptions:
    """Choices of a compiler that decide a kernel's code.

    Attributes:
        register_level: ptxas' effort to use registers, 0 to 10; DeepGEMM's host code says 10.
        fast_math: subnormal float32 numbers become 0, divisions and exponentials are approximate.
    """

    register_level: int = 10
    fast_math: bool = False


@dataclass(frozen=True)
class KernelSpec:
    """One instantiation of a kernel template: all that a compiler must know.

    Attributes:
        source: distribution the header comes from: ``"sgl"``, ``"vllm"``, ``"flashinfer"``,
            ``"humming"`` or ``"jax_megamoe"``.
        arch: the compiler's architecture, for example ``"sm_100f"``.
        header: as included, for example ``"deep_gemm/impls/sm90_fp8_mega_moe.cuh"``.
        symbol: the template's name inside the source's namespace.
        template_args: C++ text of each argument, in order.
        parameter_types: C++ type of each kernel parameter, in order; asserted when compiling.
        prelude: C++ text before the header is included: macros that change it.
        unit: numbers and names that `humming_unit.decoded` makes a product and its tiles of, whose
            macros and classes stand around the header; empty for other sources.
        options: of the compiler.
    """

    source: str
    arch: str
    header: str
    symbol: str
    template_args: tuple[str, ...]
    parameter_types: tuple[str, ...]
    prelude: str = ""
    unit: tuple[str, ...] = ()
    options: CodeOptions = CodeOptions()


@dataclass(frozen=True)
class LaunchConfig:
    """Grid, cluster and block sizes, dynamic shared memory, and launch attributes.

    Attributes:
        smem: dynamic shared memory of a block, bytes; also the function attribute that allows it.
        programmatic_serialization: the launch may start before its predecessor ended (CUDA
            launch attribute 6).
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    smem: int = 0
    programmatic_serialization: bool = False
