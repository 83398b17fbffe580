"""A layer by grouped products, as one plan: sort and quantise, product, activation, product, sum.

Humming's products find rows by tables. DeepGEMM's of BF16 weights take rows in slots by expert, so
that a launch more copies tokens into slots. Rows that are too many for one block are sorted by two
launches.

Operands: ``x`` bfloat16 [T, H], ``topk_ids`` int32 [T, K], ``topk_weights`` float32 [T, K],
``padding_mask`` bool [T], ``logical_to_physical`` int32 [num_logical, R] with ``num_replicas``
int32 [num_logical], ``w13_weight``, ``w13_weight_scale``, ``w13_weight_scale_2``, ``w13_bias``
float32 [E, 2I] and the same of ``w2``, ``w2_input_scale`` float32 [1], ``stats`` int32 [E]; results
``y`` bfloat16 [T, H] and the plan's scratch. Nothing outlives the call, and nothing waits for the
host.
"""

from dataclasses import dataclass, replace

from jax_megamoe.formats import GROUPED_ROWS
from jax_megamoe.plan.arithmetic import align, ceil_div, cpp_bool
from jax_megamoe.plan.grouped import humming, tiles
from jax_megamoe.plan.grouped.product import Product, Tiles
from jax_megamoe.plan.grouped.rules import ROWS, SLOT_PRODUCTS
from jax_megamoe.plan.grouped.slots import Matrices
from jax_megamoe.plan.kernel import KernelSpec, LaunchConfig
from jax_megamoe.plan.launch import (
    Float32,
    KernelLaunch,
    LaunchPlan,
    Pointer,
    Uint32,
    optional,
)
from jax_megamoe.plan.operand import Operand
from jax_megamoe.plan.symmetric_buffer import BufferLayout

_HEADER = "grouped.cuh"
_WIDE_SORT = 256
_FEW_ROWS = 256
"""Up to so many rows the sorting block has a thread for each and no more: it starts sooner. More
than a block of `GroupedLayer.sort_threads` has are sorted by several."""
_THREADS, _COMBINE_THREADS = 256, 128


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
        stream_k: as `Tiles`; None: as `tiles.choose` says. Off by default: on an H200 a Qwen3-30B
            layer of FP8 activations takes 0.69 to 0.96 of the time without it up to 1,024 tokens
            (benchmarks/results/grouped_h200.json), and every sum keeps its order.
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
    stream_k: bool | None = False

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
        """Blocks that sort."""
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
        chosen = tiles.choose(self.product(w2), self.rows, self.num_sms, self.shared_memory)
        if self.stream_k is not None:
            chosen = replace(chosen, stream_k=self.stream_k, ordered=self.stream_k)
        return replace(chosen, pdl=self.overlaps)


def plan_grouped(layer: GroupedLayer) -> LaunchPlan:
    """The plan of a call with at least one token."""
    product = _slot_product if layer.in_slots else _product
    steps = [
        _group(layer),
        product(layer, w2=False),
        _activate(layer),
        product(layer, w2=True),
        _combine(layer),
    ]
    if layer.in_slots:
        steps.insert(1, _gather(layer))
    if layer.sorters > 1:
        steps.insert(1, _place(layer))
    scratch = (_slot_scratch if layer.in_slots else _scratch)(layer)
    if layer.sorters > 1:
        scratch = (("row_counts", (layer.sorters, layer.num_experts), "uint32"), *scratch)
    buffer = BufferLayout(0, 0, ())
    return LaunchPlan(tuple(steps), buffer, 1, layer.block_m, scratch=scratch)


_Scratch = tuple[tuple[str, tuple[int, ...], str], ...]


def _slot_scratch(layer: GroupedLayer) -> _Scratch:
    rows, slots = layer.rows, layer.slots
    hidden, inter = layer.hidden_size, layer.intermediate_size
    return (
        ("row_experts", (rows,), "int32"),
        ("row_slots", (rows,), "uint32"),
        ("expert_ends", (layer.num_experts,), "int32"),
        ("token_rows", (slots, hidden), "bfloat16"),
        ("h", (slots, 2 * inter), "bfloat16"),
        ("hidden_rows", (slots, inter), "bfloat16"),
        ("outputs", (slots, hidden), "bfloat16"),
    )


