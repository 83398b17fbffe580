"""FlashInfer's kernels executed from their PTX as planned: equal to `reference` within the sums.

Skips without nvcc or the kernel source. One rank has three SMs; MXFP4's tiles are of 8 and 24 rows.
"""

import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import cases
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tolerances

import jax_megamoe as mm
from emulator import machine
from jax_megamoe.compile import MissingDependency, find_source
from jax_megamoe.compile.codegen import generate
from jax_megamoe.op.staged_tokens import stage
from jax_megamoe.plan import plan_mega_moe
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.kernel import KernelSpec
from jax_megamoe.plan.launch import KernelLaunch, Pointer, SymmetricBuffer, TensorMap, Uint32

DEVICE = DeviceSpec(90, 3)
FLAGS = (
    *("-std=c++20", "-O3", "--expt-relaxed-constexpr", "--expt-extended-lambda", "-ptx"),
    *("-gencode=arch=compute_90a,code=compute_90a", "-use_fast_math"),
)


def ptx_of(spec: KernelSpec, folder: Path) -> str:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    try:
        source = find_source(spec.source)
    except MissingDependency as error:
        pytest.skip(str(error))
    unit, output = folder / "kernel.cu", folder / "kernel.ptx"
    unit.write_text(generate(spec, source))
    includes = [f"-I{each}" for each in source.include_dirs]
    subprocess.run([nvcc, *FLAGS, *includes, unit, "-o", output], check=True, capture_output=True)
    return output.read_text()


def placed(emulated: machine.Machine, array: Any, name: str) -> int:
    """The address of a copy of an array that kernels only read."""
    octets = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    held = machine.aligned(octets.size + 16, 256)
    held[: octets.size] = octets
    return emulated.region(held, name, writable=False)


def parameters(mega: KernelLaunch, addresses: dict[str, int]) -> list[bytes]:
    """A launch's parameters for one rank."""
    packed: list[bytes] = []
    for each in mega.arguments:
        match each:
            case Pointer(operand=operand):
                where = addresses[operand.name] + operand.offset if operand else 0
                packed.append(struct.pack("<Q", where))
            case Uint32(value=value):
                packed.append(struct.pack("<I", value))
            case SymmetricBuffer():
                packed.append(struct.pack("<Q72qI4x", addresses["symmetric_buffer"], *[0] * 72, 0))
            case TensorMap(spec=spec):
                base = addresses[spec.base.name] + spec.base.offset
                box = (spec.dims, spec.strides, spec.box, spec.swizzle)
                packed.append(machine.encode_tensor_map(base, spec.dtype, *box))
            case _:
                raise AssertionError(each)
    return packed


@pytest.mark.parametrize(
    ("recipe", "num_tokens"), [("mxfp4_block", 7), ("mxfp4_block", 29), ("nvfp4_block", 7)]
)
def test_one_rank(recipe: str, num_tokens: int, tmp_path: Path) -> None:
    cfg = mm.MoEConfig(
        num_experts=4,
        top_k=2,
        hidden_size=512,
        intermediate_size=256,
        max_num_tokens=32,
        weight_format=recipe,
        activation=mm.Activation("swiglu", clamp=10.0),
    )
    weights = cases.weights(cfg)
    x, ids, factors = cases.tokens(cfg, num_tokens)
    ids = jnp.asarray(ids).at[2, 0].set(-1)
    plan = plan_mega_moe(cfg, DEVICE, num_tokens, 1, with_stats=True, staging_by="none")
    (mega,) = plan.steps
    assert isinstance(mega, KernelLaunch)
    text = ptx_of(mega.kernel, tmp_path)
    emulated = machine.Machine()
    # Only the counters before x must be zero.
    buffer = machine.aligned(plan.buffer.num_bytes, 1024, 0xA5)
    buffer[: plan.buffer["x"].offset] = 0
    staged = stage(x, ids, factors, config=cfg)
    regions = {
        "x": staged.tokens.values,
        "x_sf": staged.tokens.scale,
        "topk_idx": np.asarray(staged.topk_ids, np.int64),
        "topk_weights": staged.topk_weights,
    }
    assert set(regions) == set(plan.unstaged)
    for name, array in regions.items():
        octets = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        start = plan.buffer[name].offset
        buffer[start : start + octets.size] = octets
    y = machine.aligned(2 * num_tokens * cfg.hidden_size, 256, 0xFF)
    stats = machine.aligned(4 * cfg.num_experts, 256)
    addresses = {
        "symmetric_buffer": emulated.region(buffer, "buffer"),
        "y": emulated.region(y, "y"),
        "stats": emulated.region(stats, "stats"),
    }
    for name, array in weights.routed.arrays().items():
        addresses[name] = placed(emulated, array, name)
    config = mega.config
    launch = machine.Launch(
        text, parameters(mega, addresses), config.grid, config.block, (1, 1, 1), config.smem
    )
    emulated.launch([launch])
    got = y.view(ml_dtypes.bfloat16).astype(np.float32).reshape(num_tokens, cfg.hidden_size)
    want = np.asarray(mm.einsum_moe(x, ids, factors, weights, config=cfg), np.float32)
    limit = tolerances.kernel_agreement(recipe, plan.block_m)
    assert cases.relative_error(got, want) <= limit.norm
    routed = np.asarray(ids)[np.asarray(ids) >= 0]
    np.testing.assert_array_equal(stats.view(np.int32), np.bincount(routed, minlength=4))
