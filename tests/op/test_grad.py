"""Gradients of mega_moe and einsum_moe: against plain einsums, differences and each other."""

from collections.abc import Callable
from functools import partial
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from emulation import Emulation
from emulation import config as kernel_config
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_megamoe as mm
from jax_megamoe.weights.experts import dequantize_shared
from jax_megamoe.weights.params import parameter_shapes

TOKENS = 32
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "reference"])

Gradients = tuple[jax.Array, jax.Array]


def config(form: str, **changes: Any) -> mm.MoEConfig:
    """With a fused shared expert where the format can."""
    return cases.config(form, **(dict(num_shared_experts=int(form in cases.FUSING)) | changes))


def loss_of(y: jax.Array) -> jax.Array:
    """A sum with a weight for each value."""
    return jnp.sum(y.astype(jnp.float32) * jax.random.normal(jax.random.key(5), y.shape))


def gradients(cfg: mm.MoEConfig, *routings: Any, **kwargs: Any) -> list[Gradients]:
    """Of x and topk_weights, by `mega_moe`, for each topk_ids."""
    x, _, factors = cases.tokens(cfg, TOKENS)
    options = dict(implementation="xla", weights=cases.weights(cfg)) | kwargs
    weights = options.pop("weights")

    def loss(x: Any, factors: Any, ids: Any, weights: mm.ExpertWeights) -> jax.Array:
        return loss_of(mm.mega_moe(x, ids, factors, weights, config=cfg, **options))

    both = jax.jit(jax.grad(loss, argnums=(0, 1)))
    return [both(x, factors, ids, weights) for ids in routings]


def plain(cfg: mm.MoEConfig, ids: jax.Array) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The layer in float32 einsums, from the dequantised weights; plain SwiGLU."""
    weights = cases.weights(cfg)
    gate, up, down = mm.dequantize_experts(cfg, weights)
    one_hot = jax.nn.one_hot(ids, cfg.num_experts)  # zeros for -1

    def apply(x: jax.Array, factors: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        act = jax.nn.silu(jnp.einsum("th,eih->tei", x, gate)) * jnp.einsum("th,eih->tei", x, up)
        y = jnp.einsum("tei,ehi,tke,tk->th", act, down, one_hot, factors)
        if weights.shared is not None:
            gate_s, up_s, down_s = dequantize_shared(cfg, weights)
            y += (jax.nn.silu(x @ gate_s.T) * (x @ up_s.T)) @ down_s.T
        return y

    return apply


def assert_close(got: Gradients, want: Gradients, limit: tolerances.Gradient, where: str) -> None:
    for name, g, w, allowed in zip(("x", "topk_weights"), got, want, limit, strict=True):
        assert np.isfinite(np.asarray(g, np.float32)).all(), f"{where}: {name}"
        error = cases.relative_error(g, w)
        assert error <= allowed, f"{where}: {name} has relative error {error}, allowed {allowed}"


@pytest.mark.parametrize("form", cases.FORMATS)
def test_equal_those_of_plain_einsums(form: str) -> None:
    """And xla's equal reference's, whose rules are JAX's own."""
    cfg = config(form)
    x, ids, factors = cases.tokens(cfg, TOKENS)
    ids = ids.at[1].set(-1).at[2, 0].set(-1).at[3, 1].set(ids[3, 0])
    apply = plain(cfg, ids)
    want = jax.jit(jax.grad(lambda *args: loss_of(apply(*args)), argnums=(0, 1)))(x, factors)
    (xla,), (reference,) = (
        gradients(cfg, ids, implementation=name) for name in ("xla", "reference")
    )
    assert_close(xla, want, tolerances.GRADIENTS[form], f"xla {form}")
    assert_close(reference, want, tolerances.GRADIENTS[form], f"reference {form}")
    assert_close(xla, reference, tolerances.GRADIENT_AGREEMENT[form], f"xla, reference {form}")
    assert xla[0].dtype == jnp.bfloat16 and xla[1].dtype == jnp.float32
    assert not np.asarray(xla[1])[np.asarray(ids) < 0].any()


@pytest.mark.parametrize("form", ["mxfp8", "nvfp4", "fp8_block"])
@pytest.mark.parametrize("activation", ["gpt_oss", "situ"])
def test_other_activations_and_biases(form: str, activation: str) -> None:
    if activation not in cases.activations_of(form):
        activation = "clamped"
    cfg = config(form, activation=cases.ACTIVATIONS[activation])
    ids, biased = cases.tokens(cfg, TOKENS)[1], cases.weights(cfg, biased=True)
    (xla,), (reference,) = (
        gradients(cfg, ids, implementation=name, weights=biased) for name in ("xla", "reference")
    )
    assert_close(xla, reference, tolerances.GRADIENT_AGREEMENT[form], f"{form} {activation}")


