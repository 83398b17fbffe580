"""The staging kernel on a GPU: bit for bit against `staging.stage`, and its time against a copy.

    PYTHONPATH=.:tests:tests/gpu:benchmarks/gpu python tests/gpu/check_staging.py [--quick]

JAX only computes what is expected, on the CPU; the launches go through the C++ launcher. Writes
staging.json and staging.md to $OUT. With the sgl source installed, its own staging kernels are
timed beside this package's. --quick compares fewer cases and times none.
"""

import argparse
import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import checks
import driver
import numpy as np
import staged
from staged import FORMS, Case, Form

from jax_megamoe import replica_map
from jax_megamoe.compile import MissingDependency, find_source
from jax_megamoe.launch import launcher
from jax_megamoe.plan.launch import LaunchPlan
from jax_megamoe.runtime import extension

ORDINAL = 0
WIDE = {"hidden_size": 7168, "intermediate_size": 2048}
TIMED = {"num_experts": 64, "top_k": 8, "max_num_tokens": 4096, **WIDE}
TIMED_TOKENS = (1, 64, 512, 4096)
SETS = 4  # of inputs and buffers, in turn: more bytes than the L2 cache keeps
ROUNDS = 10


def architecture() -> str:
    """What to compile for here, whatever GPU a format's kernels are for."""
    known, device = driver.cuda.CUdevice_attribute, driver.call("cuDeviceGet", ORDINAL)
    parts = (
        known.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        known.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    )
    numbers = [driver.call("cuDeviceGetAttribute", part, device) for part in parts]
    return "sm_{}{}a".format(*numbers)


class Staging:
    """A plan's staging step on inputs and a buffer of its own."""

    def __init__(self, plan: LaunchPlan, arrays: Mapping[str, np.ndarray]) -> None:
        (step,) = plan.steps
        kernel = dataclasses.replace(step.kernel, arch=architecture())
        plan = dataclasses.replace(plan, steps=(dataclasses.replace(step, kernel=kernel),))
        self.buffer = driver.Buffer(plan.buffer.num_bytes)
        self.buffer.fill(staged.PATTERN)
        self._copies = {name: driver.Buffer(array.nbytes) for name, array in arrays.items()}
        for name, array in arrays.items():
            if array.nbytes:
                place = self._copies[name].address
                driver.call("cuMemcpyHtoD", place, array.ctypes.data, array.nbytes)
        self._key = f"check_staging/{self.buffer.address:x}"
        base = self.buffer.address
        extension.module().register_symmetric_buffer(
            self._key, ORDINAL, base, [base] * staged.NUM_RANKS, 0, plan.buffer.num_bytes
        )
        operands = [name for name in arrays if name != "l2_alpha"]
        self._operands = [(self._copies[name].address, arrays[name].nbytes) for name in operands]
        self.alpha = self._copies["l2_alpha"]
        self._results = [(self.alpha.address, self.alpha.num_bytes)]
        self._program = launcher.program(plan, operands, ["l2_alpha"], buffer_key=self._key)
        self._program.prepare(ORDINAL, self._operands, self._results)

    def launch(self, stream: driver.Stream) -> None:
        """Puts the launch on a stream."""
        self._program.launch(ORDINAL, int(stream.handle), self._operands, self._results)

    def free(self) -> None:
        """Gives the memory back."""
        extension.module().unregister_symmetric_buffer(self._key, ORDINAL)
        for buffer in (self.buffer, *self._copies.values()):
            buffer.free()


def difference(case: Case) -> str:
    """Where the buffer on the GPU, or l2_alpha, differs from what is expected; empty if nowhere."""
    staging, stream = Staging(case.plan, case.arrays), driver.Stream()
    staging.launch(stream)
    stream.wait()
    got = staging.buffer.read((case.plan.buffer.num_bytes,), np.uint8)[case.start :]
    alpha = staging.alpha.read(case.l2_alpha.shape, np.float32)
    staging.free()
    found = staged.first_difference(got, case.want, case.plan.buffer)
    return found or ("" if np.array_equal(alpha, case.l2_alpha) else f"l2_alpha is {alpha}")


def cases(form: Form, quick: bool) -> dict[str, dict[str, Any]]:
    """What is compared of a form: arguments of `staged.hard_case` by name."""
    most = {"max_num_tokens": 4096}
    counts = (0, 7, 129) if quick else (0, 1, 7, 64, 129, 4096)
    found: dict[str, dict[str, Any]] = {
        f"{n} tokens": {"num_tokens": n, "mask": n != 7, **most} for n in counts
    }
    if quick:
        return found
    replicated = {"num_tokens": 129, "mask": True, "num_logical_experts": 5}
    replicas = replica_map(np.array([0, 1, 2, 3, 4, 2, 2, 4]), 5)
    found |= {
        "initial replicas": replicated,
        "a replica map": {**replicated, "eplb": replicas},
        "129 tokens of 7168": {"num_tokens": 129, **WIDE},
        "4096 tokens of 7168": {"num_tokens": 4096, "mask": True, **most, **WIDE},
    }
    if form.weight_format != "fp8_block":  # takes multiples of 512 only
        found["64 tokens of 2816"] = {"num_tokens": 64, "hidden_size": 2816}
    for height in (16, 64, 192, 240) if form.num_shared_experts else ():
        found[f"tiles of {height}"] = {"num_tokens": 129, "block_m": height}
    return found


