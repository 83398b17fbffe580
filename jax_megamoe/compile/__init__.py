"""From a KernelSpec to its cubin: kernel sources, compilers, and a cache of what they made."""

from jax_megamoe.compile.builder import Finding as Finding
from jax_megamoe.compile.builder import Outcome as Outcome
from jax_megamoe.compile.builder import build as build
from jax_megamoe.compile.builder import compile_many as compile_many
from jax_megamoe.compile.builder import describe_toolchain as describe_toolchain
from jax_megamoe.compile.cache import cache_folder as cache_folder
from jax_megamoe.compile.errors import BuildError as BuildError
from jax_megamoe.compile.errors import CompileError as CompileError
from jax_megamoe.compile.errors import MissingDependency as MissingDependency
from jax_megamoe.compile.errors import NotCompiled as NotCompiled
from jax_megamoe.compile.fetch import fetch_source as fetch_source
from jax_megamoe.compile.pins import DISTRIBUTIONS as DISTRIBUTIONS
from jax_megamoe.compile.sources import find_source as find_source
from jax_megamoe.compile.sources import has_source as has_source
