"""Every recorded launch and host query of DeepGEMM, against what is planned for its inputs."""

import copy
import json
import re

import golden_records
import pytest
from golden_launches import HOSTS, LAUNCHES, first_difference, launch_records, read
from golden_plans import (
    Record,
    buffer_record,
    device_of,
    problem_of,
    record,
    traits_of,
    unchecked_record,
)

from jax_megamoe.plan import heuristics
from jax_megamoe.plan.sm100 import locality_table

# Our own name for DeepGEMM's reason -> the exception and the text of it.
REJECTIONS = {
    "activation_unsupported": (NotImplementedError, "activation: expected (one of .*|swiglu on)"),
    "architecture_unsupported": (NotImplementedError, "device: expected compute capability"),
    "experts_not_divisible_by_ranks": (ValueError, "num_experts: expected a multiple of the 8"),
    "fp4_needs_hidden_and_intermediate_multiple_of_256": (
        ValueError,
        "intermediate_size: expected a multiple of 256",
    ),
    "hidden_not_multiple_of_256": (ValueError, "hidden_size: expected a multiple of 256"),
    "intermediate_not_multiple_of_128": (
        ValueError,
        "intermediate_size: expected a multiple of (128|256)",
    ),
    "mma_type_unknown": (NotImplementedError, "mma_type: expected one of .*'int8xint8'"),
    "more_than_2048_experts": (ValueError, "num_experts: expected at most 2048, got 4096"),
    "more_than_512_experts_per_rank": (
        ValueError,
        "num_experts per rank: expected at most 512, got 1024",
    ),
    "more_than_72_ranks": (ValueError, "num_ranks: expected at most 72, got 73"),
    "more_tokens_than_buffer": (
        ValueError,
        "num_tokens: expected at most max_num_tokens = 1024 .*, got 5000",
    ),
    "negative_clamp": (ValueError, "activation clamp: expected a number >= 0 or None, got -1.0"),
    "odd_sm_count": (ValueError, "num_sms: expected a multiple of 4, got 147"),
    "ring_over_8388608_tokens": (ValueError, "a ring of at most 8388608 received tokens"),
    "ring_too_small": (ValueError, "top_k: expected 1 to num_experts = 256, got 0"),
    "shared_dtype_wrong": (NotImplementedError, "shared_format: expected one of .*, got mxfp4"),
    "shared_scale_missing": (NotImplementedError, "shared_format: expected one of .*, got bf16"),
    "shared_shape_wrong": (NotImplementedError, "shared_format: expected one of .*, got mxfp4"),
    "situ_takes_no_clamp": (ValueError, "activation clamp: expected None for situ, got 5.0"),
    "sm90_intermediate_over_4096": (ValueError, "intermediate_size: expected at most 4096"),
    "sm90_more_than_32_ranks": (ValueError, "num_ranks: expected at most 32, got 7[23]"),
    "sm90_needs_hidden_multiple_of_512_and_intermediate_of_256": (
        ValueError,
        "hidden_size: expected a multiple of 512|intermediate_size: expected a multiple of 256",
    ),
    "smem_too_small": (ValueError, "two pipeline stages in 232448 bytes of shared memory"),
}

LEFT_OUT = {"launches_sgl_fp4_mega_moe.jsonl.gz": 12}  # the TensorRT weight layout

TOO_MANY_SCALES = {"sgl_fp4_mega_moe-s43"}
"""Records whose kernel would address scales of second inputs past its 32 bits."""

# Accepted by DeepGEMM's host, refused here, because the kernel cannot be compiled or work.
REFUSED = {
    "launches_sgl_errors.jsonl.gz": 26,
    "launches_sgl_fp4_mega_moe.jsonl.gz": 16,
    "launches_sgl_pre_dispatch.jsonl.gz": 4,
    "launches_vllm_errors.jsonl.gz": 29,
    "launches_vllm_nvfp4_mega_moe.jsonl.gz": 23,
}


def refusal(inputs: Record) -> str:
    """The text we refuse inputs with that DeepGEMM's host takes: its kernel cannot run them."""
    sm90 = "sm90" in inputs["kernel"]
    shared = inputs["num_shared_experts"]
    paired = inputs["kernel"] in ("nvfp4_mega_moe", "fp4_fp4_mega_moe")
    packed = paired or inputs["mma_type"] in ("nvfp4xnvfp4", "mxf4xmxf4")
    shifts = not (paired or sm90)
    vllm = inputs["provider"] == "vllm"
    rules = (
        (inputs["top_k"] + (shared > 0) > 32, "at most 3[12], got 33"),
        (not 1 <= inputs["top_k"] <= inputs["num_experts"], "top_k: expected 1 to num_experts"),
        (sm90 and shared, "num_shared_experts: expected 0 on SM90, got 1"),
        (shared and inputs["shared_dtype"] is None, "shared weights: expected weights of the 1"),
        (packed and inputs["intermediate"] % 256, "intermediate_size: expected a multiple of 256"),
        (
            vllm and inputs["intermediate"] > 4096,
            "intermediate_size: expected at most 4096, got 16384",
        ),
        (inputs["num_sms"] % 2, "num_sms: expected a multiple of 2, got 1(47|31)"),
        (shifts and inputs["top_k"] == 32, "top_k: expected at most 31, got 32"),
        (inputs.get("id") in TOO_MANY_SCALES, r"scales of second inputs \(l2_acts_sf\) in at most"),
        (inputs["hidden"] > 15360, r"hidden_size: expected at most (9216|15360), got 32768"),
    )
    return next((text for broken, text in rules if broken), "")


