"""Golden launch records replayed by `mega_moe` on CPU devices that stand for GPUs."""

import golden_records
import pytest
from emulation import Emulation, kernel_name
from golden_launches import Record, first_difference
from golden_replay import BY_POINTER, Observer, launch_of, replay, replays

from jax_megamoe.plan.sm100 import locality_table
from jax_megamoe.runtime import extension

# Records with larger experts are left out; NVFP4 has none that a call can make with fewer bytes.
MAX_WEIGHT_BYTES = {"launches_sgl_fp4_mega_moe.jsonl.gz": 1 << 30}

# How many records of a file a call can make: fewer would mean that some dropped out unseen.
REPLAYED = {
    "launches_sgl_fp8_fp4_mega_moe.jsonl.gz": 33,
    "launches_sgl_fp4_mega_moe.jsonl.gz": 1,
    "launches_sgl_bf16_mega_moe.jsonl.gz": 14,
    "launches_sgl_sm90_fp8_mega_moe.jsonl.gz": 5,
    "launches_vllm_fp8_fp4_mega_moe.jsonl.gz": 47,
    "launches_vllm_situ_mega_moe.jsonl.gz": 26,
    "launches_vllm_bf16_mega_moe.jsonl.gz": 14,
    "launches_vllm_nvfp4_mega_moe.jsonl.gz": 13,
}


RECORDS = {file: replays(file, MAX_WEIGHT_BYTES.get(file, 220 << 20)) for file in REPLAYED}
"""Found while tests are collected: less than a second."""


@pytest.mark.parametrize(
    ("file", "record"),
    [
        pytest.param(file, record, id=record["inputs"]["id"])
        for file, records in RECORDS.items()
        for record in records
    ],
)
def test_golden_launch(file: str, record: Record, emulation: Emulation) -> None:
    assert_replayed(record, emulation)
    golden_records.compared(f"{file}, end to end")


def test_no_record_dropped_out() -> None:
    assert {file: len(records) for file, records in RECORDS.items()} == REPLAYED


def assert_replayed(record: Record, emulation: Emulation) -> None:
    """Every rank's launch of a record's kernel equals the record."""
    inputs, outputs = record["inputs"], record["outputs"]
    (golden,) = outputs["launches"]
    call = replay(record, emulation)
    (kernel,) = (each for each in call.kernels if each.symbol == golden["entry"])
    name = kernel_name(extension.encode_kernel(kernel))
    has_table = golden["args"][-1]["name"] == "sm_locality_domains"
    emulation.driver.clear()
    if has_table:
        emulation.driver.peek(name, len(golden["args"]) - 1, inputs["num_sms"])
    for index, each in enumerate(golden["args"]):
        if each["name"] == BY_POINTER:
            emulation.driver.peek(name, index, 4)
    known = call.run()
    launches = emulation.launches(golden["entry"])
    assert sorted(launches) == sorted(call.group)
    assert emulation.memory.num_bytes == outputs["sym_buffer_bytes"]
    for rank, device in enumerate(call.group):
        observer = Observer(call.group, rank, outputs["sym_buffer_bytes"], known[device])
        got = observer.launch(launches[device], golden)
        difference = first_difference(launch_of(record, rank), got)
        assert not difference, f"{inputs['id']} rank {rank} {difference}"
        if has_table:
            table = bytes.fromhex(launches[device]["peeked"])
            assert table == locality_table(inputs["num_sms"])
    for each in emulation.driver.calls("cuFuncSetAttribute"):
        if each["kernel"] == name:
            assert [[each["attribute"], each["value"]]] == outputs["func_attrs"]
