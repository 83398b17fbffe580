"""KernelSpec -> the translation unit that instantiates it."""

from jax_megamoe.compile.deadline import faster_clock
from jax_megamoe.compile.sources import KernelSource
from jax_megamoe.plan.grouped import humming_unit
from jax_megamoe.plan.kernel import KernelSpec

CODEGEN_VERSION = 1
"""Part of every cache key; raised whenever this text, or what a compiler adds to it, changes."""

# Structs that a kernel takes by value: bytes and alignment in the launcher's parameter block. Each
# kernel asserts them, so a header that changes a struct fails to compile instead of misreading it.
_STRUCTS = {
    "deep_gemm::layout::SymBuffer": (592, 8),
    "flashinfer::megamoe::layout::SymBuffer": (592, 8),
    "cute::TmaDescriptor": (128, 128),
    "CUtensorMap": (128, 128),
    "deep_gemm::EpilogueOperatorArgs": (48, 8),
}


def generate(spec: KernelSpec, source: KernelSource, clock_rate: int = 1) -> str:
    """C++ text whose compilation holds exactly one kernel: `spec`'s, whose waits for other ranks
    end `clock_rate` times earlier than the header says.

    The kernel is instantiated by taking its address, since its ``__grid_constant__`` parameters
    cannot be spelled in an explicit instantiation. Its symbol is mangled and, for most kernels,
    local to the cubin: a loader takes the only kernel there is. A function type other than
    ``void(parameter types)``, or a struct of another size, stops the compilation with a message
    that names the source and its version.
    """
    kernel = f"{spec.symbol}<{', '.join(spec.template_args)}>"
    types = ", ".join(spec.parameter_types)
    checks = [f"cuda::std::is_same_v<decltype(&{kernel}), void (*)({types})>"]
    for name in dict.fromkeys(spec.parameter_types):
        if layout := _STRUCTS.get(name.partition("<")[0]):
            checks.append(f"sizeof({name}) == {layout[0]} && alignof({name}) == {layout[1]}")
    complaint = (
        f"{source.name} {source.version}: the parameters of {spec.symbol} are not those that "
        "jax_megamoe passes; use a version of the kernel source that it supports"
    )
    assertions = "\n".join(f'static_assert({check},\n    "{complaint}");' for check in checks)
    using = f"using namespace {source.namespace};\n\n" if source.namespace else ""
    before, after = spec.prelude, ""
    if spec.unit:
        product, tiles = humming_unit.decoded(spec.unit)
        before += humming_unit.prelude(product, tiles)
        after = humming_unit.declarations(product, tiles)
    return f"""\
{before}{faster_clock(clock_rate)}#include <{spec.header}>
#include <cuda/std/type_traits>

{using}{after}
{assertions}

static void instantiate() {{
  [[maybe_unused]] auto kernel = reinterpret_cast<void*>(&{kernel});
}}
"""
