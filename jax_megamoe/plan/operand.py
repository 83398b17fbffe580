"""What a kernel argument may point into, by name, until the addresses are known."""

from dataclasses import dataclass

SYMMETRIC_BUFFER = "symmetric_buffer"


@dataclass(frozen=True)
class Operand:
    """A named array, the symmetric buffer or a constant of the plan, and a byte offset into it.

    Attributes:
        name: ``"symmetric_buffer"``; an operand or result of the call: ``"x"``, ``"topk_ids"``,
            ``"topk_weights"``, ``"y"``, ``"stats"``, a field of the routed experts such as
            ``"w13_weight"`` or of the fused shared one such as ``"shared_w13_weight"``; or a key of
            the plan's `constants`.
        offset: bytes.
    """

    name: str
    offset: int = 0
