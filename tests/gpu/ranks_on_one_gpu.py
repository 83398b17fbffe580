"""2 and 4 expert-parallel ranks in one process on one H200: bit-equal to one rank.

    PYTHONPATH=.:tests:tests/gpu:benchmarks/gpu python tests/gpu/ranks_on_one_gpu.py [--quick]

Each rank has a stream, a symmetric buffer and a share of the SMs, so that the kernels of all ranks
run at the same time and wait for each other as they do on several GPUs. Plans and launcher are
those of `mega_moe`; XLA, which runs one program at a time on a device, has no part in it.

As under `shard_map` every rank passes the same number of rows, and masks those that are no tokens.
Ranks that planned for different numbers of tokens ran different tiles on SM90: 505 and 7 tokens
came out within rounding of one rank but not bit-equal, and 512 and 0 did not end.
"""

import argparse
import faulthandler
import itertools
import os
from collections.abc import Iterator
from typing import NamedTuple

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # no stream queues behind another

import driver
import jax
import jax.numpy as jnp
import numpy as np
import workload
from checks import Checks
from jaxtyping import Array

import jax_megamoe as mm
from jax_megamoe.launch import launcher
from jax_megamoe.plan import plan_mega_moe
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.launch import LaunchPlan
from jax_megamoe.runtime import extension

CFG = workload.EXPERT_PARALLEL
TOKENS = (64, 512)
ORDINAL = 0
REPEATS = 20
SECONDS = 200
KINDS = ("even", "uneven", "idle")


def kept_rows(num_tokens: int, num_ranks: int, kind: str) -> tuple[int, ...]:
    """How many of each rank's rows are tokens; the rest is padding."""
    share = num_tokens // num_ranks
    kept = {"even": (share,) * 4, "uneven": (share, 7, 1, 5), "idle": (0, share, 0, 3)}
    return kept[kind][:num_ranks]


