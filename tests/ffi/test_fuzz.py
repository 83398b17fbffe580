"""Mutated plans: what C++ accepts stays inside its arrays, what it refuses it names.

Run under sanitizers by `.ci/run`, where reading a byte too far ends the process.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import plans
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recording import RecordingDriver

from jax_megamoe import MoEConfig
from jax_megamoe.launch import launcher
from jax_megamoe.plan import plan_mega_moe
from jax_megamoe.plan.launch import Fill, KernelLaunch, LaunchPlan
from jax_megamoe.plan.operand import SYMMETRIC_BUFFER, Operand
from jax_megamoe.plan.staging import Routing
from jax_megamoe.runtime import extension
from jax_megamoe.runtime.devices import KNOWN_DEVICES

KEYS = {1: "fuzz/1", 2: "fuzz/2"}
"""Of the registered buffers, by ranks."""

BASE = 1 << 40
BUFFER_BYTES = 1 << 33
ORDINALS = (0, 1)  # devices with the buffers
ELEMENT_BITS = (8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 4, 6)
"""Of each CUtensorMapDataType."""

POWERS = (0, 3, 6, 7, 10, 12, 31, 32, 40, 62)
EDGES = [sign * (1 << power) + more for power in POWERS for sign in (1, -1) for more in (-1, 0, 1)]
EDGES += [71, 72, 73, 2**63 - 1, -(2**63)]
WORDS = ["", "null", "operand", "result", "symmetric_buffer", "launch", "fill", "pointer", "uint32",
         "float32", "tensor_map", "\0", "x" * 5000, *KEYS.values()]  # fmt: skip
INTEGERS = st.sampled_from(EDGES) | st.integers(-300, 5000) | st.integers(-(2**63), 2**63 - 1)
TEXTS = st.sampled_from(WORDS) | st.text(max_size=20)
VALUES = st.one_of(INTEGERS, st.booleans(), st.floats(), TEXTS, st.lists(INTEGERS, max_size=7))
XLA_VALUES = st.one_of(
    INTEGERS,
    st.booleans(),
    st.floats(),
    TEXTS,
    st.binary(max_size=8),
    st.lists(INTEGERS, max_size=6).map(lambda values: np.array(values, np.int64)),
    st.sampled_from(
        [np.int32(3), np.uint8(3), np.float32(1.5), np.uint64(2**64 - 1), np.zeros(3, np.int32),
         np.zeros(0, np.int64), np.arange(4, dtype=np.float32), np.zeros(3, bool), {"a": 1}, {}]
    ),
)  # fmt: skip

FUZZ = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes as `Program` takes them."""
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in attributes.items()}


def operands_of(value: Any) -> Iterator[str]:
    """Names of the arrays in a plan."""
    if isinstance(value, Operand):
        yield value.name
    elif isinstance(value, tuple):
        for each in value:
            yield from operands_of(each)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from operands_of(getattr(value, field.name))


def encoded(plan: LaunchPlan) -> dict[str, Any]:
    """A plan's attributes, all of its arrays operands but y."""
    names = sorted(set(operands_of(plan.steps)) - {SYMMETRIC_BUFFER, "y"})
    key = KEYS[plan.num_ranks] if plan.buffer.num_bytes else ""
    return plain(launcher.encode(plan, names, ["y"], buffer_key=key))


def planned(weight_format: str, source: str, device: str) -> LaunchPlan:
    """A call of two ranks with replicas and a mask."""
    sizes = {"num_experts": 8, "top_k": 2, "hidden_size": 1024, "intermediate_size": 512}
    config = MoEConfig(**sizes, max_num_tokens=128, weight_format=weight_format)
    routing = Routing(num_logical=8, padding_mask=True, max_replicas=2)
    options = {"routing": routing, "staging_by": "jax_megamoe"}
    return own_kernels(plan_mega_moe(config, KNOWN_DEVICES[device], 16, 2, source, **options))


def own_kernels(plan: LaunchPlan) -> LaunchPlan:
    """The plan with kernels that no call has: the module remembers a kernel for the whole process,
    and a test of calls would get it under the name that it has here."""

    def own(step: KernelLaunch | Fill) -> KernelLaunch | Fill:
        if isinstance(step, Fill):
            return step
        kernel = dataclasses.replace(step.kernel, prelude=step.kernel.prelude + "// fuzz\n")
        return dataclasses.replace(step, kernel=kernel)

    return dataclasses.replace(plan, steps=tuple(own(step) for step in plan.steps))


SEEDS = [
    encoded(plans.whole_plan(1, "fuzz_1")),
    encoded(plans.whole_plan(2, "fuzz_2")),
    encoded(plans.pointer_plan("fuzz_pointers")),
    encoded(planned("fp8_block", "sgl", "h200")),
    *(encoded(planned(name, "vllm", "b200")) for name in ("mxfp4", "nvfp4", "bf16")),
]


@st.composite
def mutated(draw: st.DrawFn, seeds: list[dict[str, Any]], values: Any) -> dict[str, Any]:
    """The attributes of a seed with one to four changes."""
    attributes = dict(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(sorted(attributes)))
        value = attributes[name]
        change = draw(st.sampled_from(["same type", "same type", "any", "remove", "copy"]))
        if change == "remove" and len(attributes) > 1:
            del attributes[name]
        elif change == "copy":
            attributes[draw(st.sampled_from(sorted(attributes)))] = value
        elif change == "any" or isinstance(value, bool | float):
            attributes[name] = draw(values)
        elif isinstance(value, int):
            attributes[name] = draw(INTEGERS)
        elif isinstance(value, str):
            attributes[name] = draw(TEXTS)
        else:
            entries = list(value)
            if entries:
                entries[draw(st.integers(0, len(entries) - 1))] = draw(INTEGERS)
            attributes[name] = (
                type(value)(entries) if isinstance(value, list) else np.array(entries)
            )
    return attributes


