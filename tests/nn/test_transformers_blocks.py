"""`MegaMoEBlock` against transformers' MoE blocks: records always, live where it is installed."""

import importlib.util
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import tolerances
import transformers_blocks
from transformers_cases import CASES, Case

EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)

MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
LIVE = pytest.mark.skipif(
    bool(MISSING), reason=f"needs {' and '.join(MISSING)}: pip install '.[transformers]'"
)


def check(case: Case, form: str, held: Any, **options: Any) -> None:
    """The block's routing and output against transformers' in float32."""
    y, routing = transformers_blocks.run_block(case, form, **options)
    np.testing.assert_array_equal(np.sort(routing.topk_ids), np.sort(held.topk_ids))
    got, want = (transformers_blocks.dense_weights(each, 16) for each in (routing, held))
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerances.ROUTING * want.max())
    # Without the lower bounds: an unfused shared expert and a clamp round less.
    limit = tolerances.ACCURACY[form].layer[1]
    error = cases.relative_error(y, held.y)
    assert error <= limit, f"{case.name} in {form}: relative error {error}, allowed {limit}"
    by_token = [cases.relative_error(a, b) for a, b in zip(y, held.y, strict=True)]
    assert max(by_token) <= 2 * limit, f"{case.name} in {form}: tokens {by_token}"


@EACH_CASE
def test_bf16(case: Case) -> None:
    held = transformers_blocks.read_record(case)
    check(case, "bf16", held)
    # transformers in bfloat16 rounds more often than the layer does.
    error = cases.relative_error(held.y_bfloat16, held.y)
    assert tolerances.ACCURACY["bf16"].layer[0] <= error <= 2 * tolerances.ACCURACY["bf16"].layer[1]


@pytest.mark.parametrize("form", [form for form in cases.FORMATS if form != "bf16"])
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.name not in ("deepseek_v4_hashed", "qwen3_moe_plain")],
    ids=lambda case: case.name,
)
def test_quantised(case: Case, form: str) -> None:
    check(case, form, transformers_blocks.read_record(case))


@LIVE
@EACH_CASE
def test_live(case: Case) -> None:
    """transformers itself, its config object, and the record."""
    record_transformers = pytest.importorskip("record_transformers")
    import torch  # noqa: PLC0415 (not installed everywhere)

    held = record_transformers.run(case, torch.float32)
    recorded = transformers_blocks.read_record(case)
    np.testing.assert_allclose(held.y, recorded.y, rtol=0, atol=1e-5 * np.abs(recorded.y).max())
    check(case, "bf16", held, hf_config=record_transformers.config_of(case))


@LIVE
@EACH_CASE
def test_live_model_from_its_folder(case: Case, tmp_path: Path) -> None:
    """A whole model as transformers saves it: its config.json, its names, its own parameters."""
    record_transformers = pytest.importorskip("record_transformers")
    want = record_transformers.save_model(case, tmp_path)
    y, _ = transformers_blocks.run_block(case, "bf16", tmp_path, tmp_path)
    assert cases.relative_error(y, want) <= tolerances.ACCURACY["bf16"].layer[1]
