"""Every recorded plan, buffer and weight layout of FlashInfer, against what is planned for it."""

from collections.abc import Iterator, Mapping

import golden_records
import numpy as np
import pytest
from flashinfer_records import planned
from golden_launches import Record, first_difference, read

import jax_megamoe as mm
from jax_megamoe.plan import plan_mega_moe
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.launch import KernelLaunch

PLANS, LAYOUTS = "flashinfer_plans.jsonl.gz", "flashinfer_layouts.npz"


@pytest.fixture(scope="module")
def layouts() -> Mapping[str, np.ndarray]:
    return golden_records.arrays("flashinfer_layouts")


def records(kind: str) -> Iterator[Record]:
    return (record for record in read(PLANS) if record["kind"] == kind)


@pytest.mark.parametrize(
    ("kind", "rejections"),
    [("mxfp4_fused", 1200), ("nvfp4_fused", 2008), ("nvfp4_split", 0), ("buffer", 0)],
)
def test_recorded_plans_and_buffers(kind: str, rejections: int) -> None:
    rejected = 0
    for record in records(kind):
        if "rejected" in record:
            want: Record = {"rejected": record["rejected"]}
            rejected += 1
        else:
            want = record["outputs"]
        difference = first_difference(want, planned(kind, record["inputs"]))
        assert not difference, f"{record['inputs']} {difference}"
        golden_records.compared(PLANS)
    assert rejected == rejections


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_recorded_weight_layouts(form: str, layouts: Mapping[str, np.ndarray]) -> None:
    names = {"w13": "w13", "w2": "w2", "s13": f"{form}_s13", "s2": f"{form}_s2"}
    inputs = {name: layouts[f"a/{recorded}"] for name, recorded in names.items()}
    got = planned(f"{form}_layout", inputs)
    for matrix in ("l1", "l2"):
        np.testing.assert_array_equal(got[matrix], layouts[f"a/{form}_{matrix}"])
        golden_records.compared(LAYOUTS)


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_recorded_decoding(form: str, layouts: Mapping[str, np.ndarray]) -> None:
    np.testing.assert_array_equal(planned(f"{form}_decode", {})["bytes"], layouts[f"{form}_decode"])
    golden_records.compared(LAYOUTS)


@pytest.mark.parametrize(("recipe", "place"), [("mxfp4_block", 19), ("nvfp4_block", 14)])
@pytest.mark.parametrize("num_ranks", [1, 8])
def test_weights_are_not_decoded_into_registers(recipe: str, place: int, num_ranks: int) -> None:
    """FlashInfer's choice for decode steps, which an H200 that processes shared got wrong."""
    sizes = dict(num_experts=256, top_k=6, hidden_size=4096, intermediate_size=2048)
    config = mm.MoEConfig(**sizes, max_num_tokens=4096, weight_format=recipe)
    device = DeviceSpec(90, 132)
    chosen = []
    for num_tokens in (1, 8, 17, 32, 35, 64, 129, 512):
        plan = plan_mega_moe(config, device, num_tokens, num_ranks)
        mega = plan.steps[-1]
        assert isinstance(mega, KernelLaunch)
        chosen.append(mega.kernel.template_args[place])
    assert set(chosen) == {"false"}
