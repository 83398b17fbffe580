"""The compiled module `_ffi`: its only importer, its registration with XLA, its way to kernels.

Importing this registers the FFI targets for CUDA, which needs neither a GPU nor JAX's CUDA plugin.
"""

import dataclasses
import functools
import json
from types import ModuleType
from typing import Any

import jax

from jax_megamoe import compile as compiler
from jax_megamoe._checks import message
from jax_megamoe.plan.kernel import CodeOptions, KernelSpec

TARGET = "jax_megamoe_launch"
"""FFI target that XLA runs outside CUDA graphs."""

GRAPH_TARGET = "jax_megamoe_launch_graph"
"""The same, which XLA may capture into CUDA graphs (its command buffers)."""


def encode_kernel(spec: KernelSpec) -> str:
    """`spec` as JSON; equal specifications give equal text."""
    return json.dumps(dataclasses.asdict(spec), sort_keys=True)


def decode_kernel(text: str) -> KernelSpec:
    """The inverse of `encode_kernel`.

    Raises:
        ValueError: `text` is not what `encode_kernel` makes; it may come with any program.
    """
    try:
        fields: dict[str, Any] = json.loads(text)
        for name in ("template_args", "parameter_types", "unit"):
            fields[name] = tuple(fields[name])
        fields["options"] = CodeOptions(**fields.get("options", {}))
        spec = KernelSpec(**fields)
        if json.loads(text) == json.loads(encode_kernel(spec)) and _is_typed(spec):
            return spec
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
        pass
    expected = "the JSON of a KernelSpec"
    raise ValueError(message("kernel specification", expected, repr(text[:200])))


def _is_typed(spec: KernelSpec) -> bool:
    lists = (*spec.template_args, *spec.parameter_types, *spec.unit)
    texts = (spec.source, spec.arch, spec.header, spec.symbol, spec.prelude, *lists)
    level, fast = spec.options.register_level, spec.options.fast_math
    return all(isinstance(each, str) for each in texts) and (type(level), type(fast)) == (int, bool)


def _cubin(spec: str) -> bytes:
    return compiler.build(decode_kernel(spec))


@functools.cache
def module() -> ModuleType:
    """The compiled module.

    Raises:
        ImportError: this copy of the package was not built, or was built for another Python.
    """
    try:
        from jax_megamoe.runtime import _ffi  # noqa: PLC0415 (may be missing from a source tree)
    except ImportError as error:
        hint = "build it with `pip install .` in the repository, which needs a C++20 compiler (g++)"
        raise ImportError(
            message("jax_megamoe", "its compiled module _ffi", error, hint)
        ) from error
    return _ffi


@functools.cache
def register_cuda() -> None:
    """Registers both targets for CUDA and the compiler as the source of kernels; once a process."""
    ffi = module()
    ffi.set_cubin_provider(_cubin)
    jax.ffi.register_ffi_type("jax_megamoe_cuda_program", ffi.cuda_type(), platform="CUDA")
    for name, captured in ((TARGET, False), (GRAPH_TARGET, True)):
        handlers = ffi.cuda_handlers(captured=captured)
        jax.ffi.register_ffi_target(name, handlers, platform="CUDA")


@functools.cache
def register_cpu() -> None:
    """Registers both targets for the CPU platform too, for tests: they launch on whatever library
    the environment variable JAX_MEGAMOE_LIBCUDA names; once a process.

    Starts JAX's CPU backend: one that starts later looks at targets before their state types, and
    refuses them.
    """
    jax.devices("cpu")
    ffi = module()
    jax.ffi.register_ffi_type("jax_megamoe_cpu_program", ffi.cpu_type(), platform="cpu")
    for name, captured in ((TARGET, False), (GRAPH_TARGET, True)):
        handlers = ffi.cpu_handlers(captured=captured)
        jax.ffi.register_ffi_target(name, handlers, platform="cpu")


try:
    register_cuda()
except ImportError:
    pass  # `module` says why when a launch needs it
