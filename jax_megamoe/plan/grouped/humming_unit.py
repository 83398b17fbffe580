"""The translation unit of one of Humming's grouped products, as data.

Humming's kernel is one template whose arguments are four classes of constants, and whose headers
ask for some of the same values as macros. Everything here follows from a `Product` and its `Tiles`.
"""

from jax_megamoe.plan.arithmetic import cpp_bool
from jax_megamoe.plan.grouped.humming_memory import shared_memory
from jax_megamoe.plan.grouped.product import BF16, E4M3, Element, Product, Tiles

_MMA_TYPES = ("MMA", "WGMMA")
_REUSE_NONE, _REUSE_ALL = 0, 2
_MAX_REGISTERS = 248
_REGISTERS_OF_SM = 65536

Constants = dict[str, int | bool | str]
"""Name and value of `static constexpr` members; text is C++."""


def header(tiles: Tiles) -> str:
    """The kernel's header: with warps that only load, or without."""
    return f"humming/kernel/humming{'_ws' if tiles.warp_spec else ''}.cuh"


def layer_constants(product: Product, tiles: Tiles) -> Constants:
    """Members of the class that says what is multiplied.

    kSmVersion is no architecture to the headers on Hopper: it decides how the parts of a tile cut
    along K are added, at 90 by atomics in any order, at 80 in turn.
    """
    weight, inputs = product.weight, product.input
    tensor, channel = product.second_scale == "tensor", product.second_scale == "channel"
    scaled = inputs.element is not BF16
    return {
        "kSmVersion": 80 if tiles.ordered and product.arch == 90 else product.arch,
        "kShapeN": product.n,
        "kNumExperts": product.num_experts,
        "kInputScaleGroupSize": inputs.group,
        "kWeightScaleGroupSize": weight.group,
        "kWeightScaleGroupSizeN": weight.group_n,
        "kUseIntWeightScale": False,
        "kUseFusedE8m0Scale": product.fused,
        "kHasZeroPoint": False,
        "kIsFpZeroPoint": False,
        "kHasBias": product.has_bias,
        "kUsePackedKLayout": product.packed_k,
        "kIsChannelWeightScale": False,
        "kIsBlockWeightScale": weight.group_n > 0,
        "kIsGroupWeightScale": weight.group_n == 0,
        "kIsChannelWeightScale2": channel,
        "kIsTensorWeightScale2": tensor,
        "kHasChannelWeightScale": channel,
        "kHasTensorWeightScale": tensor,
        "kHasInputScale": scaled,
        "kHasInputScale2": False,
        "kIsGroupInputScale": scaled and inputs.group > 0,
        "kIsTensorInputScale": False,
        "kIsTensorInputScale2": False,
        "kUseRawWeight": False,
        "kUseFlatWeight": product.flat,
        "kUseLdmatrixDequant": False,
        "kUseNativeDequant": False,
        "kUseBlockScaledMma": False,
        "kMmaScaleGroupSize": max(weight.group, inputs.group),
    }


def compute_constants(tiles: Tiles) -> Constants:
    """Members of the class that says where rows and experts come from: tables of indices."""
    return {
        "kUseBatchInvariant": tiles.batch_invariant,
        "kUseMMajorInputScale": False,
        "kGemmType": "GemmType::INDEXED",
        "kIsIndexedGemm": True,
        "kIsGroupedGemm": False,
        "kIsGroupedContiguousGemm": False,
        "kIsGroupedMaskedGemm": False,
    }


