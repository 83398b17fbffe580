"""GPT-OSS's block with folded biases by the kernels, against what transformers recorded of its own.

`tests/nn/test_block_biases.py` has `xla` and `reference`; the layer and the limits are the same.
"""

import cases
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
import transformers_blocks
import transformers_cases
from transformers_cases import CASES

import jax_megamoe as mm
from emulator import cells
from emulator.cells import Cell
from emulator.fixtures import needs
from emulator.standing_in import standing_in
from jax_megamoe.plan import folding

CASE = next(case for case in CASES if case.name == "gpt_oss")
FAMILIES = [
    ("mxfp4", "sgl"),
    ("mxfp8", "sgl"),
    ("mxfp4", "vllm"),
    ("mxfp8", "vllm"),
    ("bf16", "vllm"),
]
"""Format and source of the kernels that have GPT-OSS's activation and formats that hold biases."""


@pytest.mark.parametrize(("form", "source"), FAMILIES, ids=[f"{s} {f}" for f, s in FAMILIES])
def test_block_against_transformers(form: str, source: str) -> None:
    """Made, filled up, folded and loaded as on a Blackwell; every launch is executed."""
    needs(source)
    held = transformers_blocks.read_record(CASE)
    x = jnp.asarray(transformers_cases.inputs(CASE)[0])
    with standing_in(Cell(form, source).device) as stand_in:
        block = mm.MegaMoEBlock.from_config(
            CASE.hf_config,
            max_num_tokens=transformers_cases.TOKENS,
            weight_format=form,
            kernel_source=source,
            implementation="deep_gemm",
        )
        block.load(transformers_cases.checkpoint(CASE), CASE.layer_index)
        assert block.experts.folds_biases and block.config.hidden_size > block.hidden_size
        y = np.asarray(stand_in.run(lambda: block(x)))
        assert stand_in.last is not None and stand_in.last.machine.count("executed") > 10_000
    block.experts = mm.MegaMoE(block.config, block.experts.weights, implementation="reference")
    _assert_within(y, np.asarray(block(x)), tolerances.EMULATED[form])
    limit = tolerances.ACCURACY[form].layer[1]
    _assert_within(y, held.y, tolerances.Agreement(limit, 2 * limit))


def _assert_within(y: np.ndarray, want: np.ndarray, limit: tolerances.Agreement) -> None:
    worst = max(cases.relative_error(*rows) for rows in zip(y, want, strict=True))
    assert cases.relative_error(y, want) <= limit.norm and worst <= limit.token


def test_every_family_that_can_run_the_model_so_is_here() -> None:
    """The activation and columns that hold biases; other sources' kernels lack one or the other."""
    calls = [Cell(*family, activation="gpt_oss") for family in cells.families()]
    able = [c for c in calls if not c.refusal() and folding.fits(c.config(), c.hidden - 64)]
    assert sorted((cell.form, cell.source) for cell in able) == sorted(FAMILIES)
