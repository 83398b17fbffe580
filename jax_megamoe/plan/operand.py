"""What a kernel argument may point into, by name, until the addresses are known."""

from dataclasses import dataclass

SYMMETRIC_BUFFER = "symmetric_buffer"


@dataclass(frozen=True)
class Operand:
    """A named array, the symmetric buffer or a constant of the plan, and a byte offset into it.

    Attributes:
        name: ``"symmetric_buffer"``; an operand or result of the call (``"x"``, ``"topk_ids"``,
            ``"topk_weights"``, the fields of ExpertWeights such as ``"w13_weight"``, ``"y"``,
            ``"stats"``); or a key of the plan's `constants`.
        offset: bytes.
    """

    name: str
    offset: int = 0
