"""What FlashInfer's SM90 FP4 kernels cannot do: static assertions of their headers, and limits that
nothing checks.

Of the wheel's own checks only those are here that its kernels need: ranks need not be a power of
two, and NVFP4 not have 4 or 8.
"""

from collections.abc import Iterator

from jax_megamoe.plan.families.flashinfer_heuristics import WeightKind, combine_chunks
from jax_megamoe.plan.problem import Problem
from jax_megamoe.plan.refusal import Refusal, unfit

MAX_RANKS = {"mxfp4": 64, "nvfp4": 32}
"""Threads of a barrier; source ranks that an NVFP4 block tells apart."""
MAX_TOP_K = 32
MAX_INTERMEDIATE = 8192
"""A 64-bit mask has one bit for each 256 rows of gate and up."""
_COMBINE_MULTIPLE = 512


def size_violations(kind: WeightKind, problem: Problem) -> Iterator[Refusal]:
    """Broken rules of a launch that no tile can mend, the first that a caller should see first."""
    if problem.num_ranks > MAX_RANKS[kind]:
        yield unfit("num_ranks", f"at most {MAX_RANKS[kind]}", problem.num_ranks)
    if problem.num_experts % problem.num_ranks:
        expected = f"a multiple of the {problem.num_ranks} expert-parallel ranks"
        yield unfit("num_experts", expected, problem.num_experts)
    if problem.top_k > MAX_TOP_K:
        yield unfit("top_k", f"at most {MAX_TOP_K}", problem.top_k)
    if not 1 <= problem.top_k <= problem.num_experts:
        yield unfit("top_k", f"1 to num_experts = {problem.num_experts}", problem.top_k)
    # A row is combined in chunks of 512 bytes, two of BF16's 256 values above 4096.
    multiple = _COMBINE_MULTIPLE // 2 * combine_chunks(problem.hidden_size)
    if problem.hidden_size % multiple:
        yield unfit("hidden_size", f"a multiple of {multiple}", problem.hidden_size)
    if problem.intermediate_size % 128:
        yield unfit("intermediate_size", "a multiple of 128", problem.intermediate_size)
    if problem.intermediate_size > MAX_INTERMEDIATE:
        yield unfit("intermediate_size", f"at most {MAX_INTERMEDIATE}", problem.intermediate_size)
    if problem.clamp is not None and not problem.clamp > 0:
        yield unfit("activation clamp", "a number > 0 or None", problem.clamp)
