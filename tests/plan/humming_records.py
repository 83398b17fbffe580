"""What humming-kernels' own Python planned, as inputs of this package's planner.

A record is the problem, the tuner's choice of tiles, and what the host would launch.
"""

import gzip
import json
import re
from pathlib import Path
from typing import Any

from jax_megamoe.plan.grouped import humming, humming_instruction, humming_unit
from jax_megamoe.plan.grouped.product import Product, Tiles

RECORDS = Path(__file__).parents[1] / "golden" / "humming_plans.jsonl.gz"

Record = dict[str, Any]


def read(path: Path = RECORDS) -> tuple[list[Record], dict[str, Record]]:
    """Plans, and kernels by id."""
    with gzip.open(path, "rt") as lines:
        records = [json.loads(line) for line in lines]
    kernels = {record["id"]: record for record in records if record["kind"] == "kernel"}
    return [record for record in records if record["kind"] == "plan"], kernels


def product_of(plan: Record) -> Product:
    """The problem of a record."""
    layer = plan["layer"]
    return Product(
        arch=plan["sm"],
        weights=plan["format"],
        # Of MXFP8 on a tensor core without block scales the package makes float32 scales by 32.
        inputs={"mxfp8": "fp8_f32_32"}.get(plan["activation"], plan["activation"]),
        num_experts=layer["num_experts"],
        n=layer["shape_n"],
        k=layer["shape_k"],
        pad_n=layer["pad_shape_n"],
        pad_k=layer["pad_shape_k"],
        second_scale=layer["weight_scale_2_type"],
        has_bias=layer["has_bias"],
    )


def tiles_of(plan: Record) -> Tiles:
    """The tuner's choice."""
    choice = plan["config"]
    return Tiles(
        wgmma=choice["mma_type"] == "wgmma",
        block=tuple(choice["block_shape"]),
        warp=tuple(choice["warp_shape"]),
        stages=choice["num_stages"],
        ctas=choice.get("num_ctas_per_sm", 1),
        warp_spec=choice.get("use_warp_spec", False),
        use_tma=choice.get("use_tma", False),
        stream_k=choice["use_stream_k"],
        late_as=choice.get("wgmma_use_late_as", False),
        split_wait=choice.get("wgmma_split_issue_wait", False),
        reuse_stages=choice.get("smem_reuse_mode", "all_stages") == "all_stages",
        raster=choice.get("raster_group_m", 1),
        producer_unroll=choice.get("producer_stage_unroll") or 0,
        evict_first=choice.get("evict_weights_first", False),
        pdl=choice.get("use_pdl", False),
        num_sms=plan["num_sms"],
        batch_invariant=plan["batch_invariant"],
    )


def planned(plan: Record, num_sms: int) -> Record:
    """What this package plans for a record's inputs, in the record's form."""
    product, tiles = product_of(plan), tiles_of(plan)
    config = humming.launch_config(product, tiles, num_sms)
    spec = humming.kernel(product, tiles)
    maps = humming_unit.tensor_maps(product, tiles)
    return {
        "launch": {
            "grid": config.grid[0],
            "block": config.block[0],
            "cluster": config.cluster[0],
            "smem": config.smem,
            "pdl": config.programmatic_serialization,
            "tma": {name.lower(): name in maps for name in humming_unit.MAP_NAMES},
        },
        "header": spec.header,
        "template": list(humming_unit.types(product, tiles).values()),
        "mma": list(humming_instruction.mma_shape(product, tiles)),
        "element_b": humming_instruction.element_b(product, tiles).bits,
        "constants": {
            name: humming_unit.cpp(value)
            for constants in (
                humming_unit.layer_constants(product, tiles),
                humming_unit.compute_constants(tiles),
                humming_unit.tuning_constants(product, tiles),
            )
            for name, value in constants.items()
        },
    }


def recorded(plan: Record, kernel: Record) -> Record:
    """What the package planned, in the same form; only the constants that headers name."""
    arguments = re.findall(r"(?:Shape|FloatingPointType)<[^<>]*>", kernel["expression"])
    shape = re.search(r"MmaShape = Shape<(\d+), (\d+), (\d+)>", kernel["mma"])
    element = re.search(r"ElementB = FloatingPointType<(\d+)", kernel["mma"])
    assert shape and element
    constants = {n: v for part in kernel["constants"].values() for n, v in part.items()}
    return {
        "launch": plan["launch"],
        "header": kernel["header"],
        "template": arguments,
        "mma": [int(size) for size in shape.groups()],
        "element_b": int(element[1]),
        "constants": {n: v for n, v in constants.items() if n not in UNREAD},
    }


UNREAD = {
    *("kShapeK", "kPadShapeN", "kPadShapeK", "kInputQuantMode", "kWeightScaleType"),
    *("kWeightScale2Type", "kUseF16Accum", "kMmaTypeId", "kSmemReuseModeId", "kGemmTypeId"),
    *("kIsTensorWeightScale", "kIsTokenInputScale", "kIsTokenInputScale2"),
}
"""Constants that the package writes and no header of it reads."""