def tuning_constants(product: Product, tiles: Tiles) -> Constants:
    """Members of the class that says how."""
    maps = tensor_maps(product, tiles)
    constants: Constants = {
        "kMmaType": f"MmaType::{_MMA_TYPES[tiles.wgmma]}",
        "kUseStreamK": tiles.stream_k,
        "kWgmmaUseLateAS": tiles.late_as,
        "kWgmmaSplitIssueWait": tiles.split_wait,
        "kNumStages": tiles.stages,
        "kProducerStageUnroll": tiles.producer_unroll or tiles.stages,
        "kConsumerStageUnroll": tiles.stages,
        "kNumCtasPerSm": tiles.ctas,
        "kUmmaNumDequantWarpgroups": 1,
        "kUmmaCtaGroupSize": 1,
        "kUmmaSplitAsyncLoads": False,
        "kOutputChunkRows": 0,
        "kUseWarpSpec": tiles.warp_spec,
        "kUseTma": tiles.use_tma,
        **{f"kUseTma{name}": name in maps for name in MAP_NAMES},
        "kSmemReuseMode": f"SmemReuseMode::{'ALL_STAGES' if tiles.reuse_stages else 'NONE'}",
        "kMultiCastSizeA": 1,
        "kMultiCastSizeB": 1,
        "kUsePdl": tiles.pdl,
        "kRasterGroupM": tiles.raster,
        "kEvictWeightsFirst": tiles.evict_first,
        "kUseUmmaSs": False,
        "kNumThreads": tiles.threads,
        "kNumMathThreads": tiles.math_threads,
        "kNumLoadThreads": 128 if tiles.warp_spec else tiles.threads,
    }
    if tiles.warp_spec:
        producer, consumer = _registers(product, tiles)
        constants |= {"kProducerRegisters": producer, "kConsumerRegisters": consumer}
    return constants


MAP_NAMES = ("A", "AS", "AS2", "B", "C", "BS", "BS2", "BZP", "Bias")


def tensor_maps(product: Product, tiles: Tiles) -> tuple[str, ...]:
    """Which parameters are tensor maps: constant weights, their scales by group, and biases."""
    if not tiles.use_tma:
        return ()
    scales = ("BS",) if product.weight.group_n == 0 else ()
    return ("B", *scales, *(("Bias",) if product.has_bias else ()))


def _registers(product: Product, tiles: Tiles) -> tuple[int, int]:
    """Of a thread that loads and of one that multiplies: what is left of the block's share."""
    share = _REGISTERS_OF_SM // (tiles.threads * tiles.ctas) // 8 * 8
    wide = tiles.ctas == 1 and product.input.element.bits != BF16.bits
    producer = 40 if wide or tiles.math_threads > 256 else 24
    left = (share * tiles.threads - producer * 128) // tiles.math_threads // 8 * 8
    return producer, min(_MAX_REGISTERS, left)


_MACROS = {
    "MMA_TYPE_ID": lambda t: int(t.wgmma),
    "USE_WARP_SPEC": lambda t: int(t.warp_spec),
    "USE_TMA": lambda t: int(t.use_tma),
    "SMEM_REUSE_MODE_ID": lambda t: _REUSE_ALL if t.reuse_stages else _REUSE_NONE,
    "RASTER_GROUP_M": lambda t: t.raster,
}
_COPIED = {
    "USE_TMA_C": "kUseTmaC",
    "OUTPUT_CHUNK_ROWS": "kOutputChunkRows",
    "USE_UMMA_SS": "kUseUmmaSs",
    "IS_INDEXED_GEMM": "kIsIndexedGemm",
    "IS_GROUPED_GEMM": "kIsGroupedGemm",
    "IS_GROUPED_CONTIGUOUS_GEMM": "kIsGroupedContiguousGemm",
    "IS_CHANNEL_WEIGHT_SCALE": "kIsChannelWeightScale",
    "IS_CHANNEL_WEIGHT_SCALE_2": "kIsChannelWeightScale2",
    "IS_GROUP_WEIGHT_SCALE": "kIsGroupWeightScale",
    "WEIGHT_SCALE_GROUP_SIZE": "kWeightScaleGroupSize",
    "IS_GROUP_INPUT_SCALE": "kIsGroupInputScale",
    "INPUT_SCALE_GROUP_SIZE": "kInputScaleGroupSize",
    "HAS_INPUT_SCALE": "kHasInputScale",
    "HAS_INPUT_SCALE_2": "kHasInputScale2",
    "IS_TENSOR_INPUT_SCALE": "kIsTensorInputScale",
    "IS_TENSOR_INPUT_SCALE_2": "kIsTensorInputScale2",
    "HAS_ZERO_POINT": "kHasZeroPoint",
    "HAS_BIAS": "kHasBias",
    "USE_BLOCK_SCALED_MMA": "kUseBlockScaledMma",
}


# What nvcc includes by itself, and all that the headers use of cuda.h, which NVRTC cannot read: it
# includes the C library's.
_NVRTC = """\
#ifdef __CUDACC_RTC__
#include <type_traits>
#define __cuda_cuda_h__
struct alignas(128) CUtensorMap {
  unsigned long long opaque[16];
};
#endif
"""


