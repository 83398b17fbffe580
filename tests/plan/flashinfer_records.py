"""FlashInfer's recorded plans, buffers and weight layouts: what is planned for a record's inputs.

tests/golden/README.md describes the form; its names stay inside this module.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jax_megamoe.plan.device import SM100_SHARED_MEMORY
from jax_megamoe.plan.families import flashinfer_heuristics as heuristics
from jax_megamoe.plan.families.flashinfer_buffer import buffer_layout
from jax_megamoe.plan.families.flashinfer_heuristics import Schedule, Sizes
from jax_megamoe.weights import flashinfer_layout as layouts

Record = dict[str, Any]

_REGIONS = (
    *("x", "x_sf", "topk_idx", "topk_weights", "l1_acts", "l1_acts_sf", "l1_topk_weights"),
    *("l2_acts", "l2_acts_sf", "combine"),
)


def planned(kind: str, inputs: Mapping[str, Any]) -> Record:
    """The outputs of a record of `kind` with these inputs; ``{"rejected": reason}`` where
    FlashInfer's host refuses them.

    Kinds: ``mxfp4_fused``, ``nvfp4_fused``, ``nvfp4_split``, ``buffer``; ``mxfp4_layout`` and
    ``nvfp4_layout`` (codes w13, w2 and scale bytes s13, s2 to l1, l2); ``mxfp4_decode`` and
    ``nvfp4_decode`` (E4M3 bytes by scale byte and code).
    """
    return _KINDS[kind](inputs)


def sizes_of(inputs: Mapping[str, Any]) -> Sizes:
    return Sizes(
        num_sms=inputs.get("num_sms", 132),
        num_ranks=inputs["num_ranks"],
        num_experts=inputs["num_experts"],
        top_k=inputs["top_k"],
        hidden_size=inputs["hidden"],
        intermediate_size=inputs["intermediate"],
        max_num_tokens=inputs["max_tokens_per_rank"],
        num_tokens=inputs.get("num_tokens", 0),
    )


def _mxfp4_fused(inputs: Mapping[str, Any]) -> Record:
    sizes = sizes_of(inputs)
    ranks, experts = sizes.num_ranks, sizes.num_experts
    broken = {
        "num_sms": sizes.num_sms <= 1,
        "ranks": not (1 <= ranks <= 32 and ranks & (ranks - 1) == 0),
        "experts_per_rank": experts % ranks != 0,
        "top_k": not 1 <= sizes.top_k <= min(32, experts),
        "hidden_or_intermediate": bool(sizes.hidden_size % 256 or sizes.intermediate_size % 128),
        "num_tokens": not 0 < sizes.num_tokens <= sizes.max_num_tokens,
    }
    if reason := next((name for name, is_so in broken.items() if is_so), None):
        return {"rejected": reason}
    return _plan(heuristics.mxfp4_schedule(sizes), sizes)


def _nvfp4_fused(inputs: Mapping[str, Any]) -> Record:
    sizes = sizes_of(inputs)
    ranks, experts, hidden = sizes.num_ranks, sizes.num_experts, sizes.hidden_size
    broken = {
        "num_sms": sizes.num_sms not in (78, 132),
        "ranks": ranks not in (4, 8),
        "experts_per_rank": experts % ranks != 0,
        "num_tokens": not 0 < sizes.num_tokens <= sizes.max_num_tokens,
        "hidden_or_intermediate": bool(
            hidden % (256 if hidden <= 4096 else 512) or sizes.intermediate_size % 128
        ),
        "intermediate": 2 * sizes.intermediate_size > hidden,
    }
    if reason := next((name for name, is_so in broken.items() if is_so), None):
        return {"rejected": reason}
    push, rotation = inputs.get("force_push_dispatch"), inputs.get("force_no_clean_barrier")
    schedule = heuristics.nvfp4_schedule(sizes, push, rotation)
    if schedule is None:
        return {"rejected": "smem"}
    needed = heuristics.shared_memory("nvfp4", sizes, schedule)
    return _plan(schedule, sizes) | {"smem_needed": needed}


def _plan(schedule: Schedule, sizes: Sizes) -> Record:
    return {
        "block_m": schedule.block_m,
        "block_n": schedule.block_n,
        "num_experts_per_wave": schedule.experts_per_wave,
        "num_stages": schedule.stages,
        "smem_size": SM100_SHARED_MEMORY,
        "swap_ab": schedule.swap_ab,
        "use_mode2_row_decoder": schedule.mode2_decoder,
        "single_active_dispatch_warp": schedule.single_dispatch_warp,
        "use_interleaved_scheduler": schedule.interleaved,
        "rs_swap_ab": schedule.rs_swap_ab,
        "push_dispatch": schedule.push_dispatch,
        "no_clean_barrier": schedule.no_clean_barrier,
        "num_max_pool_tokens": sizes.pool_tokens,
        "num_padded_sf_pool_tokens": heuristics.scale_pool_tokens(sizes.pool_tokens),
    }


def _nvfp4_split(inputs: Mapping[str, Any]) -> Record:
    sizes = sizes_of(inputs)
    split = heuristics.split_schedule(sizes)
    return {
        "l1_num_stages": split.stages[0],
        "l1_smem_size": split.smem[0],
        "l2_num_stages": split.stages[1],
        "l2_smem_size": split.smem[1],
        "num_experts_per_wave": split.experts_per_wave,
        "num_max_pool_tokens": sizes.pool_tokens,
        "dispatch_dequant": True,
        "l2_arrival_counter": split.counts_arrivals,
    }


def _buffer(inputs: Mapping[str, Any]) -> Record:
    layout = buffer_layout(
        sizes_of(inputs), inputs["num_max_pool_tokens"], inputs["num_padded_sf_pool_tokens"]
    )
    offsets = {name: layout[name].offset for name in _REGIONS}
    return offsets | {"workspace_end": layout["x"].offset, "num_bytes": layout.num_bytes}


def _layout(kind: str) -> Callable[[Mapping[str, Any]], Record]:
    def record(inputs: Mapping[str, Any]) -> Record:
        to_kernel = {"mxfp4": layouts.mxfp4_tiles, "nvfp4": layouts.nvfp4_rows}[kind]
        w13, s13 = (layouts.interleave_rows(np.asarray(inputs[n])) for n in ("w13", "s13"))
        made = {"l1": to_kernel(w13, s13), "l2": to_kernel(inputs["w2"], inputs["s2"])}
        if kind == "nvfp4":
            return made
        return {name: t.reshape(len(t), -1, layouts.TILE_BYTES) for name, t in made.items()}

    return record


_KINDS: Mapping[str, Callable[[Mapping[str, Any]], Record]] = {
    "mxfp4_fused": _mxfp4_fused,
    "nvfp4_fused": _nvfp4_fused,
    "nvfp4_split": _nvfp4_split,
    "buffer": _buffer,
    "mxfp4_layout": _layout("mxfp4"),
    "nvfp4_layout": _layout("nvfp4"),
    "mxfp4_decode": lambda inputs: {"bytes": layouts.mxfp4_decoded()},
    "nvfp4_decode": lambda inputs: {"bytes": layouts.nvfp4_decoded()},
}
