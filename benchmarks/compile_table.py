"""Compiles each kernel family of a source with both compilers and writes what came of it.

    python benchmarks/compile_table.py --source sgl --output benchmarks/results/compile_sgl.md
    python benchmarks/compile_table.py --model gpt-oss --source sgl \\
        --output benchmarks/results/compile_gpt_oss_sgl.md

One kernel at a time, each from nothing: every format, activation and precision of a fused shared
expert that the source's kernels have. The shape is DeepSeek-V3's over 8 ranks; 1 and 4096 tokens
give the lowest and the highest tile. ``--model gpt-oss`` takes GPT-OSS-120B and 20B instead, their
own activation, in the formats that hold their biases. ``--source humming`` compiles what
``implementation="grouped"`` launches: Qwen3-30B on one GPU of each generation, and on Hopper one
and two tokens of GPT-OSS; with it ``--model bf16`` Qwen3-30B of BF16 weights, whose products are
sgl's.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from jax_megamoe.compile import BuildError, build, find_source
from jax_megamoe.compile.builder import cache_key
from jax_megamoe.compile.cache import KernelCache
from jax_megamoe.compile.compiler import COMPILERS, Compiler
from jax_megamoe.compile.cubin import read_kernels
from jax_megamoe.config import Activation, MoEConfig
from jax_megamoe.formats import RECIPES
from jax_megamoe.plan import plan_mega_moe
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.folding import COLUMNS as COLUMNS_OF_BIAS
from jax_megamoe.plan.grouped.call import GroupedLayer
from jax_megamoe.plan.grouped.layer import plan_grouped
from jax_megamoe.plan.grouped.rules import refusal
from jax_megamoe.plan.launch import KernelLaunch, parameter_block

NUM_RANKS = 8
TOKENS = (1, 4096)
SM100, SM90 = DeviceSpec(100, 148), DeviceSpec(90, 132)
ARCHS = {
    "sgl": {100: ("sm_100f", "sm_103a"), 90: ("sm_90a",)},
    "vllm": {100: ("sm_100f", "sm_103a", "sm_103f")},
    "flashinfer": {90: ("sm_90a",)},
}
"""What to compile for, by source and device; vllm's plans for 10.3 name sm_103f, sgl's sm_100f."""
LEFT_OUT = "other clamps and fast_math=False, which are template arguments too"


ACTIVATIONS = {
    "": Activation("swiglu", clamp=10.0),
    "alpha and beta": Activation("swiglu", clamp=7.0, alpha=1.702, beta=1.0),
    "situ": Activation("situ"),
}
"""DeepSeek-V4's, GPT-OSS's and Kimi-K3's."""


SHAPES = {
    "": dict(num_experts=256, top_k=8, hidden_size=7168, intermediate_size=2048),
    "GPT-OSS's size": dict(num_experts=128, top_k=4, hidden_size=3072, intermediate_size=3072),
}
"""DeepSeek-V3's; and, for FlashInfer's source alone, an intermediate size over half the hidden
size, which its kernels take under a macro."""


GPT_OSS = {
    f"GPT-OSS-{model}": dict(num_experts=experts, top_k=4, hidden_size=3072, intermediate_size=2944)
    for model, experts in (("120B", 128), ("20B", 32))
}
"""As a block fills its sizes up and folds its biases (`plan/folding.py`)."""


def gpt_oss_cases(source: str) -> Iterator[tuple[str, MoEConfig]]:
    """The larger model in every format that holds biases, the smaller in its stored one."""
    for (model, shape), form in product(GPT_OSS.items(), COLUMNS_OF_BIAS):
        if model == "GPT-OSS-120B" or form == "mxfp4":
            activation = ACTIVATIONS["alpha and beta"]
            moe = MoEConfig(
                **shape, max_num_tokens=max(TOKENS), weight_format=form, activation=activation,
                kernel_source=source,
            )  # fmt: skip
            yield f"{form}, {model}", moe


