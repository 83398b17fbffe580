"""Integer and float32 arithmetic of the planners, and C++ text of template arguments."""

import math
import struct


def ceil_div(number: int, divisor: int) -> int:
    """`number` / `divisor`, rounded up."""
    return -(-number // divisor)


def align(number: int, multiple: int) -> int:
    """`number` rounded up to a multiple."""
    return ceil_div(number, multiple) * multiple


def float32(number: float) -> float:
    """`number` rounded to float32."""
    return struct.unpack("f", struct.pack("f", number))[0]


def cpp_bool(value: bool) -> str:
    """``true`` or ``false``."""
    return "true" if value else "false"


def cpp_float(value: float | None) -> str:
    """A float32 as an exact C++ hexadecimal literal; None means infinity."""
    if value is None or math.isinf(value):
        return "cute::numeric_limits<float>::infinity()"
    mantissa, exponent = float32(value).hex().split("p")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}p{exponent}f"
