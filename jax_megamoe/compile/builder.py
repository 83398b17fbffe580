"""KernelSpec -> cubin, one or many, and what this machine has to make them with."""

import dataclasses
import functools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_megamoe._checks import described, message, one_of
from jax_megamoe.compile.cache import KernelCache, Key, cache_folder, check_folder, digest
from jax_megamoe.compile.codegen import CODEGEN_VERSION, generate
from jax_megamoe.compile.compiler import COMPILERS, CompilationFailed, Compiled, Compiler
from jax_megamoe.compile.cubin import read_kernels
from jax_megamoe.compile.deadline import clock_rate
from jax_megamoe.compile.errors import BuildError, CompileError, MissingDependency, NotCompiled
from jax_megamoe.compile.names import check_names
from jax_megamoe.compile.sources import SOURCE_NAMES, KernelSource, find_source
from jax_megamoe.plan.kernel import KernelSpec

_log = logging.getLogger("jax_megamoe")
_LOG_TAIL = 3000  # characters of a compiler's log in an error

_memo: dict[str, bytes] = {}
_locks: dict[str, threading.Lock] = {}
_registry = threading.Lock()  # guards _locks


@dataclass(frozen=True)
class Outcome:
    """What became of one kernel of `compile_many`.

    Attributes:
        cubin_bytes: size of the cubin; 0 after an error.
        seconds: from the request to the cubin, waiting for other processes included.
        error: None, or why there is no cubin.
    """

    spec: KernelSpec
    cubin_bytes: int
    seconds: float
    error: BuildError | None


@dataclass(frozen=True)
class Finding:
    """One part of the toolchain: what was found or, where that is empty, what to do about it."""

    part: str
    found: str
    problem: str = ""


def build(
    spec: KernelSpec,
    *,
    compiler: Compiler | None = None,
    cache: KernelCache | None = None,
    policy: str | None = None,
) -> bytes:
    """The cubin of `spec`, with exactly one kernel in it.

    Thread-safe; a process builds or reads a kernel once.

    Args:
        spec: the kernel.
        compiler: by default ``$JAX_MEGAMOE_COMPILER`` (nvrtc or nvcc), else NVRTC, else NVCC.
        cache: by default the folder that `cache_folder` names.
        policy: ``"auto"`` or ``"never"`` compile; by default ``$JAX_MEGAMOE_COMPILE``, else auto.
            Under never the cache's kernel is used whatever toolchain made it, and none needs to be
            installed.

    Raises:
        ValueError: an unknown policy, compiler or source, or a wrong time limit (`clock_rate`).
        MissingDependency: no kernel source, or no compiler; names the pip command.
        CompileError: the compiler refused it, or its cubin is not what was asked for, or the spec
            names what no kernel source has (`check_names`).
        BuildError: others may write the cache's folder (`check_folder`).
        NotCompiled: under the policy never, a kernel that is not in the cache.
    """
    source = find_source(spec.source)
    cache = cache or _open_cache(cache_folder())
    if _policy(policy) == "never":
        return _cached_only(spec, source, cache)
    compiler = compiler or default_compiler()
    key = cache_key(spec, source, compiler)
    slot = f"{cache.folder}/{key.stem}"
    with _registry:
        lock = _locks.setdefault(slot, threading.Lock())
    with lock:
        if slot not in _memo:
            _memo[slot] = cache.get(key, lambda: _compile(spec, source, compiler))
        return _memo[slot]


def cache_key(spec: KernelSpec, source: KernelSource, compiler: Compiler) -> Key:
    """The cache key of `spec` compiled by `compiler`: everything that decides the cubin."""
    return Key(
        _kernel_digest(spec, source),
        compiler.name,
        digest(compiler.version, *compiler.flags(spec.arch, spec.options)),
    )


def default_compiler() -> Compiler:
    """The compiler that ``$JAX_MEGAMOE_COMPILER`` names; without it NVRTC, else NVCC.

    Raises:
        ValueError: an unknown name.
        MissingDependency: it, or each of them, is not installed.
    """
    chosen = os.environ.get("JAX_MEGAMOE_COMPILER")
    if chosen:
        one_of("JAX_MEGAMOE_COMPILER", chosen, COMPILERS)
        return _make_compiler(chosen)
    faults: list[str] = []
    for name in COMPILERS:
        try:
            return _make_compiler(name)
        except MissingDependency as error:
            faults.append(str(error))
    raise MissingDependency("\n".join(faults))


def compile_many(
    specs: Iterable[KernelSpec],
    *,
    jobs: int | None = None,
    on_done: Callable[[Outcome], None] = lambda _: None,
    compiler: Compiler | None = None,
    cache: KernelCache | None = None,
) -> tuple[Outcome, ...]:
    """Builds each distinct spec into the cache, several at a time, whatever the policy says.

    An error of one kernel does not stop the others. NVRTC's front end, about half of its time,
    takes one kernel at a time in a process; nvcc's processes are independent.

    Args:
        specs: kernels, repeats allowed.
        jobs: kernels at a time; by default the processors of the machine.
        on_done: called in this thread as each kernel is done, in order of completion.

    Returns:
        The outcomes in order of first appearance in `specs`.
    """
    distinct = tuple(dict.fromkeys(specs))

    def one(spec: KernelSpec) -> Outcome:
        start = time.perf_counter()
        size, error = 0, None
        try:
            size = len(build(spec, compiler=compiler, cache=cache, policy="auto"))
        except BuildError as caught:
            error = caught
        return Outcome(spec, size, time.perf_counter() - start, error)

    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        futures = [pool.submit(one, spec) for spec in distinct]
        for future in as_completed(futures):
            on_done(future.result())
    return tuple(future.result() for future in futures)


