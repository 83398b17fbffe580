"""What sizes, tiles, buffer and maps of an SM100 launch depend on: facts about one kernel."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.problem import Problem
from jax_megamoe.plan.tensor_map import (
    BFLOAT16,
    PACKED_U4_ALIGN16,
    SWIZZLE_64B,
    SWIZZLE_128B,
    UINT8,
)


@dataclass(frozen=True)
class Activations:
    """How activation rows lie in the symmetric buffer, and how tensor maps see them.

    Attributes:
        dtype: as DeepGEMM's buffer slices name it.
        bits: of one value.
        per_element: values in one element of that dtype.
        map_dtype: CUtensorMapDataType.
        map_per_element: values in one element of the map.
        box: map elements along K of one copy.
        swizzle: CUtensorMapSwizzle of loads.
        output_box, output_swizzle: the same for layer 1's output, the store of layer 2's input.
    """

    dtype: str
    bits: int
    per_element: int
    map_dtype: int
    map_per_element: int
    box: int
    swizzle: int
    output_box: int
    output_swizzle: int


@dataclass(frozen=True)
class Weights:
    """How a tensor map sees weights [groups, N, K].

    Attributes:
        bits: of one value in global memory.
        map_dtype: CUtensorMapDataType.
        map_per_element: values in one element of the map.
        box: map elements along K of one copy.
        swizzle: CUtensorMapSwizzle.
        folded: groups are folded into the rows (2-D); else 4-D: K, N/2, 2 halves, groups.
        cpp_type: as a template argument, where the kernel has one.
    """

    bits: int
    map_dtype: int
    map_per_element: int
    box: int
    swizzle: int
    folded: bool
    cpp_type: str


MASKED_INTERMEDIATE = 4096
"""Widest intermediate size of a kernel whose 64-bit mask has one bit per 64 columns of it."""

FP8_ACTIVATIONS = Activations("float8_e4m3fn", 8, 1, UINT8, 1, 128, SWIZZLE_128B, 64, SWIZZLE_64B)
BF16_ACTIVATIONS = Activations("bfloat16", 16, 1, BFLOAT16, 1, 64, SWIZZLE_128B, 64, SWIZZLE_128B)

FP8_WEIGHTS = Weights(8, UINT8, 1, 128, SWIZZLE_128B, False, "cutlass::float_e4m3_t")
FP4_WEIGHTS = Weights(
    4, PACKED_U4_ALIGN16, 1, 128, SWIZZLE_128B, False, "cutlass::detail::float_e2m1_unpacksmem_t"
)
BF16_WEIGHTS = Weights(16, BFLOAT16, 1, 64, SWIZZLE_128B, False, "cutlass::bfloat16_t")


@dataclass(frozen=True, kw_only=True)
class Sm100Traits:
    """What sizes, tiles, buffer and maps of a launch depend on.

    Attributes:
        source: where the kernel comes from.
        stem: name of the header; the kernel is ``<stem>_impl``.
        activations: of routed tokens.
        scale_block: values along K that share a scale; 0 without scales.
        weights: weight formats the kernel takes, and their maps.
        shared: formats fused shared weights may have, the default first, and their maps.
        shared_activations: how shared tokens lie per format; empty: as routed ones do.
        shared_source: where layer 1 of a shared expert reads tokens: the routed tokens' ``"x"``
            region, its ``"own"`` region, or the ``"caller"``'s array.
        block_k: values along K of one pipeline stage.
        operand_bits: of one operand value in shared memory.
        reduces_amax: shared memory holds partial maxima (kernels that quantise layer 2's input).
        lookup_bytes: of a table in shared memory.
        max_tile: most tokens per expert for which a single tile is chosen; None: the common rule.
        ring_weights: pulled tokens bring their top-k weight into the ring.
        norm_sums: each token has room for sums of a norm after the experts.
        tail: what ends the buffer: one scale per token, partial sums of a norm, or nothing.
        locality_table: the kernel takes the table of SM locality domains.
        full_pool_from: aligned buffer tokens from which on the ring is the whole pool (sgl).
        max_intermediate: of the layer-2 readiness mask; None: any.
        intermediate_multiple: values along K that the layer-2 pipeline takes at a time.
        max_top_k: the combine shifts a 32-bit mask by top_k; 32 where it does not.
        pulls_whole_rows: with a ring for every row that may arrive, a dispatch warp copies whole
            rows through its buffer, which holds one pull.
        store_rows: of one epilogue store for tiles of 192 rows, and for layers 1 and 2 of 240.
        refuses_situ_clamp: the host checks that situ has no clamp.
        shared_hint: what to do about a precision of shared experts that is not in `shared`.
        staged_as: the enumerator of this package's staging kernel for the routed tokens.
        activation_names: activations the kernel has.
    """

    source: str
    stem: str
    activations: Activations
    scale_block: int
    weights: Mapping[str, Weights]
    shared: Mapping[str, Weights]
    shared_activations: Mapping[str, Activations] = field(default_factory=dict[str, Activations])
    shared_source: Literal["x", "own", "caller"] = "x"
    block_k: int
    operand_bits: int
    reduces_amax: bool = False
    lookup_bytes: int = 0
    max_tile: int | None = None
    ring_weights: bool = True
    norm_sums: bool = False
    tail: Literal["scales", "norms", "nothing"] = "nothing"
    locality_table: bool = True
    full_pool_from: int | None = None
    max_intermediate: int | None = None
    intermediate_multiple: int = 128
    max_top_k: int = 31
    pulls_whole_rows: bool = False
    store_rows: tuple[int, tuple[int, int]]
    refuses_situ_clamp: bool = False
    shared_hint: str = ""
    staged_as: str
    activation_names: tuple[str, ...]

    def measured_tile(self, problem: Problem, device: DeviceSpec) -> int | None:
        """A tile height that DeepGEMM measured to be better than its rule's; None: none."""
        del problem, device

    @property
    def symbol(self) -> str:
        """The template's name."""
        return f"{self.stem}_impl"

    @property
    def header(self) -> str:
        """As included."""
        return f"deep_gemm/impls/{self.stem}.cuh"
