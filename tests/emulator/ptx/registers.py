"""Gives registers that are never live together one place, so that a warp has fewer bytes.

Liveness is computed over basic blocks; a register keeps its place from its first to its last live
instruction. The interpreter knows places only.
"""

import heapq
from collections.abc import Iterator

import numpy as np

from emulator.ptx.encoding import OPS

_BRANCH, _INDEXED = OPS["Branch"], OPS["BranchIndexed"]
_ENDS = {OPS["Return"], OPS["Trap"]}


class _Code:
    """Uses, definitions and successors of each instruction; registers as bits of an int."""

    def __init__(self, instructions: np.ndarray, pool: list[int]) -> None:
        self.size = len(instructions)
        self.uses, self.definitions, self.kills = [], [], []
        self.successors: list[tuple[int, ...]] = []
        columns = zip(
            *(
                instructions[n].tolist()
                for n in ("op", "num_dst", "num_src", "dst", "src", "predicate", "target")
            ),
            strict=True,
        )
        for i, (op, num_dst, num_src, dst, src, predicate, target) in enumerate(columns):
            sources = 1 if op == _INDEXED else num_src  # the rest are branch targets
            use = _bits(pool[src : src + sources])
            definition = _bits(pool[dst : dst + num_dst])
            always = predicate < 0
            self.uses.append(use if always else use | 1 << predicate)
            self.definitions.append(definition)
            self.kills.append(definition if always else 0)
            following = (i + 1,) if i + 1 < self.size else ()
            if op == _BRANCH:
                following = (target, *(() if always else following))
            elif op == _INDEXED:
                following = (*pool[src + 1 : src + num_src], *(() if always else following))
            elif op in _ENDS and always:
                following = ()
            self.successors.append(following)

    def blocks(self) -> list[tuple[int, int]]:
        """First and one past the last instruction of each basic block."""
        leaders = {0}
        for i, successors in enumerate(self.successors):
            if successors != (i + 1,):
                leaders.update((*successors, i + 1))
        starts = sorted(x for x in leaders if x < self.size)
        return list(zip(starts, [*starts[1:], self.size], strict=True))

    def live_out(self, blocks: list[tuple[int, int]]) -> list[int]:
        """What is live after each block."""
        index = {start: b for b, (start, _) in enumerate(blocks)}
        gen, kill = [], []
        for start, end in blocks:
            needed = killed = 0
            for i in range(end - 1, start - 1, -1):
                needed = self.uses[i] | (needed & ~self.kills[i])
                killed |= self.kills[i]
            gen.append(needed)
            kill.append(killed)
        live_in, out = [0] * len(blocks), [0] * len(blocks)
        changed = True
        while changed:
            changed = False
            for b in range(len(blocks) - 1, -1, -1):
                out[b] = 0
                for target in self.successors[blocks[b][1] - 1]:
                    out[b] |= live_in[index[target]]
                new = gen[b] | (out[b] & ~kill[b])
                changed |= new != live_in[b]
                live_in[b] = new
        self.live_in = live_in
        return out


def compact(instructions: np.ndarray, pool: list[int], num_registers: int) -> int:
    """Rewrites the operand pool and predicates to places; returns how many there are."""
    code = _Code(instructions, pool)
    first, last = [code.size] * num_registers, [-1] * num_registers
    blocks = code.blocks()
    for (start, end), out, into in zip(blocks, code.live_out(blocks), code.live_in, strict=True):
        touched = [(out, end - 1), (into, start)]
        touched += [(code.uses[i] | code.definitions[i], i) for i in range(start, end)]
        for mask, i in touched:
            for register in _each(mask):
                first[register] = min(first[register], i)
                last[register] = max(last[register], i)
    place, count = _places(first, last)
    for inst in instructions:
        op, num_dst, num_src, dst, src, predicate = (
            int(inst[n]) for n in ("op", "num_dst", "num_src", "dst", "src", "predicate")
        )
        sources = 1 if op == _INDEXED else num_src
        for j in (*range(dst, dst + num_dst), *range(src, src + sources)):
            if pool[j] >= 0:
                pool[j] = place[pool[j]]
        if predicate >= 0:
            inst["predicate"] = place[predicate]
    return count


def _places(first: list[int], last: list[int]) -> tuple[dict[int, int], int]:
    """A place for each register that occurs, by linear scan; and their number."""
    place: dict[int, int] = {}
    free: list[int] = []
    active: list[tuple[int, int]] = []
    count = 0
    for r in sorted((r for r, end in enumerate(last) if end >= 0), key=first.__getitem__):
        while active and active[0][0] < first[r]:
            free.append(heapq.heappop(active)[1])
        if free:
            slot = free.pop()
        else:
            slot, count = count, count + 1
        place[r] = slot
        heapq.heappush(active, (last[r], slot))
    return place, count


def _bits(registers: list[int]) -> int:
    mask = 0
    for register in registers:
        if register >= 0:
            mask |= 1 << register
    return mask


def _each(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
