"""What a KernelSpec may say, before its text reaches a compiler.

A spec need not come from this package's planner: it travels in custom calls, and those in exported
programs and compilation caches. What can be compiled of any spec is a kernel of a kernel source,
with numbers, names and types for arguments; no other text.
"""

import re
from pathlib import Path

from jax_megamoe._checks import message
from jax_megamoe.compile.errors import CompileError
from jax_megamoe.compile.sources import KernelSource
from jax_megamoe.plan.families.flashinfer_launch import WIDE_INTERMEDIATE
from jax_megamoe.plan.families.vllm_sm100_nvfp4 import SCALE_BY_POINTER
from jax_megamoe.plan.grouped import humming_unit
from jax_megamoe.plan.kernel import KernelSpec

_NAME = r"[A-Za-z_]\w*(?:::[A-Za-z_]\w*)*"
_TYPE = rf"(?:const |unsigned )*{_NAME}(?: long)*(?:<(?:{_NAME}|\d+)>)?(?: ?\*)?"
_NUMBER = r"-?(?:0x[0-9a-f]+(?:\.[0-9a-f]*)?p[-+]?\d+f?|\d+(?:\.\d*)?(?:e[-+]?\d+)?f?)"
_ARGUMENT = rf"{_NUMBER}|{_NAME}(?:<{_NAME}>(?:::{_NAME}\(\))?)?"
_FORMS = {
    "arch": r"sm_\d{2,3}[af]?",
    "header": r"(?:\w+/)*\w+\.cuh",
    "symbol": _NAME,
    "template_args": _ARGUMENT,
    "parameter_types": _TYPE,
    "unit": _ARGUMENT,
}
"""What each text of a spec must be, as a whole."""

_MACRO = re.compile(r"#define [A-Z][A-Z0-9_]* \d+\n")
_PRELUDES = ("", WIDE_INTERMEDIATE, SCALE_BY_POINTER)
"""What a prelude may hold beside macros that are numbers."""


def check_names(spec: KernelSpec, source: KernelSource) -> None:
    """Checks a spec's texts against their forms, and its header and symbol against the source.

    Args:
        spec: of any origin.
        source: the kernel source that it names.

    Raises:
        CompileError: names the text and what it may be.
    """
    if wrong := fault(spec):
        raise wrong
    header = source.include_dir / spec.header
    if not header.is_file():
        raise _refusal("header", f"a file of {source.include_dir}", repr(spec.header))
    if not _declares(header, spec.symbol):
        raise _refusal("symbol", f"a name in {header}", repr(spec.symbol))


def fault(spec: KernelSpec) -> CompileError | None:
    """The first text of a spec that has not its form; no source is looked at."""
    for field, form in _FORMS.items():
        value = getattr(spec, field)
        for text in (value,) if isinstance(value, str) else value:
            if not re.fullmatch(form, text, re.ASCII):
                return _refusal(field, f"text of the form {form}", repr(text))
    if _MACRO.sub("", spec.prelude) not in _PRELUDES:
        return _refusal("prelude", "macros that are numbers", repr(spec.prelude))
    try:
        _ = spec.unit and humming_unit.decoded(spec.unit)
    except ValueError:
        return _refusal("unit", "a product and its tiles", repr(spec.unit))
    return None


def _declares(header: Path, symbol: str) -> bool:
    text = header.read_text(encoding="utf-8", errors="replace")
    return re.search(rf"\b{re.escape(symbol)}\b", text) is not None


def _refusal(field: str, expected: str, got: str) -> CompileError:
    hint = "the plan is not one of this version of jax_megamoe: do not run it"
    return CompileError(message(f"kernel specification, {field}", expected, got, hint))
