"""Tensor copies by TMA (PTX ISA 9.7.9, cp.async.bulk.tensor and cp.reduce.async.bulk.tensor)."""

from emulator.ptx.decode.bulk_copy import hint
from emulator.ptx.encoding import ATOMICS
from emulator.ptx.statement import CACHE_HINTS, Statement


def copy(s: Statement, *, reduce: bool = False) -> None:
    """``cp.async.bulk.tensor`` after these qualifiers."""
    if s.flag("prefetch"):
        s.qualifiers.clear()  # to the L2 cache: no effect
        s.operands.clear()
        return s.emit("Nop")
    dims = int(s.matching(r"([1-5])d")[1])
    hint(s)
    s.drop(CACHE_HINTS, "tile")
    spaces = [q for q in s.qualifiers if q in ("global", "shared::cta", "shared::cluster")]
    s.qualifiers = [q for q in s.qualifiers if q not in spaces]
    match spaces:
        case ["global", "shared::cta"]:
            mode2 = s.need(ATOMICS) + 1 if reduce else 0
            s.expect("bulk_group")
            tensor, coordinates = s.tensor()
            _check(s, dims, coordinates)
            src = [s.bare_address(), tensor, *coordinates]
            s.emit("TensorStore", src=src, mode=dims, mode2=mode2)
        case ["shared::cluster" | "shared::cta", "global"] if not reduce:
            s.expect("mbarrier::complete_tx::bytes")
            multicast = s.flag("multicast::cluster")
            pair = s.choice({"cta_group::1": 0, "cta_group::2": 1}, 0)
            to = s.bare_address()
            tensor, coordinates = s.tensor()
            _check(s, dims, coordinates)
            src = [to, s.bare_address(), tensor, *coordinates]
            src += [s.src()] if multicast else []
            s.emit("TensorLoad", src=src, mode=dims, mode2=int(multicast), flags=pair)
        case _:
            s.error("direction not supported")


def _check(s: Statement, dims: int, coordinates: list[int]) -> None:
    if len(coordinates) != dims:
        s.error(f"{dims} coordinates expected")
