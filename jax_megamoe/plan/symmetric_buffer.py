"""Layouts of the symmetric buffer: where each region of it starts."""

from dataclasses import dataclass


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


@dataclass(frozen=True)
class BufferLayout:
    """A whole buffer: its size and named regions.

    Attributes:
        num_bytes: of one rank's allocation.
        max_num_tokens: tokens per rank it holds, after alignment.
        regions: (name, region), in order of offset.
    """

    num_bytes: int
    max_num_tokens: int
    regions: tuple[tuple[str, Region], ...]