def cases(source: str) -> Iterator[tuple[str, MoEConfig]]:
    """Experts in every format, with its activations and shared experts."""
    shapes = SHAPES if source == "flashinfer" else {"": SHAPES[""]}
    for (size, shape), form, (label, activation) in product(
        shapes.items(), RECIPES.values(), ACTIVATIONS.items()
    ):
        if activation.name not in form.functions:
            continue
        for shared in (None, *form.shared_formats):
            words = (form.name, size, label, f"shared {shared}" if shared else "")
            moe = MoEConfig(
                **shape,
                max_num_tokens=max(TOKENS),
                weight_format=form.name,
                activation=activation,
                num_shared_experts=int(shared is not None),
                shared_format=shared,
            )
            yield ", ".join(filter(None, words)), moe


GPUS = {80: 108, 89: 128, 90: 132, 100: 148, 120: 188}
"""Multiprocessors by compute capability: of an A100, RTX 4090, H200, B200 and RTX Pro 6000."""


@dataclass(frozen=True)
class Planned:
    """A launch of a case, and the tile height of its plan (0 for kernels without tiles)."""

    case: str
    block_m: int
    launch: KernelLaunch


SLOT_TOKENS = {90: (1, 256, 512, 4096), 100: (1, 512, 1024, 1536, 2048, 2304, 4096)}
"""Of the grouped products of BF16 weights: a number for each height of their tiles."""


GROUPED_QWEN3 = dict(
    num_experts=128, num_logical=128, top_k=8, hidden_size=2048, intermediate_size=768
)
GROUPED_GPT_OSS = dict(
    GROUPED_QWEN3, top_k=4, hidden_size=2944, intermediate_size=2944, biases=True
)
"""Of GPT-OSS with biases, whose first matrix has more than 4,096 rows."""