@pytest.mark.parametrize("form", ["bf16", "nvfp4"])
def test_exact_einsums_equal_differences(form: str) -> None:
    cfg = config(form, activation=cases.ACTIVATIONS["gpt_oss"])
    x, ids, factors = cases.tokens(cfg, TOKENS)
    inputs = x.astype(jnp.float32), factors
    weights = cases.weights(cfg, gain=1.0)
    directions = tuple(
        jax.random.normal(key, a.shape)
        for key, a in zip(jax.random.split(jax.random.key(0)), inputs, strict=True)
    )

    @jax.jit
    def loss(x: jax.Array, factors: jax.Array) -> jax.Array:
        return loss_of(mm.einsum_moe(x, ids, factors, weights, config=cfg, exact=True))

    slopes = jax.grad(loss, argnums=(0, 1))(*inputs)
    for index, direction in enumerate(directions):
        step = jnp.float32(1e-2) * direction
        ahead, behind = (
            loss(*(a + sign * step if i == index else a for i, a in enumerate(inputs)))
            for sign in (1.0, -1.0)
        )
        want = float(jnp.sum(slopes[index] * direction))
        np.testing.assert_allclose((ahead - behind) / 2e-2, want, rtol=tolerances.DIFFERENCES)
    tangents = jax.tree.map(jnp.zeros_like, inputs)
    _, forward = jax.jvp(loss, inputs, (directions[0], tangents[1]))
    np.testing.assert_allclose(forward, jnp.sum(slopes[0] * directions[0]), rtol=1e-4)


def test_forward_mode() -> None:
    """Of einsum_moe; mega_moe has none, which JAX says."""
    cfg = config("mxfp8")
    x, ids, factors = cases.tokens(cfg, TOKENS)
    weights = cases.weights(cfg)
    tangent = jax.random.normal(jax.random.key(1), x.shape, jnp.bfloat16)

    def loss(x: jax.Array) -> jax.Array:
        return loss_of(mm.einsum_moe(x, ids, factors, weights, config=cfg))

    want = jnp.sum((jax.grad(loss)(x) * tangent).astype(jnp.float32))
    np.testing.assert_allclose(jax.jvp(loss, (x,), (tangent,))[1], want, rtol=5e-2)
    call = partial(mm.mega_moe, config=cfg, implementation="xla")
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: call(x, ids, factors, weights), (x,), (tangent,))


# Ranks.


@pytest.mark.parametrize(
    ("form", "implementation", "kind"),
    [
        ("mxfp4", "xla", AxisType.Auto),
        ("nvfp4", "xla", AxisType.Explicit),
        ("fp8_block", "xla", AxisType.Auto),
        ("nvfp4", "reference", AxisType.Auto),
    ],
)
def test_over_ranks_equal_those_on_one(form: str, implementation: str, kind: AxisType) -> None:
    """Also when one rank gets everything, in many rounds, and the first rank has no tokens."""
    cfg = config(form)
    names = ("random", "idle first rank, all to the last")
    routings = [jnp.asarray(cases.routings(cfg, TOKENS)[name][0]) for name in names]
    one = gradients(cfg, *routings, implementation=implementation)
    place = dict(mesh=cases.ep_mesh(4, kind), axis="ep")
    many = gradients(cfg, *routings, implementation=implementation, **place)
    for name, got, want in zip(names, many, one, strict=True):
        assert_close(got, want, tolerances.GRADIENTS_OVER_RANKS, f"{form}, {name}")


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_the_callers_shard_map(check_vma: bool) -> None:
    """Also for tokens that all ranks have alike: their gradients add up."""
    cfg, mesh = config("mxfp8"), cases.ep_mesh(4)
    x, ids, factors = cases.tokens(cfg, TOKENS)
    weights, rows = cases.weights(cfg), P("ep")

    def loss(x: jax.Array, factors: jax.Array, spec: P) -> jax.Array:
        def local(x: Any, ids: Any, factors: Any, weights: Any) -> jax.Array:
            y = mm.mega_moe(x, ids, factors, weights, config=cfg, axis="ep", implementation="xla")
            return (y.astype(jnp.float32) ** 2).sum()[None]

        call = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(spec, spec, spec, weights.partition_specs("ep")),
            out_specs=rows,
            check_vma=check_vma,
        )
        return call(x, ids, factors, weights).sum()

    def one(x: jax.Array, factors: jax.Array) -> jax.Array:
        y = mm.mega_moe(x, ids, factors, weights, config=cfg, implementation="xla")
        return (y.astype(jnp.float32) ** 2).sum()

    want = jax.jit(jax.grad(one, argnums=(0, 1)))(x, factors)
    for spec, copies in ((rows, 1), (P(), 4)):
        split = jax.jit(jax.grad(partial(loss, spec=spec), argnums=(0, 1)))(x, factors)
        got = split[0] / copies, split[1] / copies
        assert_close(got, want, tolerances.GRADIENT_AGREEMENT["bf16"], f"{spec}")


