"""Layouts of the symmetric buffer: where each region of it starts."""

import hashlib
from dataclasses import dataclass
from math import prod

from jax_megamoe.plan import heuristics, sm90_heuristics
from jax_megamoe.plan.arithmetic import align
from jax_megamoe.plan.problem import Problem
from jax_megamoe.plan.sm100_traits import Activations, Sm100Traits

SIGNAL_BYTES = 21_140_864
"""Counters and barriers at the start of an SM100 buffer; zero before the first launch."""

READY_OFFSET, READY_BYTES = 128, 576
"""Combine-ready words inside the signals, one uint64 per peer (72)."""

ITEM_BYTES = {
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
}


@dataclass(frozen=True)
class Region:
    """One array inside the buffer.

    Attributes:
        offset: bytes from the buffer's base.
        shape: elements.
        strides: elements between neighbours, per dimension.
        dtype: dtype name, as DeepGEMM's slices name it.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes it covers."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class BufferLayout:
    """A whole buffer: its size and named regions.

    Attributes:
        num_bytes: of one rank's allocation.
        max_num_tokens: tokens per rank it holds, after alignment.
        regions: (name, region), in order of offset. Only ``"shared_l1_acts"`` may lie on another
            region, ``"x"``.
    """

    num_bytes: int
    max_num_tokens: int
    regions: tuple[tuple[str, Region], ...]

    def __getitem__(self, name: str) -> Region:
        """The region of that name.

        Raises:
            KeyError: the layout has none.
        """
        return dict(self.regions)[name]

    def __contains__(self, name: object) -> bool:
        return any(name == known for known, _ in self.regions)

    def fingerprint(self, source: str) -> str:
        """Names the layout: equal only for kernels of one source with every region in one place.

        Calls that share a buffer must agree on all of it: counters have to stay zero, and what is a
        counter of one layout may be a token of another of as many bytes.

        Args:
            source: of the kernel; each gives its counters a meaning of their own.
        """
        whole = repr((source, self.num_bytes, self.max_num_tokens, self.regions))
        return hashlib.sha256(whole.encode()).hexdigest()[:32]


class RegionStack:
    """Places regions one after the other."""

    def __init__(self) -> None:
        self._end = 0
        self._regions: list[tuple[str, Region]] = []

    def add(self, name: str, dtype: str, *shape: int) -> None:
        """Appends a row-major region; an empty axis counts as one element in the strides."""
        sizes = [max(1, size) for size in shape]
        strides = tuple(prod(sizes[axis + 1 :]) for axis in range(len(shape)))
        self._place(name, Region(self._end, shape, strides, dtype))

    def add_columns(self, name: str, dtype: str, rows: int, columns: int) -> None:
        """Appends [rows, columns] stored with rows contiguous."""
        self._place(name, Region(self._end, (rows, columns), (1, rows), dtype))

    def alias(self, name: str, of: str) -> None:
        """Gives a placed region a second name."""
        self._regions.append((name, dict(self._regions)[of]))

    def pad(self, alignment: int) -> None:
        """Moves the end up to a multiple."""
        self._end = align(self._end, alignment)

    def finish(self, max_num_tokens: int) -> BufferLayout:
        """The layout of everything placed."""
        ordered = sorted(self._regions, key=lambda named: named[1].offset)
        return BufferLayout(self._end, max_num_tokens, tuple(ordered))

    def _place(self, name: str, region: Region) -> None:
        self._regions.append((name, region))
        self._end += region.num_bytes


def sm100_layout(traits: Sm100Traits, problem: Problem, num_sms: int) -> BufferLayout:
    """The buffer of an SM100 kernel; the same on every rank with as many SMs.

    Regions filled before a launch: ``x``, ``x_sf``, ``topk_idx``, ``topk_weights``,
    ``x_scales``, ``shared_l1_acts`` and ``shared_l1_acts_sf``, where the kernel has them.
    """
    tokens = heuristics.aligned_tokens(problem)
    stack = RegionStack()
    stack.add("signals", "uint8", SIGNAL_BYTES)
    stack.add("source_indices", "int32", problem.num_experts, tokens)
    stack.add("pool_metadata", "int32", heuristics.full_pool_tokens(problem), 3)
    if traits.norm_sums:
        stack.add("norm_sums", "float32", tokens, problem.top_k)
    stack.pad(16)
    acts, hidden = traits.activations, problem.hidden_size
    stack.add("x", acts.dtype, tokens, hidden // acts.per_element)
    if traits.scale_block:
        stack.add("x_sf", "int32", tokens, hidden // (4 * traits.scale_block))
    stack.add("topk_idx", "int64", tokens, problem.top_k)
    stack.add("topk_weights", "float32", tokens, problem.top_k)
    _add_shared(stack, traits, problem)
    _add_ring(stack, traits, problem, heuristics.ring_tokens(traits, problem, num_sms))
    return stack.finish(tokens)


def shared_activations(traits: Sm100Traits, problem: Problem) -> Activations:
    """How the tokens of fused shared experts lie; the kernel's default format without weights."""
    default = next(iter(traits.shared_activations.values()), traits.activations)
    return traits.shared_activations.get(problem.shared_format or "", default)