def describe_toolchain() -> tuple[Finding, ...]:
    """What `build` would use, and for each part that is absent the command that brings it.

    Never raises: what a part raises is its finding.
    """

    def describe_source(name: str) -> str:
        source = find_source(name)
        return f"{source.version} in {source.include_dir}"

    def describe_cache() -> str:
        folder = cache_folder()
        kernels = len(list(folder.glob("*.kernel")))
        check_folder(folder)
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        writable = existing.is_dir() and os.access(existing, os.W_OK)
        return f"{folder}, {kernels} kernels{'' if writable else ', cannot be written'}"

    parts: list[tuple[str, Callable[[], str]]] = [
        *((f"kernel source {n}", functools.partial(describe_source, n)) for n in SOURCE_NAMES),
        *((f"compiler {n}", lambda n=n: _make_compiler(n).version) for n in COMPILERS),
        ("kernel cache", describe_cache),
        ("compile policy", lambda: _policy(None)),
    ]
    findings: list[Finding] = []
    for part, describe in parts:
        try:
            findings.append(Finding(part, describe()))
        except (BuildError, ValueError) as error:
            findings.append(Finding(part, "", str(error)))
        except Exception as error:  # a part may be broken in ways that nobody foresaw
            findings.append(Finding(part, "", described(error)))
    return tuple(findings)


@functools.cache
def _make_compiler(name: str) -> Compiler:
    return COMPILERS[name]()


@functools.cache
def _open_cache(folder: Path) -> KernelCache:
    return KernelCache(folder)


def _policy(policy: str | None) -> str:
    policy = policy or os.environ.get("JAX_MEGAMOE_COMPILE") or "auto"
    one_of("JAX_MEGAMOE_COMPILE", policy, ("auto", "never"))
    return policy


def _kernel_digest(spec: KernelSpec, source: KernelSource) -> str:
    described = json.dumps(dataclasses.asdict(spec), sort_keys=True)
    rate = clock_rate(source)
    clock = (f"clock rate {rate}",) if rate != 1 else ()
    return digest(described, source.version, source.fingerprint, str(CODEGEN_VERSION), *clock)


def _cached_only(spec: KernelSpec, source: KernelSource, cache: KernelCache) -> bytes:
    preferred = os.environ.get("JAX_MEGAMOE_COMPILER") or next(iter(COMPILERS))
    cubin = cache.load_any(_kernel_digest(spec, source), preferred)
    if cubin is None:
        raise NotCompiled(
            message(
                "JAX_MEGAMOE_COMPILE=never",
                f"{_named(spec, source)} in {cache.folder}",
                "no intact entry",
                "compile it beforehand with `python -m jax_megamoe compile`, or unset the variable",
            )
        )
    return cubin


def _compile(
    spec: KernelSpec, source: KernelSource, compiler: Compiler
) -> tuple[bytes, dict[str, Any]]:
    """The cubin and its description for the cache."""
    check_names(spec, source)
    _log.info("compiling %s with %s %s", _named(spec, source), compiler.name, compiler.version)
    try:
        text = generate(spec, source, clock_rate(source))
        done = compiler.compile(text, spec.arch, source.include_dirs, spec.options)
    except CompilationFailed as error:
        raise CompileError(
            f"{compiler.name} {compiler.version} cannot compile {_named(spec, source)}.\n"
            f"{str(error)[-_LOG_TAIL:]}\n"
            "If a size or a format is at fault, choose one that the kernel takes; if the source's "
            "version is, install one that jax_megamoe supports (`python -m jax_megamoe doctor`)."
        ) from error
    _check_cubin(spec, source, compiler, done)
    description: dict[str, Any] = {
        "spec": dataclasses.asdict(spec),
        "source_version": source.version,
        "compiler": compiler.name,
        "compiler_version": compiler.version,
        "flags": compiler.flags(spec.arch, spec.options),
        **dataclasses.asdict(done.resources),
        "seconds": done.seconds,
        "cubin_bytes": len(done.cubin),
    }
    return done.cubin, description


def _check_cubin(
    spec: KernelSpec, source: KernelSource, compiler: Compiler, done: Compiled
) -> None:
    """Raises CompileError unless there is one kernel, with as many parameters as planned."""
    try:
        kernels = read_kernels(done.cubin)
    except ValueError as error:
        raise CompileError(f"{compiler.name}: {error}, for {_named(spec, source)}") from error
    counts = [len(kernel.parameters) for kernel in kernels]
    if counts != [len(spec.parameter_types)]:
        raise CompileError(
            message(
                f"cubin of {_named(spec, source)} by {compiler.name} {compiler.version}",
                f"one kernel of {len(spec.parameter_types)} parameters",
                f"kernels of {counts} parameters",
            )
        )


def _named(spec: KernelSpec, source: KernelSource) -> str:
    arguments = ", ".join(spec.template_args)
    return f"{spec.symbol}<{arguments}> of {source.name} {source.version} for {spec.arch}"
