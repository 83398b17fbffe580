"""What DeepGEMM's kernels cannot do: its own host checks, and those its host leaves out.

Without the latter a kernel does not compile (static assertions in its header) or reads past a
region. Each function yields one refusal per broken rule, the first that a caller should see first.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from jax_megamoe.plan import heuristics, sm90_heuristics
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.problem import Problem
from jax_megamoe.plan.refusal import Refusal, missing, unfit
from jax_megamoe.plan.sm100_traits import MASKED_INTERMEDIATE, Sm100Traits
from jax_megamoe.plan.symmetric_buffer import sm100_layout

MAX_EXPERTS, MAX_LOCAL_EXPERTS, MAX_SLOTS = 2048, 512, 32
MAX_RANKS, MAX_SM90_RANKS = 72, 32
MAX_SHARED_BLOCKS = 1 << 15
"""Counters of shared tiles in the signals, one per 8 tokens; checked without shared experts too."""

_MIN_TILE = 8
_MAX_SCALE_BYTES = 1 << 32
_TILE_TAG_BITS = 29
_COMBINE_BUFFERS = 24
_ONE_CHUNK_HIDDEN = 4096
_CHUNK_MULTIPLE = 512
SM100_ARCHS, SM90_ARCH = range(100, 110), 90


def sm100_violations(
    traits: Sm100Traits, problem: Problem, device: DeviceSpec
) -> Iterator[Refusal]:
    """Broken rules of an SM100 launch, NotImplementedError or ValueError, most general first."""
    if device.arch not in SM100_ARCHS:
        yield missing("device", f"compute capability 10.x for {traits.stem}", device.arch / 10)
    yield from _experts(problem, MAX_RANKS, traits.max_top_k)
    yield from _at_most("num_experts", problem.num_experts, MAX_EXPERTS)
    yield from _at_most("num_experts per rank", problem.local_experts, MAX_LOCAL_EXPERTS)
    yield from sm100_features(traits, problem)
    yield from _sm100_sizes(traits, problem, device)
    yield from _tokens(problem, heuristics.aligned_tokens(problem))
    ring = heuristics.ring_tokens(traits, problem, device.num_sms)
    if ring > heuristics.MAX_RING_TOKENS:
        limit = f"a ring of at most {heuristics.MAX_RING_TOKENS} received tokens"
        hint = f"max_num_tokens {problem.max_num_tokens} on {problem.num_ranks} ranks is too many"
        yield unfit("max_num_tokens", limit, ring, hint)
    yield from _sm100_addresses(traits, problem, device)
    height = heuristics.block_m(traits, problem, device)
    yield from sm100_tile_violations(traits, problem, device, height)


def _sm100_addresses(
    traits: Sm100Traits, problem: Problem, device: DeviceSpec
) -> Iterator[Refusal]:
    """Counters, 32-bit addresses and buffers of one row that many or wide tokens exceed."""
    tokens = heuristics.aligned_tokens(problem)
    yield from _at_most("max_num_tokens, rounded up", tokens, MAX_SHARED_BLOCKS * _MIN_TILE)
    layout = sm100_layout(traits, problem, device.num_sms)
    for name in ("l2_acts_sf", "shared_l2_acts_sf"):
        if name in layout and layout[name].num_bytes > _MAX_SCALE_BYTES:
            limit = f"scales of second inputs ({name}) in at most {_MAX_SCALE_BYTES} bytes"
            hint = "the kernel's addresses of them have 32 bits"
            yield unfit("max_num_tokens", limit, layout[name].num_bytes, hint)
    if (
        traits.pulls_whole_rows
        and not problem.num_shared_experts
        and problem.intermediate_size <= MASKED_INTERMEDIATE
        and layout["l1_acts"].shape[0] >= heuristics.full_pool_tokens(problem)
        and heuristics.pull_bytes(traits, problem) < layout["x"].shape[1]
    ):
        limit = f"at most {heuristics.MAX_PULL_BYTES} in a ring for every row that may arrive"
        hint = f"{traits.source}'s kernel copies whole rows into buffers of half a row"
        yield unfit("hidden_size", limit, problem.hidden_size, hint)


def sm100_tile_violations(
    traits: Sm100Traits, problem: Problem, device: DeviceSpec, height: int
) -> Iterator[Refusal]:
    """Rules broken by hidden_size or the device's shared memory with tiles of this height."""
    tiles = heuristics.tiles_of_height(traits, problem, device, height)
    if tiles.stages < 2:
        yield _too_little_memory(device, tiles.stages)

    def room(resized: Problem) -> int:
        return heuristics.tiles_of_height(traits, resized, device, height).combine_bytes

    yield from _combine(problem, room, (1, 2))