def shared_scale_block(traits: Sm100Traits, problem: Problem) -> int:
    """Values along K that share a scale of a shared token; 0 without scales."""
    if not traits.shared_activations:
        return traits.scale_block
    return 0 if shared_activations(traits, problem).bits == 16 else 32


def _add_shared(stack: RegionStack, traits: Sm100Traits, problem: Problem) -> None:
    tokens, hidden = heuristics.aligned_tokens(problem), problem.hidden_size
    acts, block = shared_activations(traits, problem), shared_scale_block(traits, problem)
    own = traits.shared_source == "own" and problem.num_shared_experts
    if own:
        stack.add("shared_l1_acts", acts.dtype, tokens, hidden // acts.per_element)
    elif traits.shared_source != "caller":
        stack.alias("shared_l1_acts", "x")
    if not problem.num_shared_experts:
        return
    width = problem.num_shared_experts * problem.intermediate_size
    scale_rows = heuristics.shared_scale_tokens(problem)
    if block:
        stack.add_columns("shared_l1_acts_sf", "int32", scale_rows, hidden // (4 * block))
    stack.add("shared_l2_acts", acts.dtype, tokens, width // acts.per_element)
    if block:
        stack.add_columns("shared_l2_acts_sf", "int32", scale_rows, width // (4 * block))


def _add_ring(stack: RegionStack, traits: Sm100Traits, problem: Problem, ring: int) -> None:
    tokens, acts = heuristics.aligned_tokens(problem), traits.activations
    hidden, width = problem.hidden_size, problem.intermediate_size
    scale_ring, per_word = heuristics.scale_ring_tokens(traits, ring), 4 * traits.scale_block
    stack.add("l1_acts", acts.dtype, ring, hidden // acts.per_element)
    if traits.scale_block:
        stack.add_columns("l1_acts_sf", "int32", scale_ring, hidden // per_word)
    if traits.ring_weights:
        stack.add("l1_topk_weights", "float32", ring)
    stack.add("l2_acts", acts.dtype, ring, width // acts.per_element)
    if traits.scale_block:
        stack.add_columns("l2_acts_sf", "int32", scale_ring, width // per_word)
    slots = problem.top_k + (problem.num_shared_experts > 0)
    stack.add("combine", "bfloat16", slots, tokens, hidden)
    if traits.tail == "scales":
        stack.add("x_scales", "float32", tokens)
        stack.add("l1_x_scales", "float32", ring)
    elif traits.tail == "norms":
        stack.add("partial_norms", "float32", problem.top_k, tokens, hidden // 128)


def sm90_layout(problem: Problem) -> BufferLayout:
    """The buffer of the SM90 kernel; ``x``, ``x_sf`` and the top-k regions are its input."""
    tokens, pool = sm90_heuristics.aligned_tokens(problem), sm90_heuristics.pool_tokens(problem)
    ring = sm90_heuristics.ring_tokens(problem)
    hidden, width = problem.hidden_size, problem.intermediate_size
    stack = RegionStack()
    stack.add("workspace", "uint8", _sm90_workspace_bytes(problem, pool, ring))
    stack.add("x", "float8_e4m3fn", tokens, hidden)
    stack.add("x_sf", "float32", tokens, hidden // 128)
    stack.add("topk_idx", "int64", tokens, problem.top_k)
    stack.add("topk_weights", "float32", tokens, problem.top_k)
    stack.add("l1_acts", "float8_e4m3fn", ring, hidden)
    stack.add_columns("l1_acts_sf", "float32", 2 * ring, hidden // 128)
    stack.add("l1_topk_weights", "float32", ring)
    stack.add("l2_acts", "float8_e4m3fn", ring, width)
    stack.add_columns("l2_acts_sf", "float32", 2 * ring, width // 128)
    stack.add("combine", "bfloat16", problem.top_k, tokens, hidden)
    return stack.finish(tokens)


def _sm90_workspace_bytes(problem: Problem, pool: int, ring: int) -> int:
    """Barriers, counters, source indices and pool metadata; all zero before the first launch."""
    experts, local, ranks = problem.num_experts, problem.local_experts, problem.num_ranks
    received = ranks * sm90_heuristics.aligned_tokens(problem)
    words = experts + local + 1 + ranks
    size = 32 + 8 * (2 * experts + local)
    size += 4 * align(pool // 8, 2) + 8 * (pool // 8) + 4 * 2 * (ring // 8)
    size += 4 * local * ranks * received + 12 * pool
    size += align(align(4 * words, 8) + 8 * (experts + local) + 4 * words, 1024)
    return align(size, 1024)