def padded(tokens: workload.Tokens, kept: tuple[int, ...]) -> workload.Tokens:
    """The same tokens, unrouted past the first `kept` rows of each rank's share."""
    x, ids, factors = tokens
    row = jnp.arange(len(x)).reshape(len(kept), -1) % (len(x) // len(kept))
    routed = (row < jnp.array(kept)[:, None]).reshape(-1, 1)
    return x, jnp.where(routed, ids, -1), factors


def share(num_ranks: int) -> DeviceSpec:
    """A rank's part of the device: an even number of SMs, as clusters are pairs."""
    return DeviceSpec(workload.H200.arch, workload.H200.num_sms // num_ranks // 2 * 2)


def loads(num_tokens: int) -> dict[str, workload.Tokens]:
    """Tokens and routings: random ones, and all to the experts of the last of 4 ranks."""
    x, ids, factors = workload.tokens(CFG, num_tokens)
    local = CFG.num_experts // 4
    column = jnp.arange(CFG.top_k, dtype=jnp.int32)[None]
    crowded = CFG.num_experts - 1 - (ids[:, :1] + column) % local
    holes = jnp.where(ids % 5 == 0, -1, ids)
    return {
        "random": (x, ids, factors),
        "all to the last": (x, crowded, factors),
        "unrouted slots": (x, holes, factors),
    }


class Output(NamedTuple):
    """y as BF16 bits, uint16 [T, H], and tokens of each expert, int32 [E]."""

    y: np.ndarray
    counts: np.ndarray


class Ranks:
    """Ranks that share the device, with their streams and symmetric buffers."""

    def __init__(self, num_ranks: int, device: DeviceSpec) -> None:
        """Allocates and registers.

        Args:
            num_ranks: the ranks.
            device: what each of them plans for.
        """
        self.num_ranks, self.device = num_ranks, device
        self._streams = [driver.Stream() for _ in range(num_ranks)]
        num_bytes = self.plan(0).buffer.num_bytes
        self._buffers = [driver.Buffer(num_bytes) for _ in range(num_ranks)]
        bases = [buffer.address for buffer in self._buffers]
        self._keys = [f"{num_ranks} x {device.num_sms} SMs, rank {r}" for r in range(num_ranks)]
        for rank, key in enumerate(self._keys):
            extension.module().register_symmetric_buffer(
                key, ORDINAL, bases[rank], bases, rank, num_bytes
            )

    def plan(self, num_tokens: int) -> LaunchPlan:
        """The plan of a rank with that many tokens."""
        return plan_mega_moe(CFG, self.device, num_tokens, self.num_ranks, "sgl", with_stats=True)

    def outputs(self, tokens: workload.Tokens, params: mm.ExpertWeights) -> Iterator[Output]:
        """The output of all ranks together, `REPEATS` times; ranks start in turned orders."""
        y = driver.Buffer(2 * tokens[0].size)
        counts = driver.Buffer(4 * CFG.num_experts)
        share = len(tokens[0]) // self.num_ranks
        calls = []
        for rank, key in enumerate(self._keys):
            rows = (rank * share, (rank + 1) * share)
            operands = {
                name: _rows(array, *rows)
                for name, array in zip(("x", "topk_ids", "topk_weights"), tokens, strict=True)
            }
            local = CFG.num_experts // self.num_ranks
            experts = (rank * local, (rank + 1) * local)
            operands |= {name: _rows(a, *experts) for name, a in params.routed.arrays().items()}
            width = 2 * CFG.hidden_size
            results = {
                "y": (y.address + rows[0] * width, share * width),
                "stats": (counts.address + 4 * experts[0], 4 * local),
            }
            program = launcher.program(
                self.plan(share), list(operands), list(results), buffer_key=key
            )
            calls.append((program, list(operands.values()), list(results.values())))
        for program, operands, results in calls:
            program.prepare(ORDINAL, operands, results)
        try:
            for repeat in range(REPEATS):
                y.fill(0xFF)
                counts.fill(0)
                for index in range(self.num_ranks):
                    rank = (index + repeat) % self.num_ranks
                    program, operands, results = calls[rank]
                    program.launch(ORDINAL, int(self._streams[rank].handle), operands, results)
                for stream in self._streams:
                    stream.wait()
                counted = counts.read((CFG.num_experts,), np.int32)
                yield Output(y.read(tokens[0].shape, np.uint16), counted)
        finally:
            y.free()
            counts.free()

    def close(self) -> None:
        """Forgets and frees the buffers."""
        for key, buffer in zip(self._keys, self._buffers, strict=True):
            extension.module().unregister_symmetric_buffer(key, ORDINAL)
            buffer.free()


def _rows(array: Array, start: int, end: int) -> tuple[int, int]:
    """Address and bytes of some rows of an array."""
    width = array.nbytes // array.shape[0]
    return array.unsafe_buffer_pointer() + start * width, (end - start) * width


def compare(
    checks: Checks,
    ranks: Ranks,
    tokens: workload.Tokens,
    params: mm.ExpertWeights,
    want: Output,
    what: str,
) -> None:
    """Checks bits and counts of every repeat against `want`; stops at the first that differs."""
    repeats = 0
    for found in ranks.outputs(tokens, params):
        repeats += 1
        if not (np.array_equal(found.y, want.y) and np.array_equal(found.counts, want.counts)):
            break
    checks.same_bits(found.y, want.y, f"{what}, {repeats} of {REPEATS} calls")
    same = np.array_equal(found.counts, want.counts)
    checks.check(same, f"{what}, counts", f"{found.counts.sum()} in all")


def main() -> None:
    """Compares one rank with `mega_moe`, and all other divisions with one rank."""
    parser = argparse.ArgumentParser(description="Several ranks on one GPU.")
    parser.add_argument("--quick", action="store_true", help="one number of tokens and load")
    quick = parser.parse_args().quick
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    checks = Checks("ranks_on_one_gpu")
    counts = TOKENS[:1] if quick else TOKENS
    plans = [
        plan_mega_moe(CFG, share(num_ranks), num_tokens // num_ranks, num_ranks, "sgl")
        for num_tokens in counts
        for num_ranks in (2, 4)
    ]
    alone = [share(num_ranks) for num_ranks in (1, 2, 4)]
    plans += [plan_mega_moe(CFG, device, t, 1, "sgl") for device in alone for t in counts]
    checks.check(True, "kernels", workload.compile_kernels(plans))
    params = workload.weights(CFG)
    driver.use_device(ORDINAL)
    ones = [Ranks(1, device) for device in alone]
    several = {num_ranks: Ranks(num_ranks, share(num_ranks)) for num_ranks in (2, 4)}
    layer = jax.jit(lambda *t: mm.mega_moe(*t, config=CFG, implementation="deep_gemm"))
    cells = [
        (f"{num_tokens} tokens, {load}", tokens)
        for num_tokens in counts
        for load, tokens in list(loads(num_tokens).items())[: 1 if quick else None]
    ]
    for what, tokens in cells:
        jax.block_until_ready((tokens, params))
        want = next(ones[0].outputs(tokens, params))
        jitted = jax.block_until_ready(layer(*tokens, params))
        checks.same_bits(want.y, jitted, f"{what}, one rank as mega_moe under jit")
        ids = np.asarray(tokens[1])
        counted = np.bincount(ids[ids >= 0], minlength=CFG.num_experts)
        checks.check(np.array_equal(want.counts, counted), f"{what}, counts of one rank")
        for one in ones:
            name = f"{what}, one rank on {one.device.num_sms} SMs"
            compare(checks, one, tokens, params, want, name)
    for (what, tokens), kind, num_ranks in itertools.product(cells, KINDS, (2, 4)):
        kept = kept_rows(len(tokens[0]), num_ranks, kind)
        rows = jax.block_until_ready(padded(tokens, kept))
        want = next(ones[0].outputs(rows, params))
        ranks = several[num_ranks]
        name = f"{what}, {num_ranks} ranks on {ranks.device.num_sms} SMs each, {kind} {kept}"
        compare(checks, ranks, rows, params, want, name)
    for ranks in (*ones, *several.values()):
        ranks.close()
    checks.finish()


if __name__ == "__main__":
    main()
