"""triton_kernels in its own process: MXFP4 experts, BF16 tokens, its routing included.

Its own package, or the copy that vLLM ships. Its SwiGLU adds 1 to up, as GPT-OSS has it; layers of
other activations are timed with that too.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

import torch  # pyright: ignore[reportMissingImports]

from jax_megamoe.cli.gpu.models import Model
from jax_megamoe.cli.gpu.torch_weights import Matrix, layer, random_matrix

_VLLM = "vllm.third_party.triton_kernels"
_NO_LIMIT = 1e30


def _package() -> Any:
    """`triton_kernels` with its `matmul_ogs`.

    Raises:
        ImportError: there is none, or another.
    """
    name, ships_it = "triton_kernels", _VLLM.partition(".")[0]
    if importlib.util.find_spec(name) is None and importlib.util.find_spec(ships_it) is not None:
        sys.modules[name] = importlib.import_module(_VLLM)
    package = importlib.import_module(name)
    parts = ("matmul_ogs", "routing", "swiglu", "tensor", "tensor_details.layout")
    for part in (*parts, "matmul_ogs_details.opt_flags"):
        importlib.import_module(f"{name}.{part}")
    return package


class TritonKernels:
    """Layers as vLLM calls them on Hopper."""

    def __init__(self) -> None:
        self._of = _package()
        self._matrices: tuple[Matrix, Matrix] | None = None
        self._model: Model | None = None
        if torch.cuda.get_device_capability()[0] == 9:
            # vLLM: products are not cut along K there.
            self._of.matmul_ogs_details.opt_flags.update_opt_flags_constraints({"split_k": 1})

    def versions(self) -> dict[str, str]:
        """Of torch and Triton; triton_kernels has none."""
        return {name: version(name) for name in ("torch", "triton")}

    def compile(self, cells: Sequence[tuple[Model, str]], token_counts: Sequence[int]) -> None:
        """Calls each layer once, several at a time: Triton compiles as it launches."""
        for model, recipe in cells:
            prepared = self.prepare(model, recipe)
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                done = [pool.submit(self._try, prepared, model, each) for each in token_counts]
            for each in done:
                if each.exception() is not None:
                    print(model.title, each.exception(), file=sys.stderr)
        self._matrices = None
        torch.cuda.empty_cache()

    def _try(self, prepared: Callable[[int], Any], model: Model, num_tokens: int) -> None:
        x = torch.zeros((num_tokens, model.hidden_size), dtype=torch.bfloat16, device="cuda")
        ids = torch.arange(num_tokens * model.top_k, dtype=torch.int32, device="cuda")
        ids = (ids % model.num_experts).reshape(num_tokens, -1)
        prepared(num_tokens)(x, (ids, torch.ones(ids.shape, device="cuda") / model.top_k))
        torch.cuda.synchronize()

    def prepare(self, model: Model, recipe: str) -> Callable[[int], Any]:
        """Random parameters, swizzled as vLLM does."""
        experts, hidden, inter = model.num_experts, model.hidden_size, model.intermediate_size
        self._matrices, self._model = None, model
        torch.cuda.empty_cache()
        w13 = random_matrix((experts, 2 * inter, hidden), recipe, 1)
        w2 = random_matrix((experts, hidden, inter), recipe, 2)
        self._matrices = w13, w2
        first, second = self._swizzled(w13), self._swizzled(w2)
        biases = None, None
        if model.has_biases:
            biases = (
                torch.zeros((experts, 2 * inter), device="cuda"),
                torch.zeros((experts, hidden), device="cuda"),
            )
        products = self._of.matmul_ogs
        limit = model.activation.clamp or _NO_LIMIT
        specs = products.FnSpecs("swiglu", self._of.swiglu.swiglu_fn, ("alpha", "limit"))
        act = products.FusedActivation(specs, (model.activation.alpha, limit), 2)

        def call(known: dict[int, Any], x: Any, routing: tuple[Any, Any]) -> Any:
            # Its routing starts from logits: those of the same experts and weights.
            key = routing[0].data_ptr()
            if key not in known:
                known[key] = _logits(routing, experts)
            where, gather, scatter = self._of.routing.routing(known[key], model.top_k)
            h = products.matmul_ogs(
                x, first[0], biases[0], where, gather_indx=gather,
                precision_config=products.PrecisionConfig(weight_scale=first[1]),
                fused_activation=act,
            )  # fmt: skip
            return products.matmul_ogs(
                h, second[0], biases[1], where, scatter_indx=scatter,
                precision_config=products.PrecisionConfig(weight_scale=second[1]),
                gammas=where.gate_scal,
            )  # fmt: skip

        def of(num_tokens: int) -> Any:
            del num_tokens
            return partial(call, {})

        return of

    def _swizzled(self, matrix: Matrix) -> tuple[Any, Any]:
        """Codes and scales, K before N, in the device's layouts."""
        layouts, tensor = self._of.tensor_details.layout, self._of.tensor
        places = (
            layouts.make_default_matmul_mxfp4_w_layout(mx_axis=1),
            layouts.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8),
        )
        scale = torch.nn.functional.pad(matrix.scale, (0, -matrix.scale.shape[-1] % 4))
        wrapped = (
            tensor.wrap_torch_tensor(matrix.codes.mT, dtype=tensor.FP4),
            tensor.wrap_torch_tensor(scale.mT),
        )
        codes, scales = (
            tensor.convert_layout(each, kind, **options)
            for each, (kind, options) in zip(wrapped, places, strict=True)
        )
        return codes, scales

    def reference(self, x: Any, routing: tuple[Any, Any]) -> Any:
        """The layer in float32, with its own SwiGLU."""
        assert self._matrices is not None and self._model is not None
        own = replace(self._model.activation, beta=1.0)
        return layer(x, routing, self._matrices, replace(self._model, activation=own), pairs=True)


def _logits(routing: tuple[Any, Any], experts: int) -> Any:
    """bfloat16 [T, E], as a router gives them, whose top-k and their softmax are the routing."""
    ids, factors = routing
    logits = torch.full((ids.shape[0], experts), -1e4, device=ids.device)
    return logits.scatter_(1, ids.long(), factors.log()).bfloat16()


PEER = TritonKernels
