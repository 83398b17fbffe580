"""xla.py against reference.py: every format, activation, shared expert, rank count and load."""

from functools import partial
from typing import Any

import cases
import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import jax_megamoe as mm
from jax_megamoe.weights.params import parameter_shapes

TOKENS = 64
RANKS = (1, 2, 4, 8)

Outputs = dict[str, tuple[np.ndarray, np.ndarray]]


def run(cfg: mm.MoEConfig, weights: mm.ExpertWeights, mesh: Mesh | None, **kwargs: Any) -> Outputs:
    """y and counts of every routing, one compiled function for all."""
    x, _, factors = cases.tokens(cfg, TOKENS)
    place = {} if mesh is None else dict(mesh=mesh, axis="ep")
    call = jax.jit(partial(mm.mega_moe, config=cfg, return_stats=True, **place, **kwargs))
    outputs = {}
    for name, (ids, mask) in cases.routings(cfg, TOKENS).items():
        y, counts = call(x, ids, factors, weights, padding_mask=mask)
        outputs[name] = np.asarray(y, np.float32), np.asarray(counts)
    return outputs


def mesh_of(num_ranks: int) -> Mesh | None:
    """Auto axes, but Explicit ones for 4 ranks; none for 1."""
    kind = AxisType.Explicit if num_ranks == 4 else AxisType.Auto
    return None if num_ranks == 1 else cases.ep_mesh(num_ranks, kind)


def assert_right(
    cfg: mm.MoEConfig, weights: mm.ExpertWeights, ranks: tuple[int, ...] = RANKS, **kwargs: Any
) -> None:
    """xla on every number of ranks against reference on one, counts against bincount."""
    form = cfg.weight_format.name
    want = run(cfg, weights, None, implementation="reference", **kwargs)
    one: Outputs = {}
    for num_ranks in ranks:
        got = run(cfg, weights, mesh_of(num_ranks), implementation="xla", **kwargs)
        one = one or got
        for name, (ids, mask) in cases.routings(cfg, TOKENS).items():
            where = f"{name} over {num_ranks} ranks"
            y, counts = got[name]
            cases.assert_agree(y, want[name][0], form, where)
            if "shared_experts" not in kwargs:  # XLA splits the caller's function as it likes.
                np.testing.assert_array_equal(y, one[name][0], f"{where}, against 1 rank")
            assert not y[mask].any(), f"{where}: padded rows are not 0"
            expected = cases.counts_of(ids, mask, cfg.num_experts)
            np.testing.assert_array_equal(counts, expected, where)
            np.testing.assert_array_equal(want[name][1], expected, f"{where}, reference")


def activation(form: str, name: str) -> mm.Activation:
    """The activation with every parameter that its name has at work."""
    assert name in mm.RECIPES[form].functions
    return cases.ACTIVATIONS[{"swiglu": "gpt_oss", "situ": "situ"}[name]]


CELLS = [
    (form, name, num_shared)
    for form in cases.RECIPES
    for name in mm.RECIPES[form].functions
    for num_shared in (0, 1, 2)
]


@pytest.mark.parametrize(("form", "name", "num_shared"), CELLS)
def test_equals_reference(form: str, name: str, num_shared: int) -> None:
    cfg = cases.config(form, activation=activation(form, name), num_shared_experts=num_shared)
    weights = cases.weights(cfg)
    fused = weights.shared is not None
    kwargs = dict(shared_experts=cases.dense_mlp(cfg)) if num_shared and not fused else {}
    assert_right(cfg, weights, **kwargs)


PARAMETERS = [
    (form, name)
    for form in cases.RECIPES
    for name in cases.activations_of(form)
    if name not in ("gpt_oss", "situ")
]


@pytest.mark.parametrize(("form", "name"), PARAMETERS)
def test_equals_reference_with_other_parameters_of_the_activation(form: str, name: str) -> None:
    cfg = cases.config(form, activation=cases.ACTIVATIONS[name])
    assert_right(cfg, cases.weights(cfg), ranks=(1, 2))