def sm90_violations(problem: Problem, device: DeviceSpec) -> Iterator[Refusal]:
    """Broken rules of an SM90 launch, NotImplementedError or ValueError, most general first."""
    if device.arch != SM90_ARCH:
        yield missing("device", "compute capability 9.0 for fp8_block", device.arch / 10)
    yield from _experts(problem, MAX_SM90_RANKS, MAX_SLOTS)
    yield from sm90_features(problem)
    yield from _multiple("hidden_size", problem.hidden_size, 512)
    yield from _multiple("intermediate_size", problem.intermediate_size, 256)
    yield from _at_most("intermediate_size", problem.intermediate_size, MASKED_INTERMEDIATE)
    tokens = sm90_heuristics.aligned_tokens(problem)
    yield from _tokens(problem, tokens)
    bound = problem.num_tokens_bound
    if bound and not problem.num_tokens <= bound <= tokens:
        yield unfit("num_tokens_bound", f"0 or {problem.num_tokens} to {tokens}", bound)
    yield from _multiple("num_sms", device.num_sms, 2)
    schedule = sm90_heuristics.schedule(problem, device)
    if schedule.stages < 2:
        yield _too_little_memory(device, schedule.stages)
    yield from _sm90_tile_tags(problem, schedule.block_m)

    def room(resized: Problem) -> int:
        return sm90_heuristics.schedule(resized, device).combine_bytes

    yield from _combine(problem, room, (1, 2, 4))


def sm90_features(problem: Problem) -> Iterator[Refusal]:
    """Activation and options that the SM90 kernel has or has not."""
    parameters = problem.alpha, problem.beta
    if problem.activation != "swiglu" or parameters != (1.0, 0.0):
        got = f"{problem.activation} {parameters}"
        yield missing("activation", "swiglu on SM90, with alpha 1 and beta 0", got)
    yield from _clamp(problem)
    if problem.num_shared_experts:
        yield missing("num_shared_experts", "0 on SM90", problem.num_shared_experts, "never fused")