def microseconds(launches: list[Callable[[driver.Stream], Any]]) -> float:
    """Device time of one of several launches in turn, from CUDA graphs of many."""
    stream = driver.Stream()

    def enqueue() -> None:
        for _ in range(ROUNDS):
            for launch in launches:
                launch(stream)

    return 1000 * stream.milliseconds(stream.capture(enqueue)) / (ROUNDS * len(launches))


def copy_microseconds(num_bytes: int) -> float:
    """Device time of a copy that reads and writes so many bytes together."""
    half = max(1, num_bytes // 2)
    pairs = [(driver.Buffer(half), driver.Buffer(half)) for _ in range(SETS)]

    def copy(target: driver.Buffer, source: driver.Buffer) -> Callable[[driver.Stream], Any]:
        places = (target.address, source.address, half)
        return lambda stream: driver.call("cuMemcpyDtoDAsync", *places, stream.handle)

    result = microseconds([copy(*pair) for pair in pairs])
    for buffer in (buffer for pair in pairs for buffer in pair):
        buffer.free()
    return result


def staging_microseconds(form: Form, num_tokens: int, staging_by: str) -> float | None:
    """Device time of a form's staging step; None where it is sgl's, which is not there."""
    try:
        plan = staged.plan_of(form, num_tokens, staging_by=staging_by, **TIMED)
        if staging_by == "source":
            find_source("sgl")
    except (MissingDependency, ValueError):
        return None
    layer, rng = staged.config(form, **TIMED), np.random.default_rng(0)
    shape, local = (num_tokens, layer.top_k), layer.num_experts // staged.NUM_RANKS
    arrays = {
        "x": staged.bf16_bits(rng.standard_normal((num_tokens, layer.hidden_size))),
        "topk_ids": rng.integers(0, layer.num_experts, shape).astype(np.int32),
        "topk_weights": rng.random(shape).astype(np.float32),
        "w2_weight_scale_2": np.ones(local, np.float32),
        "l2_alpha": np.zeros(local, np.float32),
    }
    stagings = [Staging(plan, arrays) for _ in range(SETS)]
    result = microseconds([staging.launch for staging in stagings])
    for staging in stagings:
        staging.free()
    return result


def moved_bytes(form: Form, num_tokens: int) -> int:
    """Bytes that staging must read and write: tokens, routing, and a row of each input region."""
    layer = staged.config(form, **TIMED)
    plan = staged.plan_of(form, num_tokens, staging_by="none", **TIMED)
    regions = [plan.buffer[name] for name in plan.unstaged]
    row = sum(region.num_bytes // region.shape[0] for region in regions)
    return num_tokens * (2 * layer.hidden_size + 8 * layer.top_k + row)


def timings() -> list[dict[str, Any]]:
    """Microseconds of every form and number of tokens, and bytes moved."""
    rows: list[dict[str, Any]] = []
    for form in FORMS:
        for num_tokens in TIMED_TOKENS:
            num_bytes = moved_bytes(form, num_tokens)
            rows.append(
                {
                    "form": str(form),
                    "tokens": num_tokens,
                    "bytes": num_bytes,
                    "us": staging_microseconds(form, num_tokens, "jax_megamoe"),
                    "us_sgl": staging_microseconds(form, num_tokens, "source"),
                    "us_copy": copy_microseconds(num_bytes),
                }
            )
            print(rows[-1], flush=True)
    return rows


def markdown(done: list[dict[str, Any]], rows: list[dict[str, Any]], rate: float) -> str:
    """Both results as a document; `rate` is of a large copy, bytes a second."""
    lines = [
        "# The staging kernel",
        "",
        f"`python tests/gpu/check_staging.py` on {driver.device_name()}, driver "
        f"{driver.driver_release()}: {sum(each['passed'] for each in done)} of {len(done)} buffers "
        "equal to `staging.stage`'s, every byte from the region `x` on.",
        "",
        "Microseconds of a launch inside a CUDA graph, for tokens of 7168 values with 8 experts "
        f"each, over {SETS} sets of inputs and buffers in turn; beside it sgl's own staging "
        "kernel, and a device-to-device copy that moves as many bytes, taken the same way. A copy "
        f"of 1 GiB moves {rate / 1e9:.0f} GB/s in the same run.",
        "",
        "| | tokens | MB moved | us | us, sgl's | us, copy | GB/s | of the 1 GiB copy |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        speed = row["bytes"] / row["us"] * 1e6
        sgl = "-" if row["us_sgl"] is None else f"{row['us_sgl']:.2f}"
        lines.append(
            f"| {row['form']} | {row['tokens']} | {row['bytes'] / 1e6:.2f} | {row['us']:.2f} | "
            f"{sgl} | {row['us_copy']:.2f} | {speed / 1e9:.0f} | {speed / rate:.0%} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Compares, measures, and writes what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    driver.use_device(ORDINAL)
    compared = checks.Checks("staging")
    for form in FORMS:
        for name, fields in cases(form, quick).items():
            found = difference(staged.hard_case(form, **fields))
            compared.check(not found, f"{form}, {name}", found)
    rows = [] if quick else timings()
    rate = driver.copy_rate()
    text = markdown(compared.done, rows, rate)
    (checks.OUT / "staging.md").write_text(text)
    print(text)
    compared.finish(timed=rows, copy_bytes_per_second=rate)


if __name__ == "__main__":
    main()
