"""One grouped matrix product: what is multiplied, and the tiles that it is cut into."""

from dataclasses import dataclass

from jax_megamoe.plan.arithmetic import ceil_div

KNOWN_ARCHS = (80, 89, 90, 100, 120)
"""Compute capabilities, times ten, with recorded launches to compare with."""


@dataclass(frozen=True)
class Element:
    """A number format as a template argument: bits, exponent bits, mantissa bits."""

    bits: int
    exponent: int
    mantissa: int
    ptx: str


BF16 = Element(16, 8, 7, "bf16")
E4M3 = Element(8, 4, 3, "e4m3")
E2M1 = Element(4, 2, 1, "e2m1")
E8M0 = Element(8, 8, 0, "ue8m0")
FLOAT32 = Element(32, 8, 23, "f32")


@dataclass(frozen=True)
class Weights:
    """How an expert's matrix is stored.

    Attributes:
        element: of a value.
        scale: of a block scale.
        group: values along K that share a scale.
        group_n: rows that share a scale; 0: one.
    """

    element: Element
    scale: Element
    group: int
    group_n: int = 0


WEIGHTS = {
    "fp8_block": Weights(E4M3, FLOAT32, 128, 128),
    "mxfp8": Weights(E4M3, E8M0, 32),
    "mxfp4": Weights(E2M1, E8M0, 32),
    "nvfp4": Weights(E2M1, E4M3, 16),
}
"""By weight format."""


@dataclass(frozen=True)
class Inputs:
    """What rows are multiplied: their element, and what shares one float32 scale.

    Attributes:
        element: of a value.
        group: values that share a scale; 0: the whole row (E4M3), or no scale (BF16).
    """

    element: Element
    group: int = 0


INPUTS = {
    "bf16": Inputs(BF16),
    "fp8_token": Inputs(E4M3),
    "fp8_f32_128": Inputs(E4M3, 128),
    "fp8_f32_32": Inputs(E4M3, 32),
}
"""By name."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """Rows times the matrices of their experts, ``c[r] = a[r / top_k] @ w[expert of r].T``.

    Attributes:
        arch: compute capability times ten.
        weights: key of `WEIGHTS`.
        inputs: key of `INPUTS`.
        num_experts: matrices.
        n: rows of a matrix, padding included: a multiple of 64.
        k: columns, padding included.
        pad_n, pad_k: how many of them are padding: not in the output, not in the input rows.
        second_scale: of the weights: ``"none"``, one float32 an expert (``"tensor"``) or a BF16 a
            row (``"channel"``).
        has_bias: BF16 a row of the matrix is added.
    """

    arch: int
    weights: str
    inputs: str
    num_experts: int
    n: int
    k: int
    pad_n: int = 0
    pad_k: int = 0
    second_scale: str = "none"
    has_bias: bool = False

    @property
    def weight(self) -> Weights:
        """Storage of the matrices."""
        return WEIGHTS[self.weights]

    @property
    def input(self) -> Inputs:
        """Storage of the rows."""
        return INPUTS[self.inputs]

    @property
    def flat(self) -> bool:
        """Weights of the inputs' width lie in pieces of 16 bytes, unpermuted."""
        return self.weight.element.bits == self.input.element.bits

    @property
    def fused(self) -> bool:
        """Block scales of MXFP4 are added to exponents of E4M3: see `weights.grouped`."""
        return self.weights == "mxfp4" and self.input.element is E4M3

    @property
    def packed_k(self) -> bool:
        """The words of fused MXFP4 in the order that takes 64 columns at once."""
        return self.arch == 90 and self.fused and self.input.group >= 128 and self.n % 64 == 0

    @property
    def groups(self) -> int:
        """Block scales of a row of the matrix."""
        return ceil_div(self.k, self.weight.group)

    @property
    def columns_per_word_row(self) -> int:
        """Columns of the matrix in one row of packed words."""
        return 64 if self.packed_k else 256 // self.input.element.bits


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How a product is cut: the choices that change its time and not its result.

    Attributes:
        wgmma: Hopper's instruction; else mma.sync.
        block: rows, columns and depth of a thread block's tile.
        warp: of a warp's part of it.
        stages: tiles in flight.
        ctas: thread blocks a multiprocessor.
        warp_spec: four warps of their own load.
        use_tma: weights and their scales come by tensor maps.
        stream_k: the last wave's tiles are cut along K.
        ordered: sums of cut tiles are added in turn, so that a call repeated gives the same bits.
        late_as, split_wait: when Hopper's loop reads input scales, and whether it waits twice.
        reuse_stages: the output is staged in the memory of the inputs.
        raster: blocks of rows that are walked before the next columns.
        producer_unroll: stages of the loader's unrolled loop; 0: all.
        evict_first: weights leave the L2 cache first.
        pdl: the launch may start before its predecessor ended.
        num_sms: multiprocessors used; 0: all.
        batch_invariant: a row's result does not depend on the other rows.
    """

    wgmma: bool
    block: tuple[int, int, int]
    warp: tuple[int, int, int]
    stages: int
    ctas: int = 1
    warp_spec: bool = False
    use_tma: bool = False
    stream_k: bool = False
    ordered: bool = False
    late_as: bool = False
    split_wait: bool = False
    reuse_stages: bool = True
    raster: int = 1
    producer_unroll: int = 0
    evict_first: bool = False
    pdl: bool = False
    num_sms: int = 0
    batch_invariant: bool = False

    @property
    def math_threads(self) -> int:
        """Threads that multiply."""
        return 32 * (
            (self.block[0] // self.warp[0])
            * (self.block[1] // self.warp[1])
            * (self.block[2] // self.warp[2])
        )

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.math_threads + (128 if self.warp_spec else 0)