def _sm90_tile_tags(problem: Problem, height: int) -> Iterator[Refusal]:
    """A tile's expert, row of tiles and column of tiles share a word of the schedule's table."""
    columns = max(2 * problem.intermediate_size, problem.hidden_size) // sm90_heuristics.BLOCK_N
    parts = (problem.local_experts, sm90_heuristics.pool_tokens(problem) // height, columns)
    bits = sum(part.bit_length() for part in parts)
    if bits > _TILE_TAG_BITS:
        limit = f"experts, tiles of received tokens and columns in {_TILE_TAG_BITS} bits"
        yield unfit("max_num_tokens", limit, f"{bits} bits", "use fewer tokens")


def _at_most(argument: str, value: int, limit: int) -> Iterator[Refusal]:
    if value > limit:
        yield unfit(argument, f"at most {limit}", value)


def _multiple(argument: str, value: int, divisor: int) -> Iterator[Refusal]:
    if value % divisor:
        yield unfit(argument, f"a multiple of {divisor}", value)


def _too_little_memory(device: DeviceSpec, stages: int) -> Refusal:
    expected = f"two pipeline stages in {device.smem_capacity} bytes of shared memory"
    return unfit("max_num_tokens", expected, f"{stages}", "use fewer tokens")


def _experts(problem: Problem, max_ranks: int, max_top_k: int) -> Iterator[Refusal]:
    """Experts, ranks and top-k; after these, local_experts is meaningful."""
    yield from _at_most("num_ranks", problem.num_ranks, max_ranks)
    if problem.num_experts % problem.num_ranks:
        expected = f"a multiple of the {problem.num_ranks} expert-parallel ranks"
        yield unfit("num_experts", expected, problem.num_experts)
    if problem.num_shared_experts:
        yield from _at_most("top_k with the shared expert's slot", problem.top_k + 1, MAX_SLOTS)
    yield from _at_most("top_k", problem.top_k, max_top_k)
    if not 1 <= problem.top_k <= problem.num_experts:
        yield unfit("top_k", f"1 to num_experts = {problem.num_experts}", problem.top_k)


def _clamp(problem: Problem) -> Iterator[Refusal]:
    if problem.clamp is not None and not problem.clamp >= 0:
        yield unfit("activation clamp", "a number >= 0 or None", problem.clamp)


def sm100_features(traits: Sm100Traits, problem: Problem) -> Iterator[Refusal]:
    """Formats, activation and options that a kernel has or has not."""
    kernel = f"{traits.source}'s {traits.stem}"
    if problem.weight_format not in traits.weights:
        expected = f"one of {list(traits.weights)} for {kernel}"
        yield missing("weight_format", expected, problem.weight_format)
    if problem.activation not in traits.activation_names:
        expected = f"one of {list(traits.activation_names)} for {kernel}"
        yield missing("activation", expected, problem.activation)
    yield from _clamp(problem)
    if traits.refuses_situ_clamp and problem.activation == "situ" and problem.clamp is not None:
        yield unfit("activation clamp", "None for situ", problem.clamp)
    if problem.shared_format is not None and problem.shared_format not in traits.shared:
        expected = f"one of {list(traits.shared)} for {kernel}"
        yield missing("shared_format", expected, problem.shared_format, traits.shared_hint)
    if problem.num_shared_experts != problem.fused_shared_experts:
        expected = f"weights of the {problem.num_shared_experts} shared experts the buffer is for"
        yield unfit("shared weights", expected, None)


def _sm100_sizes(traits: Sm100Traits, problem: Problem, device: DeviceSpec) -> Iterator[Refusal]:
    yield from _multiple("hidden_size", problem.hidden_size, 256)
    multiple = traits.intermediate_multiple
    yield from _multiple("intermediate_size", problem.intermediate_size, multiple)
    if traits.max_intermediate is not None:
        yield from _at_most("intermediate_size", problem.intermediate_size, traits.max_intermediate)
    yield from _multiple("num_sms", device.all_sms, 4 if traits.locality_table else 2)
    yield from _multiple("num_sms without the reserved ones", device.num_sms, 2)
    if traits.locality_table and device.num_sms <= device.all_sms // 2:
        # A kernel gives each of two memory domains its own queue and, for few tasks, no others'.
        limit = f"fewer than half of the device's {device.all_sms} SMs"
        hint = "the kernel needs SMs of both memory domains"
        yield unfit("reserved_sms", limit, device.reserved_sms, hint)


def _tokens(problem: Problem, aligned: int) -> Iterator[Refusal]:
    if problem.num_tokens > aligned:
        limit = f"at most max_num_tokens = {problem.max_num_tokens} (a buffer of {aligned})"
        yield unfit("num_tokens", limit, problem.num_tokens)


def _combine(
    problem: Problem, room: Callable[[Problem], int], chunks: tuple[int, ...]
) -> Iterator[Refusal]:
    """The combine keeps a row in few chunks, and 24 of them at once in `room` bytes."""
    count = _combine_chunks(problem, room, chunks)
    if count is None:
        smaller = range(
            problem.hidden_size // _CHUNK_MULTIPLE * _CHUNK_MULTIPLE, 0, -_CHUNK_MULTIPLE
        )
        limit = next(
            size
            for size in smaller
            if _combine_chunks(replace(problem, hidden_size=size), room, chunks)
        )
        hint = "the combine's buffers do not fit shared memory"
        yield unfit("hidden_size", f"at most {limit}", problem.hidden_size, hint)
    elif problem.hidden_size * 2 // count % _CHUNK_MULTIPLE:
        expected = f"a multiple of {_CHUNK_MULTIPLE * count // 2}"
        hint = f"the combine splits a row into {count} chunks"
        yield unfit("hidden_size", expected, problem.hidden_size, hint)


def _combine_chunks(
    problem: Problem, room: Callable[[Problem], int], chunks: tuple[int, ...]
) -> int | None:
    """Chunks of a row, the fewest that fit; None if none does."""
    allowed = chunks if problem.hidden_size <= _ONE_CHUNK_HIDDEN else chunks[1:]
    buffers, available = _COMBINE_BUFFERS * 2 * problem.hidden_size, room(problem)
    return next((count for count in allowed if buffers // count <= available), None)