@pytest.fixture
def buffers(driver: RecordingDriver) -> Iterator[None]:
    """Buffers of one rank and of two."""
    module = extension.module()
    for ordinal in ORDINALS:
        for num_ranks, key in KEYS.items():
            bases = [BASE + rank * BUFFER_BYTES for rank in range(num_ranks)]
            module.register_symmetric_buffer(key, ordinal, BASE, bases, 0, BUFFER_BYTES)
    yield
    for ordinal in ORDINALS:
        for key in KEYS.values():
            module.unregister_symmetric_buffer(key, ordinal)


def extent(a: Mapping[str, Any], path: str) -> int:
    """Bytes that a tensor map covers."""
    dims, strides = a[f"{path}.dims"], a[f"{path}.strides"]
    inner = -(-dims[0] * ELEMENT_BITS[a[f"{path}.dtype"]] // 8)
    return inner + sum((dim - 1) * by for dim, by in zip(dims[1:], strides, strict=True))


def check_inside(a: Mapping[str, Any], sizes: Mapping[str, list[int]]) -> None:
    """What a plan that was launched touches lies in its arrays: C++'s check, restated."""
    touched: list[tuple[str, int]] = []

    def visit(path: str) -> None:
        """An argument, or a field of one."""
        kind = a[f"{path}.kind"]
        if kind == "symmetric_buffer":
            assert a["buffer_key"]
        elif kind == "struct":
            for index in range(a[f"{path}.fields"]):
                visit(f"{path}.fields.{index}")
        elif kind == "tensor_map" or (kind == "pointer" and a[f"{path}.base"] != "null"):
            touched.append((path, extent(a, path) if kind == "tensor_map" else 0))

    for step in range(a["steps"]):
        path = f"steps.{step}"
        if a[f"{path}.kind"] == "fill":
            touched.append((path, a[f"{path}.num_bytes"]))
            continue
        assert 0 <= a[f"{path}.kernel"] < a["kernels"]
        for index in range(a[f"{path}.arguments"]):
            visit(f"{path}.arguments.{index}")
    for path, num_bytes in touched:
        base, offset = a[f"{path}.base"], a[f"{path}.offset"]
        assert base != SYMMETRIC_BUFFER or a["buffer_key"]
        size = a["buffer_bytes"] if base == SYMMETRIC_BUFFER else sizes[base][a[f"{path}.index"]]
        assert 0 <= offset <= offset + num_bytes <= size, path


@settings(FUZZ, max_examples=600)
@given(data=st.data())
def test_a_mutated_plan_is_refused_by_name_or_stays_inside(
    driver: RecordingDriver, buffers: None, data: st.DataObject
) -> None:
    a = data.draw(mutated(SEEDS, VALUES))
    counts = [a.get("num_operands", 1), a.get("num_results", 1)]
    lengths = [count if isinstance(count, int) and 0 <= count <= 20 else 1 for count in counts]
    size = st.sampled_from([0, 16, 1024, 1 << 20, 1 << 34])
    sizes = [data.draw(st.lists(size, min_size=n, max_size=n)) for n in lengths]
    arrays = [[(BASE * (2 + i), n) for i, n in enumerate(each)] for each in sizes]
    ordinal = data.draw(st.sampled_from([*ORDINALS, 0, 0, 2, 71, 72, -1]))
    try:
        program = extension.module().Program(a)
        if data.draw(st.booleans()):
            program.prepare(ordinal, *arrays)
        program.launch(ordinal, 7, *arrays)
    except (ValueError, RuntimeError) as error:
        # The last is what the driver's stand-in for a compiler says of a text that is no JSON.
        known = ("expected ", "RECORDED_ERROR", "JSONDecodeError")
        assert any(each in str(error) for each in known), str(error)
        return
    check_inside(a, {"operand": sizes[0], "result": sizes[1]})


@settings(FUZZ, max_examples=50)
@given(attributes=mutated([launcher.encode(
    plans.whole_plan(1, "fuzz_xla"), ["x", "w", "table"], ["y"], buffer_key=KEYS[1]
)], XLA_VALUES), missing=st.integers(0, 3), graph=st.booleans())  # fmt: skip
def test_attributes_of_any_type_through_xla(
    driver: RecordingDriver, buffers: None, attributes: dict[str, Any], missing: int, graph: bool
) -> None:
    arrays = [*plans.operands().values(), np.frombuffer(plans.TABLE, np.uint8)]
    arrays = arrays[: len(arrays) - missing // 3]
    target = extension.GRAPH_TARGET if graph else extension.TARGET
    call = jax.ffi.ffi_call(target, plans.RESULTS["y"])
    try:
        jax.block_until_ready(jax.jit(lambda *arrays: call(*arrays, **attributes))(*arrays))
    except (TypeError, ValueError, OverflowError, NotImplementedError, RuntimeError) as error:
        # JAX and XLA have no attributes of some types; what they let through is refused by name.
        text = str(error)
        assert "jax_megamoe: " not in text or "expected " in text or "RECORDED_ERROR" in text, text
    jax.clear_caches()  # also what holds the buffer, for CUDA graphs
