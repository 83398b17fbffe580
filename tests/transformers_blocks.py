"""`MegaMoEBlock` against transformers' MoE blocks: the records of `record_transformers.py`, the
same layers through this package, and how far they are apart.

``PYTHONPATH=. python tests/transformers_blocks.py`` writes
benchmarks/results/transformers_blocks.md; it needs neither torch nor transformers.
"""

from pathlib import Path
from typing import Any, NamedTuple

import cases
import jax.numpy as jnp
import numpy as np
import transformers_cases
from transformers_cases import CASES, RECORDS, Case

import jax_megamoe as mm

RESULT = Path(__file__).parents[1] / "benchmarks" / "results" / "transformers_blocks.md"


class Record(NamedTuple):
    """What transformers gave.

    Attributes:
        y: float32 [T, H], of the block in float32.
        topk_ids: int32 [T, K].
        topk_weights: float32 [T, K].
        y_bfloat16: float32 [T, H], of the block in bfloat16.
        versions: of transformers and torch.
    """

    y: np.ndarray
    topk_ids: np.ndarray
    topk_weights: np.ndarray
    y_bfloat16: np.ndarray
    versions: tuple[str, ...]


def read_record(case: Case) -> Record:
    """The case's record; its weights are those that the recipe makes today."""
    with np.load(RECORDS / f"{case.name}.npz") as held:
        crc = transformers_cases.digest(transformers_cases.checkpoint(case))
        assert int(held["weights_crc"]) == crc, f"{case.name}: recorded with other weights"
        wide = (held["y_bfloat16"].astype(np.uint32) << 16).view(np.float32)
        ids, weights = held["topk_ids"], held["topk_weights"]
        return Record(held["y"], ids, weights, wide, tuple(map(str, held["versions"])))


def run_block(
    case: Case, form: str, hf_config: Any = None, checkpoint: Any = None
) -> tuple[np.ndarray, mm.Routing]:
    """float32 y [T, H] and the routing, of a block made from the config and loaded from the
    checkpoint; None: the case's."""
    block = mm.MegaMoEBlock.from_config(
        case.hf_config if hf_config is None else hf_config,
        layer_index=case.layer_index,
        max_num_tokens=transformers_cases.TOKENS,
        weight_format=form,
    )
    if checkpoint is None:
        checkpoint = transformers_cases.checkpoint(case)
    block.load(checkpoint, case.layer_index)
    x, token_ids = transformers_cases.inputs(case)
    ids = None
    if block.router.settings.table_size:
        ids = jnp.asarray(token_ids, jnp.int32)
    y, routing = block(jnp.asarray(x), token_ids=ids, return_routing=True)
    return np.asarray(y, np.float32), routing


def dense_weights(routing: Any, num_experts: int) -> np.ndarray:
    """float32 [T, E], 0 where an expert was not chosen: the slots' order does not matter."""
    ids, weights = np.asarray(routing.topk_ids), np.asarray(routing.topk_weights, np.float32)
    dense = np.zeros((len(ids), num_experts), np.float32)
    np.add.at(dense, (np.arange(len(ids))[:, None], ids), weights)
    return dense


def table() -> str:
    """The comparison as Markdown."""
    head = ["model family", "block of transformers", "same experts", "weights apart by at most"]
    head += ["transformers in bfloat16", *cases.FORMATS]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    versions: set[str] = set()
    for case in CASES:
        held = read_record(case)
        versions |= set(held.versions)
        bfloat16 = cases.relative_error(held.y_bfloat16, held.y)
        errors = []
        for form in cases.FORMATS:
            y, routing = run_block(case, form)
            errors.append(f"{cases.relative_error(y, held.y):.4f}")
        same = np.mean(np.sort(routing.topk_ids) == np.sort(held.topk_ids))
        experts = int(routing.topk_ids.max()) + 1
        dense = [dense_weights(each, max(experts, 16)) for each in (routing, held)]
        apart = np.abs(dense[0] - dense[1]).max() / dense[1].max()
        cells = [case.family, f"`{case.block.split('.')[1]}`", f"{same:.0%}", f"{apart:.0e}"]
        lines.append("| " + " | ".join([*cells, f"{bfloat16:.4f}", *errors]) + " |")
    return _TEXT.format(versions=", ".join(sorted(versions)), table="\n".join(lines))


_TEXT = """# MoE blocks against transformers

Small layers of each family ({versions}; 24 tokens, 16 experts, 4 a token) with the same weights:
transformers' block in float32 against `MegaMoEBlock`, made by `from_config` and loaded by `load`
from the family's tensor names, both on the CPU. Numbers are the relative error of the whole output
in the Euclidean norm. The column before the formats is transformers' own block in bfloat16 against
itself in float32: what rounding to bfloat16 costs there. Llama 4 has one expert a token, and its
weight multiplies the expert's input.

{table}

Kimi-K2's model code is DeepSeek-V3's: transformers runs it as that, and so is it checked, with its
own config. The blocks of Qwen3.5-MoE, Qwen3-VL-MoE, Qwen4-Exp and Llama 4 are their text models'.
DeepSeek-V4's layers with a table choose experts by token id. GPT-OSS's sizes here (192 and 160) are
no multiples of 128, as those of the models (2880).

Written by `PYTHONPATH=. python tests/transformers_blocks.py` from the records in
`tests/golden/transformers/`, which `tests/record_transformers.py` makes (`pip install
'.[transformers]'`). `tests/test_transformers_blocks.py` checks the same against
`tests/tolerances.py`, and where transformers is installed against that itself: its config objects,
and whole models that its `save_pretrained` wrote, loaded from their folders.
"""


if __name__ == "__main__":
    RESULT.write_text(table())