def prelude(product: Product, tiles: Tiles) -> str:
    """The macros that lay out the kernel's shared memory. One that is missing counts as 0 and moves
    everything behind it, without a word of the compiler."""
    constants = layer_constants(product, tiles) | compute_constants(tiles)
    constants |= tuning_constants(product, tiles)
    values = {name: value(tiles) for name, value in _MACROS.items()}
    values |= {name: int(constants[constant]) for name, constant in _COPIED.items()}
    values |= {f"BLOCK_SHAPE_{axis}": size for axis, size in zip("MNK", tiles.block, strict=True)}
    values |= {"USE_NATIVE_LDMATRIX_DEQUANT": 0, "DEBUG_KERNEL": 0}
    defines = (f"#define HUMMING_{name} {value}\n" for name, value in values.items())
    return _NVRTC + "".join(defines)


def declarations(product: Product, tiles: Tiles) -> str:
    """The four classes, and a check that the kernel's shared memory is as large as planned."""
    classes = {
        "Layer": layer_constants(product, tiles),
        "Compute": compute_constants(tiles),
        "Tuning": tuning_constants(product, tiles),
    }
    texts = [_operation(product, tiles)]
    for name, constants in classes.items():
        members = "".join(
            f"  static constexpr auto {n} = {cpp(v)};\n" for n, v in constants.items()
        )
        texts.append(f"struct {name} {{\n{members}}};\n")
    op, _, block, warp, _, a, w, _, scale, *rest = template_args(product, tiles)
    storage = f"SharedStorage<{', '.join((op, block, warp, a, w, scale, *rest))}>"
    complaint = "its shared memory is not what jax_megamoe plans: a macro is missing or renamed"
    planned = shared_memory(product, tiles)
    texts.append(f'static_assert(sizeof({storage}) == {planned}, "humming: {complaint}");\n')
    return "\n".join(texts)


def cpp(value: int | bool | str) -> str:
    """A constant as C++ text."""
    if isinstance(value, bool):
        return cpp_bool(value)
    return value if isinstance(value, str) else f"{value}u"


def template_args(product: Product, tiles: Tiles) -> tuple[str, ...]:
    """Arguments of the kernel's template."""
    weight = product.weight
    elements = (product.input.element, weight.element, BF16, weight.scale)
    return (
        "Op",
        f"Shape<0, {product.n}, {product.k}>",
        "Shape<{}, {}, {}>".format(*tiles.block),
        "Shape<{}, {}, {}>".format(*tiles.warp),
        f"Shape<0, {product.pad_n}, {product.pad_k}>",
        *map(_element, elements),
        *("Layer", "Compute", "Tuning"),
    )


def _element(element: Element) -> str:
    return f"FloatingPointType<{element.bits}, {element.exponent}, {element.mantissa}>"


def native_mixed(product: Product, tiles: Tiles) -> bool:
    """Whether the tensor core itself multiplies E4M3 by E2M1: SM120, in whole tiles of 16 rows."""
    mixed = product.weight.element.bits < product.input.element.bits == E4M3.bits
    whole = tiles.warp[0] % 16 == 0
    return mixed and not product.fused and product.arch // 10 == 12 and whole


