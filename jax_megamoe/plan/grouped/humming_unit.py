"""The translation unit of one of Humming's grouped products, as data.

Humming's kernel is one template whose arguments are four classes of constants, and whose headers
ask for some of the same values as macros. Everything here follows from a `Product` and its `Tiles`.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from jax_megamoe._checks import message
from jax_megamoe.plan.arithmetic import cpp_bool
from jax_megamoe.plan.grouped.humming_instruction import MMA_TYPES, cpp_element, operation
from jax_megamoe.plan.grouped.humming_memory import shared_memory
from jax_megamoe.plan.grouped.product import (
    BF16,
    INPUTS,
    WEIGHTS,
    Product,
    Tiles,
)

Unit = tuple[str, ...]
"""A product and its tiles as numbers and names, in the order of their fields."""


def encoded(product: Product, tiles: Tiles) -> Unit:
    """The fields as text: what a `KernelSpec` carries of them."""
    values = (*_values(product), *_values(tiles))
    return tuple(cpp_bool(v) if isinstance(v, bool) else str(v) for v in values)


def _values(fields_of: Product | Tiles) -> Iterator[int | str | bool]:
    for field in fields(fields_of):
        value = getattr(fields_of, field.name)
        yield from value if isinstance(value, tuple) else (value,)


def decoded(unit: Unit) -> tuple[Product, Tiles]:
    """The inverse of `encoded`.

    Raises:
        ValueError: `unit` is not what `encoded` makes.
    """
    words = iter(unit)
    try:
        product: Product = _read(Product, words)
        tiles: Tiles = _read(Tiles, words)
        if product.weights in WEIGHTS and product.inputs in INPUTS:
            if encoded(product, tiles) == unit:
                return product, tiles
    except (KeyError, StopIteration, ValueError):
        pass
    raise ValueError(message("unit", "a product and its tiles", repr(unit)))


def _read(kind: type[Product] | type[Tiles], words: Iterator[str]) -> Any:
    return kind(**dict([(each.name, _decoded(str(each.type), words)) for each in fields(kind)]))


def _decoded(kind: str, words: Iterator[str]) -> Any:
    """A field's value, by its type: a number, a flag, a name or three numbers."""
    if kind.startswith("tuple") or "tuple[int, int, int]" in kind:
        return int(next(words)), int(next(words)), int(next(words))
    word = next(words)
    if "bool" in kind:
        return {"true": True, "false": False}[word]
    return word if "str" in kind else int(word)


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
        "kMmaType": f"MmaType::{MMA_TYPES[tiles.wgmma]}",
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
    values = {
        "MMA_TYPE_ID": int(tiles.wgmma),
        "USE_WARP_SPEC": int(tiles.warp_spec),
        "USE_TMA": int(tiles.use_tma),
        "SMEM_REUSE_MODE_ID": _REUSE_ALL if tiles.reuse_stages else _REUSE_NONE,
        "RASTER_GROUP_M": tiles.raster,
    }
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
    texts = [operation(product, tiles)]
    for name, constants in classes.items():
        members = "".join(
            f"  static constexpr auto {n} = {cpp(v)};\n" for n, v in constants.items()
        )
        texts.append(f"struct {name} {{\n{members}}};\n")
    texts += [f"using {name} = {text};" for name, text in types(product, tiles).items()]
    storage = "SharedStorage<Op, Block, Warp, Rows, Stored, Scale, Layer, Compute, Tuning>"
    complaint = "its shared memory is not what jax_megamoe plans: a macro is missing or renamed"
    planned = shared_memory(product, tiles)
    texts.append(f'static_assert(sizeof({storage}) == {planned}, "humming: {complaint}");\n')
    return "\n".join(texts)


def cpp(value: int | bool | str) -> str:
    """A constant as C++ text."""
    if isinstance(value, bool):
        return cpp_bool(value)
    return value if isinstance(value, str) else f"{value}u"


TEMPLATE_ARGS = (
    *("Op", "Problem", "Block", "Warp", "Padding", "Rows", "Stored", "Output", "Scale"),
    *("Layer", "Compute", "Tuning"),
)
"""Arguments of the kernel's template: names of `declarations`."""


def types(product: Product, tiles: Tiles) -> dict[str, str]:
    """Shapes and number formats by name."""
    weight = product.weight
    return {
        "Problem": f"Shape<0, {product.n}, {product.k}>",
        "Block": "Shape<{}, {}, {}>".format(*tiles.block),
        "Warp": "Shape<{}, {}, {}>".format(*tiles.warp),
        "Padding": f"Shape<0, {product.pad_n}, {product.pad_k}>",
        "Rows": cpp_element(product.input.element),
        "Stored": cpp_element(weight.element),
        "Output": cpp_element(BF16),
        "Scale": cpp_element(weight.scale),
    }