def test_backward_pass_exchanges_rows_and_gathers_nothing() -> None:
    cfg = config("nvfp4", max_num_tokens=8)
    x, ids, factors = cases.tokens(cfg, 64)
    place = dict(mesh=cases.ep_mesh(8), axis="ep", implementation="xla")

    def loss(x: jax.Array, weights: mm.ExpertWeights) -> jax.Array:
        return loss_of(mm.mega_moe(x, ids, factors, weights, config=cfg, **place))

    text = jax.jit(jax.grad(loss)).lower(x, cases.weights(cfg)).compile().as_text()
    assert "all-to-all" in text and "all-gather" not in text


def test_memory_does_not_grow_with_the_experts() -> None:
    def temporary(num_experts: int) -> int:
        cfg = cases.config("mxfp4", num_experts=num_experts)
        weights = parameter_shapes(cfg)
        x, ids, factors = cases.tokens(cfg, TOKENS)

        def loss(x: jax.Array, weights: mm.ExpertWeights) -> jax.Array:
            return loss_of(mm.mega_moe(x, ids, factors, weights, config=cfg, implementation="xla"))

        compiled = jax.jit(jax.grad(loss)).lower(x, weights).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    one_expert = 3 * 256 * 128 * 4
    assert temporary(128) - temporary(16) < one_expert


# Padding, shared experts, layers.


@pytest.mark.parametrize("form", ["bf16", "mxfp8", "nvfp4", "fp8_block"])
@IMPLEMENTATIONS
def test_padded_and_unrouted_rows_have_none_whatever_they_hold(
    form: str, implementation: str
) -> None:
    cfg = cases.config(form, num_shared_experts=int(form == "mxfp8"))
    weights = cases.weights(cfg)
    x, ids, factors = cases.tokens(cfg, TOKENS)
    padded = np.arange(TOKENS) % 8 >= 5
    unrouted = np.zeros_like(padded)
    if weights.shared is None:  # it would see the NaN
        unrouted[3] = True
        ids = ids.at[3].set(-1)
    empty = padded | unrouted

    def loss(x: jax.Array, factors: jax.Array) -> jax.Array:
        call = partial(mm.mega_moe, config=cfg, implementation=implementation)
        return loss_of(call(x, ids, factors, weights, padding_mask=padded))

    both = jax.jit(jax.grad(loss, argnums=(0, 1)))
    want = both(jnp.where(empty[:, None], 0, x), factors)
    got = both(jnp.where(empty[:, None], jnp.bfloat16(jnp.nan), x), factors)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(g, np.float32), np.asarray(w, np.float32))
        assert np.isfinite(np.asarray(g, np.float32)).all()
        assert not np.asarray(g, np.float32)[empty].any()
        assert np.asarray(g, np.float32)[~empty].any(axis=1).sum() >= (~empty).sum() - 1


@IMPLEMENTATIONS
def test_a_token_that_overflows_an_expert_leaves_the_others_finite(implementation: str) -> None:
    cfg = cases.config("bf16")
    x, ids, factors = cases.tokens(cfg, TOKENS)
    x = x.at[0].set(3e38)

    weights = cases.weights(cfg)

    def loss(x: jax.Array) -> jax.Array:
        call = partial(mm.mega_moe, config=cfg, implementation=implementation)
        return call(x, ids, factors, weights)[1:].astype(jnp.float32).sum()

    got = np.asarray(jax.jit(jax.grad(loss))(x), np.float32)
    assert np.isfinite(got[1:]).all() and got[1:].any()