@pytest.mark.parametrize("num_shared", [1, 2])
def test_equals_reference_with_a_bf16_shared_expert_in_nvfp4(num_shared: int) -> None:
    cfg = cases.config("nvfp4", num_shared_experts=num_shared, shared_format="bf16")
    weights = cases.weights(cfg)
    assert weights.shared is not None and weights.shared.w13_weight_scale is None
    assert_right(cfg, weights, ranks=(1, 4))


@pytest.mark.parametrize("num_shared", [0, 1])
def test_equals_reference_with_an_unfused_shared_expert(num_shared: int) -> None:
    """A function is added whether or not the config speaks of shared experts."""
    cfg = cases.config("mxfp8")
    shared = cases.dense_mlp(cases.config("mxfp8", num_shared_experts=1))
    weights = cases.weights(cfg)
    cfg = cases.config("mxfp8", num_shared_experts=num_shared)
    assert_right(cfg, weights, ranks=(1, 4), shared_experts=shared)


@pytest.mark.parametrize("form", ["bf16", "mxfp4", "nvfp4", "fp8_block"])
def test_equals_reference_with_biases(form: str) -> None:
    cfg = cases.config(form)
    assert_right(cfg, cases.weights(cfg, biased=True), ranks=(1, 4))


def test_equals_reference_in_sgls_row_order() -> None:
    cfg = cases.config("nvfp4", kernel_source="sgl")
    weights = cases.weights(cfg)
    assert weights.layout == "sgl_fp4"
    assert_right(cfg, weights, ranks=(1, 2))


@pytest.mark.parametrize("form", ["bf16", "nvfp4"])
def test_reference_over_ranks_equals_reference_on_one(form: str) -> None:
    cfg = cases.config(form, num_shared_experts=1)
    weights = cases.weights(cfg)
    one = run(cfg, weights, None, implementation="reference")
    for num_ranks in (2, 8):
        got = run(cfg, weights, mesh_of(num_ranks), implementation="reference")
        for name, (y, counts) in got.items():
            np.testing.assert_array_equal(y, one[name][0], f"{name} over {num_ranks} ranks")
            np.testing.assert_array_equal(counts, one[name][1])


def test_one_expert_whose_input_scale_is_8_times_the_others() -> None:
    """Every rank quantises with the largest scale of all ranks (vllm#26135)."""
    cfg = cases.config("nvfp4")
    scales = np.full(cfg.num_experts, 0.2, np.float32)
    scales[7] *= 8
    parts = cases.float_matrices(cfg, gain=4.0)["routed"]
    weights = mm.quantize_experts(cfg, *parts, w2_input_scale=scales)
    assert_right(cfg, weights, ranks=(1, 4))


def test_a_rank_with_many_rounds() -> None:
    """More rows for one rank than one exchange carries, and fewer than fill the last one."""
    cfg = cases.config("mxfp8", max_num_tokens=400)
    weights = cases.weights(cases.config("mxfp8"))
    x, ids, factors = cases.tokens(cfg, 400)
    ids = ids % 3
    call = partial(mm.mega_moe, x, ids, factors, weights, config=cfg, implementation="xla")
    one, many = call(), call(mesh=cases.ep_mesh(8), axis="ep")
    np.testing.assert_array_equal(np.asarray(many, np.float32), np.asarray(one, np.float32))
    assert np.asarray(one, np.float32).any(axis=1).sum() == 399


@pytest.mark.parametrize("form", cases.RECIPES)
def test_experts_are_decoded_one_at_a_time(form: str) -> None:
    """Temporary memory does not grow with the number of experts."""

    def temporary(num_experts: int) -> int:
        cfg = cases.config(form, num_experts=num_experts)
        weights = parameter_shapes(cfg)
        call = jax.jit(partial(mm.mega_moe, config=cfg, implementation="xla"))
        compiled = call.lower(*cases.tokens(cfg, TOKENS), weights).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    one_expert = 3 * 256 * 128 * 4
    assert temporary(128) - temporary(16) < one_expert