def _scratch(layer: GroupedLayer) -> _Scratch:
    rows, hidden, inter = layer.rows, layer.hidden_size, layer.intermediate_size
    arrays = [
        ("row_experts", (rows,), "int32"),
        ("sorted_ids", (layer.slots,), "uint32"),
        ("expert_ids", (layer.slots // layer.block_m,), "uint32"),
        ("num_slots", (1,), "uint32"),
        ("h", (rows, 2 * inter), "bfloat16"),
        ("outputs", (rows, hidden), "bfloat16"),
    ]
    if layer.cuts:
        arrays.append(("locks", (humming.num_locks(layer.num_sms),), "int32"))
    dtype = "float8_e4m3fn" if layer.activations == "fp8_block" else "bfloat16"
    arrays.append(("hidden_rows", (rows, inter), dtype))
    if layer.activations != "bf16":
        arrays.append(("token_rows", (layer.num_tokens, hidden), dtype))
    if layer.activations == "fp8_block":
        arrays.append(("token_scales", (layer.num_tokens, hidden // 128), "float32"))
        arrays.append(("hidden_scales", (rows, inter // 128), "float32"))
    if layer.activations == "nvfp4":
        arrays.append(("token_scales", (layer.num_tokens,), "float32"))
    return tuple(arrays)


def _pointer(name: str) -> Pointer:
    return Pointer(name, Operand(name))


def _own(
    layer: GroupedLayer, symbol: str, template: tuple[str, ...], types: tuple[str, ...]
) -> KernelSpec:
    """A kernel of this package's."""
    arch = humming.compiler_arch(layer.arch)
    return KernelSpec("jax_megamoe", arch, _HEADER, symbol, template, types)


def _group(layer: GroupedLayer) -> KernelLaunch:
    """The first blocks sort or count, the others quantise."""
    threads = layer.sort_threads
    kernel = _own(
        layer,
        "group_tokens",
        (
            str(layer.hidden_size),
            str(threads),
            f"Rows::{ROWS[layer.activations][0]}",
            str(layer.num_experts),
            str(layer.block_m),
        ),
        (
            *("const uint4*", "const int32_t*", "const bool*", "const int32_t*", "const int32_t*"),
            *("int32_t*", "uint32_t*", "uint32_t*", "uint32_t*", "uint32_t*", "int32_t*"),
            *("uint32_t*", "int32_t*", "int32_t*", "void*", "float*", *["uint32_t"] * 6),
        ),
    )
    mapped, quantises = layer.max_replicas > 0, layer.activations != "bf16"
    scaled = layer.activations in ("nvfp4", "fp8_block")
    vectors = layer.num_tokens * layer.hidden_size // 8
    blocks = layer.num_tokens if layer.activations == "nvfp4" else ceil_div(vectors, threads)
    sorts = layer.sorters == 1
    tables = ("sorted_ids", "expert_ids", "num_slots")
    arguments = (
        *map(_pointer, ("x", "topk_ids")),
        optional("padding_mask", "padding_mask", layer.padding_mask),
        optional("logical_to_physical", "logical_to_physical", mapped),
        optional("num_replicas", "num_replicas", mapped),
        _pointer("row_experts"),
        optional("row_counts", "row_counts", not sorts),
        *(optional(n, n, sorts and not layer.in_slots) for n in tables),
        optional("locks", "locks", layer.cuts),
        *(optional(n, n, sorts and layer.in_slots) for n in ("row_slots", "expert_ends")),
        optional("stats", "stats", sorts and layer.stats),
        optional("rows", "token_rows", quantises),
        optional("row_scales", "token_scales", scaled),
        Uint32("num_tokens", layer.num_tokens),
        Uint32("top_k", layer.top_k),
        Uint32("num_logical", layer.num_logical),
        Uint32("max_replicas", layer.max_replicas),
        Uint32("num_locks", humming.num_locks(layer.num_sms) * layer.cuts),
        Uint32("num_sorters", layer.sorters),
    )
    config = LaunchConfig((layer.sorters + blocks * quantises, 1, 1), (threads, 1, 1))
    return KernelLaunch(kernel, config, arguments)


def _place(layer: GroupedLayer) -> KernelLaunch:
    """Rows into the places that the counts of all blocks give them."""
    threads = layer.sort_threads
    kernel = _own(
        layer,
        "place_rows",
        (str(threads), str(layer.num_experts), str(layer.block_m), cpp_bool(layer.overlaps)),
        (
            *("const int32_t*", "const uint32_t*", *["uint32_t*"] * 4),
            *("int32_t*", "int32_t*", "uint32_t", "uint32_t"),
        ),
    )
    arguments = (
        *map(_pointer, ("row_experts", "row_counts")),
        *(optional(n, n, not layer.in_slots) for n in ("sorted_ids", "expert_ids", "num_slots")),
        *(optional(n, n, layer.in_slots) for n in ("row_slots", "expert_ends")),
        optional("stats", "stats", layer.stats),
        Uint32("num_rows", layer.rows),
        Uint32("num_sorters", layer.sorters),
    )
    config = LaunchConfig((layer.sorters, 1, 1), (threads, 1, 1))
    return KernelLaunch(
        kernel, replace(config, programmatic_serialization=layer.overlaps), arguments
    )


def _product(layer: GroupedLayer, *, w2: bool) -> KernelLaunch:
    name = "w2" if w2 else "w13"
    rows, scales = ("hidden_rows", "hidden_scales") if w2 else ("token_rows", "token_scales")
    if layer.activations == "bf16" and not w2:
        rows = "x"
    product = layer.product(w2)
    names = humming.Operands(
        a=rows,
        c="outputs" if w2 else "h",
        w=f"{name}_weight",
        w_scale=f"{name}_weight_scale",
        a_scale=scales if product.input.group else None,
        w_scale_2=None if product.second_scale == "none" else f"{name}_weight_scale_2",
    )
    launch = humming.launch(
        product,
        layer.tiles(w2),
        names,
        rows=layer.rows if w2 else layer.num_tokens,
        top_k=1 if w2 else layer.top_k,
        num_sms=layer.num_sms,
    )
    # It reads the tables before it waits for its predecessor, which makes them for the first; for
    # the second they are older than its predecessor's predecessor.
    early = w2 and layer.overlaps
    return replace(launch, config=replace(launch.config, programmatic_serialization=early))


def _gather(layer: GroupedLayer) -> KernelLaunch:
    """Tokens into the slots of their rows."""
    kernel = _own(
        layer,
        "gather_rows",
        (str(layer.hidden_size), str(_THREADS), cpp_bool(layer.overlaps)),
        ("const uint4*", "const int32_t*", "const uint32_t*", "uint4*", *["uint32_t"] * 2),
    )
    arguments = (
        *map(_pointer, ("x", "row_experts", "row_slots")),
        Pointer("rows", Operand("token_rows")),
        Uint32("num_rows", layer.rows),
        Uint32("top_k", layer.top_k),
    )
    vectors = layer.rows * layer.hidden_size // 8
    return KernelLaunch(kernel, _flat(vectors, _THREADS, layer.overlaps), arguments)


def _slot_product(layer: GroupedLayer, *, w2: bool) -> KernelLaunch:
    first, second = ("token_rows", "w13_weight", "h"), ("hidden_rows", "w2_weight", "outputs")
    names = second if w2 else first
    place = dict(rows=layer.rows, m=layer.block_m, slots=layer.slots, num_sms=layer.num_sms)
    launch = SLOT_PRODUCTS[layer.arch].launch
    return launch(layer.matrices(w2), names, **place, early=layer.overlaps)


def _activate(layer: GroupedLayer) -> KernelLaunch:
    early = layer.overlaps
    kernel = _own(
        layer,
        "activate_rows",
        (
            str(layer.intermediate_size),
            str(_THREADS),
            f"Rows::{ROWS[layer.activations][0]}",
            "Gated::kSitu" if layer.activation == "situ" else "Gated::kSwiglu",
            *map(cpp_bool, (layer.in_slots, layer.rounds, not layer.weighs_in_combine)),
            *map(cpp_bool, (layer.fast_math, early)),
        ),
        (
            *("const uint4*", "const int32_t*", "const uint32_t*", "const float*"),
            *("const float*", "const float4*"),
            *("const float*", "void*", "float*", "uint32_t", "uint32_t", "float", "float", "float"),
        ),
    )
    nvfp4, scaled = layer.activations == "nvfp4", layer.activations == "fp8_block"
    arguments = (
        *map(_pointer, ("h", "row_experts")),
        optional("row_slots", "row_slots", layer.in_slots),
        _pointer("topk_weights"),
        optional("token_scales", "token_scales", nvfp4),
        optional("bias", "w13_bias", layer.biases),
        optional("input_scale", "w2_input_scale", nvfp4),
        _pointer("hidden_rows"),
        optional("row_scales", "hidden_scales", scaled),
        Uint32("num_rows", layer.rows),
        Uint32("top_k", layer.top_k),
        Float32("clamp", -1.0 if layer.clamp is None else layer.clamp),
        Float32("alpha", layer.alpha),
        Float32("beta", layer.beta),
    )
    vectors = layer.rows * layer.intermediate_size // 8
    return KernelLaunch(kernel, _flat(vectors, _THREADS, early), arguments)


def _combine(layer: GroupedLayer) -> KernelLaunch:
    early = layer.overlaps
    kernel = _own(
        layer,
        "combine_rows",
        (
            str(layer.hidden_size),
            str(_COMBINE_THREADS),
            str(layer.top_k),
            *map(cpp_bool, (layer.weighs_in_combine, early)),
        ),
        (
            *("const uint4*", "const int32_t*", "const uint32_t*", "const float*"),
            *("const float4*", "uint4*", "uint32_t"),
        ),
    )
    arguments = (
        *map(_pointer, ("outputs", "row_experts")),
        optional("row_slots", "row_slots", layer.in_slots),
        _pointer("topk_weights"),
        optional("bias", "w2_bias", layer.biases),
        _pointer("y"),
        Uint32("num_tokens", layer.num_tokens),
    )
    vectors = layer.num_tokens * layer.hidden_size // 8
    return KernelLaunch(kernel, _flat(vectors, _COMBINE_THREADS, early), arguments)


def _flat(vectors: int, threads: int, early: bool) -> LaunchConfig:
    """A thread for each eight values."""
    grid = (ceil_div(vectors, threads), 1, 1)
    return LaunchConfig(grid, (threads, 1, 1), programmatic_serialization=early)