def mma_shape(product: Product, tiles: Tiles) -> tuple[int, int, int]:
    """Rows of tokens, columns and depth of one instruction. Hopper's has the tokens as its second
    size, and mma.sync with eight rows too, where the operands are BF16."""
    bits = product.input.element.bits
    if tiles.wgmma:
        return tiles.warp[0], 64, 256 // bits
    if tiles.warp[0] % 16 == 0:
        return 16, 8, 256 // bits
    return (8, 16, 16) if bits == BF16.bits else (8, 8, 128 // bits)


def element_b(product: Product, tiles: Tiles) -> Element:
    """What the tensor core sees of a weight."""
    same = product.flat or native_mixed(product, tiles)
    return product.weight.element if same else product.input.element


def _operands(first: int, count: int) -> str:
    return "{" + ", ".join(f"%{i}" for i in range(first, first + count)) + "}"


def _bound(constraint: str, name: str, count: int) -> str:
    return ", ".join(f'"{constraint}"({name}[{i}])' for i in range(count))


def _operation(product: Product, tiles: Tiles) -> str:
    """The class of the tensor-core instruction."""
    m, n, k = mma_shape(product, tiles)
    weight = element_b(product, tiles)
    mixed = native_mixed(product, tiles)
    kind = _MMA_TYPES[tiles.wgmma]
    text = f"""\
struct Op {{
  using ElementB = {_element(weight)};
  static constexpr MmaType kMmaType = MmaType::{kind};
  using MmaShape = Shape<{m}, {n}, {k}>;
  using ValTypeC = float;
  using ValTypeD = float;
  static constexpr uint32_t kATypeBits = {product.input.element.bits};
  static constexpr uint32_t kBTypeBits = {weight.bits};
  static constexpr uint32_t kCTypeBits = 32;
  static constexpr uint32_t kDTypeBits = 32;
  static constexpr bool kNativeMixed = {cpp_bool(mixed)};
"""
    body = _wgmma(product, weight, m, k) if tiles.wgmma else _mma(product, weight, (m, n, k), mixed)
    return f"{text}{body}}};\n"


def _wgmma(product: Product, weight: Element, rows: int, depth: int) -> str:
    """Weights are the first operand, from registers or by a descriptor; tokens the second."""
    sums, words = rows * 64 // 128, 64 * depth * weight.bits // 4096
    name = f"wgmma.mma_async.sync.aligned.m64n{rows}k{depth}.f32"
    name += f".{weight.ptx}.{product.input.element.ptx}"
    # Scales of the operands, and for BF16 which of them in shared memory are transposed.
    by_register, by_descriptor = ("1, 1, 0", "1, 1, 0, 0") if weight is BF16 else ("1, 1", "1, 1")

    def fma(first: str, operand: str, bound: str, count: int, modes: str) -> str:
        return f"""\
  CUDA_INLINE static void fma(uint64_t& tokens, {first}, float* d, bool add = true) {{
    asm volatile(
        "{{.reg .pred p; setp.ne.b32 p, %{sums + count + 1}, 0; "
        "{name} {_operands(0, sums)}, {operand}, %{sums + count}, p, {modes};}}"
        : {_bound("+f", "d", sums)}
        : {bound}, "l"(tokens), "r"(static_cast<uint32_t>(add)));
  }}
"""

    registers = fma(
        "uint32_t* w", _operands(sums, words), _bound("r", "w", words), words, by_register
    )
    descriptor = fma("uint64_t& weights", f"%{sums}", '"l"(weights)', 1, by_descriptor)
    types = f"""\
  using BRegisters = uint32_t[{words}];
  using CRegisters = float[{sums}];
  using DRegisters = float[{sums}];
"""
    return types + registers + descriptor


def _mma(product: Product, weight: Element, shape: tuple[int, int, int], mixed: bool) -> str:
    """Tokens are the first operand; of eight of them the second, of the transposed product."""
    m, n, k = shape
    bits = product.input.element.bits
    # A value of mixed operands takes a byte, whatever its bits.
    wide = E4M3.bits if mixed else weight.bits
    first, second, sums = m * k * bits // 1024, n * k * wide // 1024, m * n // 32
    types = f"{product.input.element.ptx}.{weight.ptx}"
    accumulators = _operands(0, sums)
    if m == 8 and bits == BF16.bits:
        order = (0, 2, 1, 3)
        weights = "{" + ", ".join(f"%{sums + first + i}" for i in order) + "}"
        operands = f"{weights}, {_operands(sums, first)}"
        name = (
            f"mma.sync.aligned.m16n8k{k}.row.col.f32.{weight.ptx}.{product.input.element.ptx}.f32"
        )
    else:
        operands = f"{_operands(sums, first)}, {_operands(sums + first, second)}"
        kind = ".kind::f8f6f4" if mixed else ""
        name = f"mma.sync.aligned{kind}.m{m}n{n}k{k}.row.col.f32.{types}.f32"
    copies = " ".join(f"d[{i}] = c[{i}];" for i in range(sums))
    return f"""\
  using ARegisters = uint32_t[{first}];
  using BRegisters = uint32_t[{second}];
  using CRegisters = float[{sums}];
  using DRegisters = float[{sums}];
  CUDA_INLINE static void fma(uint32_t* a, uint32_t* b, float* c, float* d) {{
    {copies}
    asm volatile(
        "{name} {accumulators}, {operands}, {accumulators};"
        : {_bound("+f", "d", sums)}
        : {_bound("r", "a", first)}, {_bound("r", "b", second)});
  }}
"""