def test_unfused_shared_expert_has_jaxs_own() -> None:
    """Also for what it closes over, and with NaN in padding."""
    cfg = cases.config("mxfp8")
    x, ids, factors = cases.tokens(cfg, TOKENS)
    padded = np.arange(TOKENS) >= 24
    x = jnp.where(padded[:, None], jnp.bfloat16(jnp.nan), x)
    w = jax.random.normal(jax.random.key(3), (cfg.hidden_size,) * 2) / 16
    weights = cases.weights(cfg)

    def loss(x: jax.Array, w: jax.Array, routed: bool) -> jax.Array:
        def shared(x: jax.Array) -> jax.Array:
            return jnp.tanh(x.astype(jnp.float32) @ w)

        if not routed:
            real = jnp.where(padded[:, None], 0, x)
            return loss_of(jnp.where(padded[:, None], 0, shared(real)))
        call = partial(mm.mega_moe, config=cfg, implementation="xla", padding_mask=padded)
        return loss_of(call(x, ids, factors, weights, shared_experts=shared))

    of_x, of_w = jax.jit(jax.grad(partial(loss, routed=True), argnums=(0, 1)))(x, w)
    alone_x, alone_w = jax.jit(jax.grad(partial(loss, routed=False), argnums=(0, 1)))(x, w)
    assert cases.relative_error(of_w, alone_w) <= tolerances.GRADIENTS["bf16"].x
    ((of_routed, _),) = gradients(cfg, ids, padding_mask=padded)
    want = of_routed.astype(jnp.float32) + alone_x.astype(jnp.float32)
    assert cases.relative_error(of_x, want) <= tolerances.GRADIENTS["bf16"].x


def test_scan_over_rematerialised_layers() -> None:
    cfg = config("mxfp8")
    x, ids, factors = cases.tokens(cfg, TOKENS)
    weights = cases.weights(cfg)
    layers = jax.tree.map(lambda a: jnp.stack([a, a]), weights)
    call = partial(mm.mega_moe, config=cfg, implementation="xla")

    def step(x: jax.Array, layer: mm.ExpertWeights) -> tuple[jax.Array, None]:
        return x + call(x, ids, factors, layer), None

    def scanned(x: jax.Array) -> jax.Array:
        return loss_of(lax.scan(jax.checkpoint(step), x, layers)[0])

    def unrolled(x: jax.Array) -> jax.Array:
        return loss_of(step(step(x, weights)[0], weights)[0])

    got, want = (jax.jit(jax.grad(each))(x) for each in (scanned, unrolled))
    assert cases.relative_error(got, want) <= tolerances.GRADIENTS["bf16"].x


@pytest.mark.parametrize("form", ["nvfp4", "fp8_block"])
@IMPLEMENTATIONS
def test_parameters_are_constants(form: str, implementation: str) -> None:
    cfg = cases.config(form)
    x, ids, factors = cases.tokens(cfg, TOKENS)

    def loss(weights: mm.ExpertWeights) -> jax.Array:
        call = partial(mm.mega_moe, config=cfg, implementation=implementation)
        return loss_of(call(x, ids, factors, weights))

    weights = cases.weights(cfg)
    got = jax.grad(loss, allow_int=True)(weights).arrays()
    for name, array in weights.arrays().items():
        floating = jnp.issubdtype(array.dtype, jnp.floating)
        assert got[name].shape == array.shape
        assert got[name].dtype == (array.dtype if floating else jax.dtypes.float0), name
        assert not floating or not np.asarray(got[name], np.float32).any(), name


# The kernels.

REFUSAL = (
    "implementation: expected xla or reference where gradients are taken: deep_gemm has none, got "
    "deep_gemm; pass implementation='xla'"
)


@pytest.mark.parametrize("jitted", [True, False])
def test_deep_gemm_refuses(jitted: bool, emulation: Emulation) -> None:
    cfg = kernel_config()
    x, ids, factors = cases.tokens(cfg, TOKENS)
    weights = cases.weights(cfg)

    def loss(x: jax.Array, place: dict[str, Any]) -> jax.Array:
        call = partial(mm.mega_moe, config=cfg, implementation="deep_gemm", **place)
        return loss_of(call(x, ids, factors, weights))

    for place in ({}, dict(mesh=cases.ep_mesh(4), axis="ep")):
        call = partial(loss, place=place)
        call = jax.jit(call) if jitted else call
        with pytest.raises(NotImplementedError, match=f"^{REFUSAL}"):
            jax.grad(call)(x)
        with pytest.raises(NotImplementedError, match=f"^{REFUSAL}"):
            jax.jvp(call, (x,), (x,))
    assert not emulation.driver.launches()


def test_deep_gemm_beside_a_shared_expert_that_learns(emulation: Emulation) -> None:
    """What the kernels' arguments do not depend on has gradients."""
    cfg = kernel_config()
    x, ids, factors = cases.tokens(cfg, TOKENS)
    weights = cases.weights(cfg)

    def loss(scale: jax.Array) -> jax.Array:
        call = partial(mm.mega_moe, config=cfg, implementation="deep_gemm")
        y = call(x, ids, factors, weights, shared_experts=lambda x: scale * x.astype(jnp.float32))
        return y.astype(jnp.float32).sum()

    got = jax.grad(loss)(jnp.float32(1))
    np.testing.assert_allclose(got, x.astype(jnp.float32).sum(), rtol=1e-5)
    assert len(emulation.driver.launches()) == 2