def grouped_calls(arch: int, bf16: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    """Tokens and sizes of the layers that are compiled: few tokens have tiles of their own on
    Hopper, which depend on a matrix's rows too."""
    for num_tokens in SLOT_TOKENS[arch] if bf16 else TOKENS:
        yield num_tokens, GROUPED_QWEN3
    if arch == 90 and not bf16:
        yield from product((1, 2), (GROUPED_QWEN3, GROUPED_GPT_OSS))


def grouped_launches(bf16: bool) -> Iterator[Planned]:
    """What the grouped implementation launches in each recipe with BF16 weights, or without, on
    each generation."""
    for (arch, num_sms), recipe in product(GPUS.items(), RECIPES.values()):
        weights, activations = recipe.weights.name, recipe.activations.name
        if refusal(weights, activations, arch) or bf16 != (weights == "bf16"):
            continue
        calls = grouped_calls(arch, bf16)
        scaled = {"mxfp4_block": ("tensor", "channel"), "nvfp4": ("tensor",)}
        for scale, (num_tokens, sizes) in product(scaled.get(recipe.name, ("none",)), calls):
            layer = GroupedLayer(
                arch=arch, num_sms=num_sms, num_tokens=num_tokens, weights=weights,
                activations=activations, second_scales=(scale, scale), **sizes,
            )  # fmt: skip
            plan = plan_grouped(layer)
            case = recipe.name + (", scales of rows" if scale == "channel" else "")
            case += ", biases" if layer.biases else ""
            for step in plan.launches:
                has_tiles = step.kernel.source != "jax_megamoe"
                yield Planned(case, plan.block_m if has_tiles else 0, step)


COLUMNS = (
    "kernel", "case", "BLOCK_M", "arch", "compiler", "registers", "stack", "spill stores / loads",
    "seconds", "CPU seconds", "cubin bytes", "parameter bytes",
)  # fmt: skip


def fused_launches(source: str, model: str) -> Iterator[Planned]:
    """What `deep_gemm` launches in the cases, for each architecture."""
    for case, moe in (gpt_oss_cases if model == "gpt-oss" else cases)(source):
        for num_tokens, device in product(TOKENS, (SM90, SM100)):
            try:
                plan = plan_mega_moe(moe, device, num_tokens, NUM_RANKS, source)
            except (NotImplementedError, ValueError):
                continue  # another source's, or another device's
            for step in plan.launches:
                height = plan.block_m if step is plan.steps[-1] else 0  # staging has no tiles
                for arch in ARCHS[source][device.arch]:
                    kernel = dataclasses.replace(step.kernel, arch=arch)
                    yield Planned(case, height, dataclasses.replace(step, kernel=kernel))


def planned(source: str, model: str) -> Iterator[Planned]:
    """The first launch of every distinct kernel."""
    seen: set[object] = set()
    is_grouped = source == "humming"
    launches = grouped_launches(model == "bf16") if is_grouped else fused_launches(source, model)
    for each in launches:
        if each.launch.kernel not in seen:
            seen.add(each.launch.kernel)
            yield each


def row(item: Planned, compiler: Compiler, cache: KernelCache) -> tuple[list[str], bool]:
    """A line of the table, and whether the cubin's parameter block is the plan's."""
    spec = item.launch.kernel
    start = [spec.symbol, item.case, str(item.block_m or "-"), spec.arch, compiler.name]
    cpu_seconds = -sum(os.times()[:4])
    try:
        cubin = build(spec, compiler=compiler, cache=cache, policy="auto")
    except BuildError as error:
        complaint = next((x for x in str(error).splitlines() if "error" in x), str(error))
        return [*start, complaint.strip()[:120], *[""] * (len(COLUMNS) - len(start) - 1)], False
    cpu_seconds += sum(os.times()[:4])  # this process and the compilers it waited for
    stem = cache_key(spec, find_source(spec.source), compiler).stem
    found = json.loads((cache.folder / f"{stem}.json").read_text())
    (kernel,) = read_kernels(cubin)
    values = [
        str(found["registers"]),
        str(found["stack_bytes"]),
        f"{found['spill_store_bytes']} / {found['spill_load_bytes']}",
        f"{found['seconds']:.1f}",
        f"{cpu_seconds:.1f}",
        str(found["cubin_bytes"]),
        str(kernel.parameter_bytes),
    ]
    return start + values, kernel.parameters == parameter_block(item.launch)


def table(source: str, output: Path, model: str) -> None:
    """Compiles everything and writes the table."""
    compilers = list(installed())
    option = f" --model {model}" if model else ""
    lines: list[str] = []
    num_equal = 0
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        for item in planned(source, model):
            for compiler in compilers:
                cells, equal = row(item, compiler, KernelCache(Path(folder)))
                num_equal += equal
                lines.append(f"| {' | '.join(cells)} |")
                print(lines[-1], flush=True)
    shown = "sgl" if model == "bf16" else source
    text = [
        f"# Kernels of {shown} {find_source(shown).version}, compiled from wheels",
        "",
        f"    python benchmarks/compile_table.py{option} --source {source} --output {output}",
        "",
        *(f"- {compiler.name} {compiler.version}" for compiler in compilers),
        f"- wheels: {wheels()}",
        f"- {os.cpu_count()} processors, load {load:.1f} before the first kernel, one at a time",
        f"- {num_equal} of {len(lines)} cubins hold one kernel whose parameter block (offset and "
        "size of each parameter) is the plan's",
        f"- left out: {LEFT_OUT}; kernels and options that mega_moe does not launch",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
        *lines,
    ]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n".join([*text, ""]))


def installed() -> Iterator[Compiler]:
    """The compilers that are here; what the others lack is printed."""
    for make in COMPILERS.values():
        try:
            yield make()
        except BuildError as error:
            print(error, flush=True)


def wheels() -> str:
    names = ("cuda-bindings", "nvrtc", "nvcc", "runtime", "cccl", "crt")
    found: list[str] = []
    for name in (n if n == "cuda-bindings" else f"nvidia-cuda-{n}" for n in names):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--source", default="sgl", choices=(*ARCHS, "humming"))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/compile_sgl.md"))
    parser.add_argument("--model", default="", choices=("", "gpt-oss", "bf16"))
    arguments = parser.parse_args()
    table(arguments.source, arguments.output, arguments.model)
