"""One call of a layer of grouped products: its sizes, formats and options, and what follows from
them."""

from dataclasses import dataclass, replace

from jax_megamoe.formats import GROUPED_ROWS
from jax_megamoe.plan.arithmetic import align, ceil_div
from jax_megamoe.plan.grouped import humming, tiles
from jax_megamoe.plan.grouped.product import Product, Tiles
from jax_megamoe.plan.grouped.rules import ROWS, SLOT_PRODUCTS
from jax_megamoe.plan.grouped.slots import Matrices

_WIDE_SORT = 256
"""Up to so many experts the counts of 32 warps fit into shared memory; of more, those of 16."""
_FEW_ROWS = 256
"""Up to so many rows one block of so many threads sorts: a small block starts sooner."""


@dataclass(frozen=True, kw_only=True)
class GroupedLayer:
    """Sizes, formats and options of one call on one device.

    Attributes:
        arch: one of `product.KNOWN_ARCHS`.
        num_sms: multiprocessors.
        shared_memory: most bytes of a thread block; 0: the architecture's.
        num_experts: whose weights are here.
        num_logical: experts that topk_ids name.
        weights: weight format, a key of `product.WEIGHTS`, or ``"bf16"``.
        activations: activation format, a key of `rules.ROWS`.
        second_scales: of w13 and of w2: ``"none"``, ``"tensor"`` or ``"channel"``.
        biases: ``w13_bias`` and ``w2_bias`` are passed.
        activation: ``"swiglu"`` or ``"situ"``.
        clamp: None: no limit.
        rounds: gate and up are rounded to BF16 before the activation.
        weighs_in_combine: the top-k weight multiplies after the second product.
        padding_mask, stats: these operands are passed.
        max_replicas: width of ``logical_to_physical``; 0 without it.
        fast_math: approximate exp and reciprocal in the activation.
        early: launches overlap the ends of those before them, from Hopper on.
        stream_k: as `Tiles`; None: as `tiles` says.
    """

    arch: int
    num_sms: int
    num_tokens: int
    top_k: int
    num_experts: int
    num_logical: int
    hidden_size: int
    intermediate_size: int
    weights: str
    activations: str
    second_scales: tuple[str, str] = ("none", "none")
    biases: bool = False
    activation: str = "swiglu"
    clamp: float | None = None
    alpha: float = 1.0
    beta: float = 0.0
    rounds: bool = True
    weighs_in_combine: bool = False
    padding_mask: bool = False
    max_replicas: int = 0
    stats: bool = False
    shared_memory: int = 0
    fast_math: bool = True
    early: bool = True
    stream_k: bool | None = None

    @property
    def rows(self) -> int:
        """Of all tokens and slots."""
        return self.num_tokens * self.top_k

    @property
    def sort_threads(self) -> int:
        """Threads of a block that sorts, a row each."""
        if self.rows <= _FEW_ROWS:
            return _FEW_ROWS
        return 1024 if self.num_experts <= _WIDE_SORT else 512

    @property
    def sorters(self) -> int:
        """Blocks that sort: one, or as many as rows need."""
        return ceil_div(self.rows, self.sort_threads)

    @property
    def overlaps(self) -> bool:
        """Whether launches may start early."""
        return self.early and self.arch >= 90

    @property
    def cuts(self) -> bool:
        """Whether a product's tiles are cut along K, and its blocks meet at locks."""
        return not self.in_slots and any(self.tiles(w2).stream_k for w2 in (False, True))

    @property
    def in_slots(self) -> bool:
        """Whether rows lie in slots by expert: DeepGEMM's products, not Humming's."""
        return self.weights == "bf16"

    @property
    def block_m(self) -> int:
        """Rows of a block of both products."""
        if self.in_slots:
            both = self.matrices(w2=False), self.matrices(w2=True)
            return SLOT_PRODUCTS[self.arch].height(both, self.rows, self.num_sms)
        first, second = self.tiles(w2=False).block[0], self.tiles(w2=True).block[0]
        assert first == second
        return first

    @property
    def slots(self) -> int:
        """Most slots that the rows can take."""
        return humming.capacity(self.rows, self.num_experts, self.block_m)

    def matrices(self, w2: bool) -> Matrices:
        """BF16 weights of the first product, or of the second."""
        return Matrices(self.num_experts, *self._sizes(w2))

    def _sizes(self, w2: bool) -> tuple[int, int]:
        """Rows and columns of a matrix."""
        if w2:
            return self.hidden_size, self.intermediate_size
        return 2 * self.intermediate_size, self.hidden_size

    def product(self, w2: bool) -> Product:
        """The first product, or the second."""
        n, k = self._sizes(w2)
        padded = align(n, GROUPED_ROWS)
        return Product(
            arch=self.arch,
            weights=self.weights,
            inputs=ROWS[self.activations][1],
            num_experts=self.num_experts,
            n=padded,
            pad_n=padded - n,
            k=k,
            second_scale=self.second_scales[w2],
        )

    def tiles(self, w2: bool) -> Tiles:
        """Of a product, whose kernel lets its successor start early."""
        product = self.product(w2)
        chosen = tiles.choose(product, self.rows, self.num_sms, self.shared_memory)
        if self.stream_k is None:
            chosen = tiles.measured(product, chosen, self.rows, self.num_sms)
            # Parts of a cut sum are rounded to BF16, which moves codes of second inputs: up to 2 %
            # of the output in the emulator. Sums of FP8 inputs are cut where that was measured.
            if not w2 and product.inputs == "bf16" != self.activations:
                chosen = replace(chosen, stream_k=False, ordered=False)
        else:
            chosen = replace(chosen, stream_k=self.stream_k, ordered=self.stream_k)
        return replace(chosen, pdl=self.overlaps)
