"""What the sgl source's two staging kernels have in common."""

from jax_megamoe.plan.arithmetic import ceil_div
from jax_megamoe.plan.launch import Pointer, Uint32, optional
from jax_megamoe.plan.operand import SYMMETRIC_BUFFER, Operand
from jax_megamoe.plan.problem import Problem
from jax_megamoe.plan.symmetric_buffer import BufferLayout


def staging_inputs(problem: Problem) -> tuple[Pointer, ...]:
    """Pointers to a staging kernel's inputs; null without tokens."""
    names = (("x", "x"), ("topk_idx", "topk_ids"), ("topk_weights", "topk_weights"))
    return tuple(optional(name, operand, problem.num_tokens > 0) for name, operand in names)


def region_pointer(layout: BufferLayout, name: str) -> Pointer:
    """A pointer to a region of the buffer."""
    return Pointer(f"buf_{name}", Operand(SYMMETRIC_BUFFER, layout[name].offset))


def staging_sizes(problem: Problem, layout: BufferLayout, groups: int) -> tuple[Uint32, ...]:
    """The sizes a staging kernel takes by value; `groups` scales per token."""
    return (
        Uint32("num_tokens", problem.num_tokens),
        Uint32("padded_max", layout.max_num_tokens),
        Uint32("hidden", problem.hidden_size),
        Uint32("num_groups", groups),
        Uint32("top_k", problem.top_k),
    )


def staging_blocks(problem: Problem, layout: BufferLayout) -> int:
    """One block per token and as many as it takes to fill the rest of the top-k regions."""
    rest = (layout.max_num_tokens - problem.num_tokens) * problem.top_k
    return problem.num_tokens + ceil_div(rest, problem.hidden_size // 8)
