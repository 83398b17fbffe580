"""A plan as attributes, before C++ sees them."""

import dataclasses
import re
from collections.abc import Callable

import numpy as np
import plans
import pytest

from jax_megamoe.launch import launcher
from jax_megamoe.plan.kernel import CodeOptions
from jax_megamoe.plan.launch import KernelLaunch, LaunchPlan, Pointer, Struct
from jax_megamoe.plan.operand import Operand
from jax_megamoe.runtime import extension


def encode(
    plan: LaunchPlan | None = None, buffer_key: str = "buffer"
) -> dict[str, launcher.Attribute]:
    """whole_plan's attributes, or another's."""
    return launcher.encode(
        plan or plans.whole_plan(), ["x", "w", "table"], ["y"], buffer_key=buffer_key
    )


def test_attributes_are_paths() -> None:
    attributes = encode()
    launch = {k: v for k, v in attributes.items() if re.fullmatch(r"steps\.1\.[a-z_]+", k)}
    for name, values in (("grid", (132, 1, 1)), ("block", (384, 1, 1)), ("cluster", (2, 1, 1))):
        array = launch.pop(f"steps.1.{name}")
        assert isinstance(array, np.ndarray)
        assert array.dtype == np.int64
        assert tuple(array) == values
    assert launch == {
        "steps.1.kind": "launch",
        "steps.1.kernel": 0,
        "steps.1.smem": 200_000,
        "steps.1.programmatic_serialization": True,
        "steps.1.arguments": 10,
    }
    assert {k: v for k, v in attributes.items() if k.startswith("steps.0.")} == {
        "steps.0.kind": "fill",
        "steps.0.base": "symmetric_buffer",
        "steps.0.index": 0,
        "steps.0.offset": 128,
        "steps.0.num_bytes": 576,
    }
    assert {k: v for k, v in attributes.items() if "arguments.7." in k} == {
        "steps.1.arguments.7.name": "table",
        "steps.1.arguments.7.kind": "pointer",
        "steps.1.arguments.7.base": "operand",
        "steps.1.arguments.7.index": 2,
        "steps.1.arguments.7.offset": 4,
    }


def test_a_struct_is_a_list_of_fields() -> None:
    found = {k.removeprefix("steps.1.arguments.9."): v for k, v in encode().items()}
    assert (found["name"], found["kind"], found["fields"]) == ("factors", "struct", 8)
    assert {k: v for k, v in found.items() if k.startswith("fields.0.")} == {
        "fields.0.name": "scales",
        "fields.0.kind": "pointer",
        "fields.0.base": "operand",
        "fields.0.index": 1,
        "fields.0.offset": 16,
    }
    assert (found["fields.2.kind"], found["fields.2.value"]) == ("bool", True)
    assert (found["fields.3.kind"], found["fields.3.value"]) == ("float32", 0.5)
    assert (found["fields.5.base"], "fields.5.index" in found) == ("null", False)
    assert found["fields.6.base"] == "symmetric_buffer"


def test_an_unknown_array_of_a_field_is_refused() -> None:
    step = plans.whole_plan().steps[1]
    assert isinstance(step, KernelLaunch)
    struct = Struct("factors", (Pointer("scales", Operand("z")),))
    plan = dataclasses.replace(
        plans.whole_plan(), steps=(dataclasses.replace(step, arguments=(struct,)),)
    )
    with pytest.raises(ValueError, match=re.escape("'x', 'y'], got 'z'; pass it as an operand")):
        encode(plan)


def test_a_kernel_travels_with_its_specification_once() -> None:
    plan = plans.whole_plan()
    attributes = encode(dataclasses.replace(plan, steps=plan.steps * 2))
    assert attributes["steps"] == 4
    assert attributes["kernels"] == 1
    text = attributes["kernels.0.spec"]
    assert isinstance(text, str)
    assert extension.decode_kernel(text) == plans.KERNEL
    assert attributes["kernels.0.symbol"] == plans.KERNEL.symbol
    other = dataclasses.replace(plans.KERNEL, template_args=("2", "true"))
    assert extension.encode_kernel(other) != text
    other = dataclasses.replace(plans.KERNEL, prelude="#define A\n", options=CodeOptions(5, True))
    assert extension.decode_kernel(extension.encode_kernel(other)) == other


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: "[]",
        lambda text: "null",
        lambda text: "{}",
        lambda text: text[:-1],
        lambda text: text.replace('"symbol"', '"other"'),
        lambda text: text.replace('"whole"', "7"),
        lambda text: text.replace('["1", "true"]', '"1"'),
        lambda text: text.replace('["1", "true"]', "[1, true]"),
        lambda text: text.replace('"whole"', '"whole", "more": 1'),
        lambda text: text.replace('"fast_math": false', '"fast_math": 0'),
        lambda text: "[" * 100_000,
    ],
)
def test_another_text_is_no_specification(change: Callable[[str], str]) -> None:
    text = change(extension.encode_kernel(plans.KERNEL))
    assert text != extension.encode_kernel(plans.KERNEL)
    expected = "kernel specification: expected the JSON of a KernelSpec, got " + repr(text[:200])
    with pytest.raises(ValueError, match=re.escape(expected)):
        extension.decode_kernel(text)


def test_a_plan_without_the_buffer_names_none() -> None:
    attributes = encode(plans.pointer_plan(), buffer_key="")
    assert attributes["buffer_key"] == ""
    assert attributes["buffer_bytes"] == 0


def test_unknown_arrays_are_refused() -> None:
    plan = plans.pointer_plan()
    (step,) = plan.steps
    assert isinstance(step, KernelLaunch)
    step = dataclasses.replace(step, arguments=(Pointer("z", Operand("z")),))
    text = "plan: expected arrays among ['symmetric_buffer', 'table', 'w', 'x', 'y'], got 'z'; pass"
    with pytest.raises(ValueError, match=re.escape(text)):
        encode(dataclasses.replace(plan, steps=(step,)))


def test_the_buffer_needs_a_key() -> None:
    with pytest.raises(ValueError, match="got 'symmetric_buffer'; pass buffer_key"):
        encode(buffer_key="")
    plan = plans.whole_plan()
    with pytest.raises(ValueError, match="got 'symmetric_buffer'; pass buffer_key"):
        encode(dataclasses.replace(plan, steps=plan.steps[1:]), buffer_key="")