def is_left_out(inputs: Record) -> bool:
    """Whether the weights have a layout that this package has not."""
    return inputs["weight_layout"] != "megamoe"


def assert_rejected(recorded: Record, inputs: Record) -> None:
    kind, text = REJECTIONS[recorded["rejected"]]
    with pytest.raises(kind) as caught:
        record(inputs)
    assert re.search(text, str(caught.value)), f"{inputs.get('id')}: {caught.value}"


def recorded_outputs(recorded: Record) -> Record:
    """A record's outputs, of the compiler's flags only the one that is the plan's."""
    outputs = recorded["outputs"]
    if "launches" not in outputs:
        return outputs
    return outputs | {
        "launches": [
            launch | {"nvcc_flags": [f for f in launch["nvcc_flags"] if f.startswith("--gpu-arch")]}
            for launch in outputs["launches"]
        ]
    }


def planned_outputs(recorded: Record) -> Record:
    """What is planned; for refused inputs, the arithmetic after the error was seen."""
    inputs = recorded["inputs"]
    if "rejected" in recorded:
        return buffer_record(inputs)
    if text := refusal(inputs):
        with pytest.raises((ValueError, NotImplementedError), match=text):
            record(inputs)
        return unchecked_record(inputs)
    return record(inputs)


@pytest.mark.parametrize("name", launch_records())
def test_recorded_launch(name: str) -> None:
    file, recorded = launch_records()[name]
    inputs = recorded["inputs"]
    if is_left_out(inputs):
        with pytest.raises(NotImplementedError, match="weight_layout: expected megamoe, got"):
            record(inputs)
        return
    if "rejected" in recorded:
        assert_rejected(recorded, inputs)
    if "outputs" in recorded:
        difference = first_difference(recorded_outputs(recorded), planned_outputs(recorded))
        assert not difference, f"{file} {difference}"
    golden_records.compared(file)


@pytest.mark.parametrize("file", LAUNCHES)
def test_how_many_recorded_launches_are_not_ours(file: str) -> None:
    """More would mean that some dropped out unseen."""
    records = [record for where, record in launch_records().values() if where == file]
    ours = [each for each in records if not is_left_out(each["inputs"])]
    refused = [each for each in ours if "rejected" not in each and refusal(each["inputs"])]
    assert len(records) - len(ours) == LEFT_OUT.get(file, 0)
    assert len(refused) == REFUSED.get(file, 0)


@pytest.mark.parametrize("file", HOSTS)
def test_recorded_host_queries(file: str) -> None:
    provider = file.removeprefix("host_").removesuffix(".jsonl.gz")
    for recorded in read(file):
        inputs = recorded | {"provider": provider}
        if "rejected" in recorded:
            # A query has a shared format only in name, and one that mxf4 kernels do not take.
            assert_rejected(recorded, inputs | {"shared_dtype": None, "num_shared_experts": 0})
        else:
            got = buffer_record(inputs)
            slices = {
                each["name"]: [each[key] for key in ("offset", "dtype", "shape", "strides")]
                if each.get("offset") is not None
                else None
                for each in got["slices"]
            }
            want = {key: recorded[key] for key in ("aligned", "bytes", "block_m", "slices")}
            have = {
                "aligned": got["max_tokens_per_rank_aligned"],
                "bytes": got["sym_buffer_bytes"],
                "block_m": got["block_m_query"],
                "slices": slices,
            }
            difference = first_difference(want, have)
            assert not difference, f"{file} {json.dumps(recorded)[:300]} {difference}"
            if "block_m_runs" in recorded:
                assert tile_runs(inputs) == recorded["block_m_runs"], json.dumps(recorded)[:300]
        golden_records.compared(file)


def tile_runs(inputs: Record) -> list[list[int]]:
    """[first T, block_m] wherever the tile height changes, asking for every T."""
    traits, device = traits_of(inputs), device_of(inputs)
    problem = copy.copy(problem_of(inputs))
    assert traits is not None
    runs: list[list[int]] = []
    for num_tokens in range(min(inputs["block_m_runs_to"], inputs["aligned"]) + 1):
        # A frozen Problem made anew for each of three million T would take most of the time.
        object.__setattr__(problem, "num_tokens", num_tokens)
        height = heuristics.block_m(traits, problem, device)
        if not runs or runs[-1][1] != height:
            runs.append([num_tokens, height])
    return runs


def test_locality_tables() -> None:
    devices = json.loads((golden_records.FOLDER / "devices.json").read_text())
    for name, device in devices.items():
        num_sms, table = device["device"]["num_sms"], device["sm_locality_domains"]
        if "rejected" in table:
            assert num_sms % 2, name
        else:
            assert list(locality_table(num_sms)) == table["values"], name
        golden_records.compared("devices.json")
