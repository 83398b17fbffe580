"""What can go wrong between a KernelSpec and its cubin; each text says what to do."""

CUDA_EXTRA = "pip install 'jax-megamoe[cuda13]'"
"""Brings every wheel that compiling needs: headers, compilers, and the kernel source."""


class BuildError(RuntimeError):
    """A kernel cannot be had: base of the errors of this package."""


class MissingDependency(BuildError):
    """A kernel source, a compiler or its headers are absent or too old; names the pip command."""


class CompileError(BuildError):
    """The compiler refused a kernel, or its cubin is not what was asked for."""


class NotCompiled(BuildError):
    """The policy forbids compiling and the cache does not hold the kernel."""
