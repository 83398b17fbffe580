"""The tensor-core instruction of one of Humming's grouped products, as the class that issues it."""

from jax_megamoe.plan.arithmetic import cpp_bool
from jax_megamoe.plan.grouped.product import BF16, E4M3, Element, Product, Tiles

MMA_TYPES = ("MMA", "WGMMA")
"""The kernel's names: mma.sync and Hopper's."""


def cpp_element(element: Element) -> str:
    """A number format as C++ text."""
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


def operation(product: Product, tiles: Tiles) -> str:
    """The class of the tensor-core instruction."""
    m, n, k = mma_shape(product, tiles)
    weight = element_b(product, tiles)
    mixed = native_mixed(product, tiles)
    kind = MMA_TYPES[tiles.wgmma]
    text = f"""\
struct Op {{
  using ElementB = {cpp_element(weight)};
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
