"""Humming in its own process: a layer by its indexed products, as vLLM calls them on one GPU.

Sort, [FP8 tokens], product, SwiGLU [to FP8], product, weighted sum. The products, the steps between
them, their tiles and their compiler are the package's; the first and the last are `torch_sort`.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

_FOLDERS = ("HUMMING_CACHE_DIR", "HUMMING_TMP_DIR")
for _name in _FOLDERS:  # read as its modules are imported
    os.environ.setdefault(_name, str(Path(tempfile.gettempdir()) / _name.lower()))

import torch  # noqa: E402  # pyright: ignore[reportMissingImports]
from humming import dtypes, ops  # noqa: E402  # pyright: ignore[reportMissingImports]
from humming.config import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    InputQuantizationMode,
    ProcessInputProblemConfig,
    WeightScaleType,
)
from humming.forward import may_process_input  # noqa: E402  # pyright: ignore[reportMissingImports]
from humming.kernel.humming import HummingKernel  # noqa: E402  # pyright: ignore[reportMissingImports]
from humming.kernel.process_input import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    ProcessInputKernel,
)
from humming.schema import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    HummingInputSchema,
    HummingWeightSchema,
)
from humming.transform import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    prepare_and_transform_humming_tensors,
    prepare_layer_config,
)
from humming.tune import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    get_heuristics_class,
    get_heuristics_config,
)
from humming.tune.process_input import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    get_process_input_tuning_intervals,
)
from humming.utils.nvrtc import get_nvrtc_library_path  # noqa: E402  # pyright: ignore[reportMissingImports]

from jax_megamoe.cli.gpu.models import BF16_ROWS, Model  # noqa: E402
from jax_megamoe.cli.gpu.torch_sort import Aligned, count, weighted_sum  # noqa: E402
from jax_megamoe.cli.gpu.torch_weights import Matrix, layer, random_matrix  # noqa: E402

_INDEXED = {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "indexed"}
_EVERY = 1 << 30
_LOCKS = 1 << 14


def _schemas(recipe: str) -> tuple[Any, Any]:
    """Its words for the weights and for the rows of a recipe."""
    if recipe == "fp8_block":
        weights = HummingWeightSchema(
            b_dtype=dtypes.float8e4m3,
            bs_dtype=dtypes.float32,
            weight_scale_group_size=128,
            weight_scale_group_size_n=128,
            weight_scale_type=WeightScaleType.BLOCK,
        )
    else:
        weights = HummingWeightSchema(
            b_dtype=dtypes.float4e2m1, bs_dtype=dtypes.float8e8m0, weight_scale_group_size=32
        )
    if recipe == BF16_ROWS:
        return weights, HummingInputSchema()
    rows = HummingInputSchema(
        a_dtype=dtypes.float8e4m3,
        input_scale_group_size=128,
        input_scale_dtype=dtypes.float32,
        input_quant_mode=InputQuantizationMode.DynamicGroup,
    )
    return weights, rows


def _sizes(model: Model) -> tuple[tuple[int, int], tuple[int, int]]:
    """N and K of both products."""
    hidden, inter = model.hidden_size, model.intermediate_size
    return (2 * inter, hidden), (hidden, inter)


def _options(model: Model, recipe: str) -> dict[str, Any]:
    weights, rows = _schemas(recipe)
    return dict(
        weight_schema=weights,
        input_schema=rows,
        num_experts=model.num_experts,
        pad_n_to_multiple=256,
        pad_k_to_multiple=128,
        has_bias=model.has_biases,
        torch_dtype=torch.bfloat16,
        device=0,
    )


def _tuning(config: Any, rows: int) -> Any:
    """Tiles for so many rows, of all experts."""
    sample = get_heuristics_class(0).get_shape_m_sample(config, rows)
    return get_heuristics_config(config, shape_m=sample, gemm_type="indexed")


def _kernel(config: Any, rows: int) -> Any:
    """The compiled product for so many rows."""
    interval = [[0, _EVERY, _tuning(config, rows)]]
    return HummingKernel.prepare_kernels(config.to_str(), _INDEXED, interval, device=0)


def activation_of(model: Model) -> dict[str, str]:
    """The gated activation as an expression of a, the gate, and b."""
    act, gate, up = model.activation, "a", "b"
    if act.clamp is not None:
        gate = f"fminf(a, {act.clamp}f)"
        up = f"fminf(fmaxf(b, {-act.clamp}f), {act.clamp}f)"
    if act.beta:
        up = f"({up} + {act.beta}f)"
    text = f"({gate} / (1.f + expf(-{act.alpha}f * {gate}))) * {up}"
    return dict(activation_type="binary_split", activation_impl=text)


def _steps(configs: Sequence[Any], model: Model) -> list[Any]:
    """The kernels before each product: tokens to FP8, and the activation."""
    found = []
    widths = (model.hidden_size, model.intermediate_size)
    for config, width, more in zip(configs, widths, ({}, activation_of(model)), strict=True):
        how = {}
        if config.input_quant_mode.should_quantize:
            how = dict(
                quant_mode=config.input_quant_mode.value,
                quant_dtype=config.a_dtype.dtype_str,
                quant_group_size=config.input_scale_group_size or None,
                group_scale_dtype=config.as_dtype.dtype_str,
            )
        if how or more:
            like = dict(input_dtype=dtypes.bfloat16, hidden_size=width)
            found.append(ProcessInputProblemConfig(**like, **how, **more))
    return found


def _compile_step(config: Any) -> None:
    for overlaps in (False, True):
        intervals = get_process_input_tuning_intervals(config, overlaps)
        ProcessInputKernel.prepare_kernels(config, intervals, 0)


def _around(num_tokens: int, top_k: int, experts: int, hidden: int, block: int) -> None:
    """Runs the first and the last step once, which compiles them."""
    ids = torch.zeros((num_tokens, top_k), dtype=torch.int32, device="cuda")
    counts = torch.zeros(experts, dtype=torch.int32, device="cuda")
    count(ids, counts)
    Aligned(num_tokens * top_k, experts, block).place(ids, counts)
    rows = torch.zeros((num_tokens * top_k, hidden), dtype=torch.bfloat16, device="cuda")
    weighted_sum(rows, torch.zeros(ids.shape, device="cuda"), rows[:num_tokens])
    torch.cuda.synchronize()


def _compiler() -> str:
    """Its own choice, NVRTC, where that has its library and headers."""
    try:
        get_nvrtc_library_path()
    except Exception:  # how it fails depends on what of CUDA is found
        return "nvcc"
    return "nvrtc"


class Humming:
    """Layers by its products."""

    def __init__(self) -> None:
        self._matrices: tuple[Matrix, Matrix] | None = None
        self._model: Model | None = None
        torch.cuda.set_device(0)
        torch.zeros(1, device="cuda")

    def versions(self) -> dict[str, str]:
        """Of Humming and torch."""
        return {name: version(name) for name in ("humming-kernels", "torch")}

    def compile(self, cells: Sequence[tuple[Model, str]], token_counts: Sequence[int]) -> None:
        """Every product and step, several at a time."""
        jobs: dict[str, Callable[[], Any]] = {}
        for model, recipe in cells:
            configs = [
                prepare_layer_config(shape_n=n, shape_k=k, **_options(model, recipe))
                for n, k in _sizes(model)
            ]
            for config in configs:
                for each in token_counts:
                    tuning = _tuning(config, each * model.top_k)
                    name = f"{config.to_str()} {tuning}"
                    jobs[name] = partial(_kernel, config, each * model.top_k)
                    block = tuning["block_shape"][0]
                    sizes = each, model.top_k, model.num_experts, model.hidden_size
                    jobs[f"{sizes} {block}"] = partial(_around, *sizes, block)
            for step in _steps(configs, model):
                jobs[str(step)] = partial(_compile_step, step)

        def run(job: Callable[[], Any]) -> str:
            try:
                with torch.cuda.device(0):
                    job()
            except Exception as error:  # said again where the layer is called
                return repr(error)
            return ""

        for compiler in (_compiler(), "nvcc"):
            os.environ["HUMMING_COMPILER"] = compiler
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                failed = [said for said in pool.map(run, jobs.values()) if said]
            words = f"{len(jobs)} kernels by {compiler}, {len(failed)} failed"
            print(words, *failed[:3], file=sys.stderr, flush=True)
            if len(failed) * 2 <= len(jobs):
                break

    def prepare(self, model: Model, recipe: str) -> Callable[[int], Any]:
        """Random parameters in its layout."""
        self._matrices, self._model = None, model
        torch.cuda.empty_cache()
        sizes, options = _sizes(model), _options(model, recipe)
        drawn = [
            random_matrix((model.num_experts, n, k), recipe, seed)
            for seed, (n, k) in enumerate(sizes, 1)
        ]
        self._matrices = drawn[0], drawn[1]
        made = [
            prepare_and_transform_humming_tensors(
                tensors=_tensors(each, model), shape_n=n, shape_k=k, **options
            )
            for each, (n, k) in zip(drawn, sizes, strict=True)
        ]
        return partial(_layer, model, made)

    def reference(self, x: Any, routing: tuple[Any, Any]) -> Any:
        """The layer in float32."""
        assert self._matrices is not None and self._model is not None
        return layer(x, routing, self._matrices, self._model, pairs=False)


def _tensors(matrix: Matrix, model: Model) -> dict[str, Any]:
    """A matrix as a checkpoint has it; biases are zero."""
    found = {"weight": matrix.codes.view(torch.int32), "weight_scale": matrix.scale}
    if matrix.scale.dtype == torch.uint8:
        found["weight_scale"] = matrix.scale.view(torch.float8_e8m0fnu)
    if model.has_biases:
        shape = matrix.codes.shape[:2]
        found["bias"] = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    return found


def _layer(model: Model, made: Sequence[tuple[Any, dict[str, Any]]], num_tokens: int) -> Any:
    """f(x, routing) -> y for so many tokens, with its buffers."""
    slots = num_tokens * model.top_k
    like = dict(device="cuda", dtype=torch.bfloat16)
    widths = (2 * model.intermediate_size, model.hidden_size)
    outs = [torch.empty((slots, width), **like) for width in widths]
    y = torch.empty((num_tokens, model.hidden_size), **like)
    locks = torch.zeros(_LOCKS, dtype=torch.int32, device="cuda")
    counts = torch.zeros(model.num_experts, dtype=torch.int32, device="cuda")
    kernels = [_kernel(config, slots) for config, _ in made]
    blocks = [_tuning(config, slots)["block_shape"][0] for config, _ in made]
    tables = {block: Aligned(slots, model.num_experts, block) for block in set(blocks)}
    step = activation_of(model)

    def product(which: int, rows: Any, scale: Any) -> None:
        table, tensors = tables[blocks[which]], made[which][1]
        ops.launch_kernel(
            configs=kernels[which],
            inputs=rows,
            outputs=outs[which],
            input_scale=scale,
            locks=locks,
            sorted_ids=table.slots,
            expert_ids=table.blocks,
            num_tokens_padded=table.used,
            # Slot s reads the row of its token first, then its own.
            top_k=(model.top_k, 1)[which],
            valid_shape_m=slots,
            **{f"{name}": tensors.get(name) for name in _NAMES},
        )

    def quantised(which: int, rows: Any, **more: str) -> tuple[Any, Any]:
        out, group, token = may_process_input(made[which][0], inputs=rows, **more)
        return out, group if group is not None else token

    def call(x: Any, routing: tuple[Any, Any]) -> Any:
        ids, factors = routing
        count(ids, counts)
        for table in tables.values():
            table.place(ids, counts)
        product(0, *quantised(0, x))
        product(1, *quantised(1, outs[0], **step))
        weighted_sum(outs[1], factors, y)
        return y

    return call


_NAMES = ("weight", "weight_scale", "weight_scale_2", "bias")

PEER = Humming
