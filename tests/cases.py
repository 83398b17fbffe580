"""Configs, weights, tokens and routings that the tests share."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import shapes
import tolerances
from jax.sharding import AxisType, Mesh, NamedSharding

import jax_megamoe as mm

ACTIVATIONS = {
    "swiglu": mm.Activation("swiglu"),
    "clamped": mm.Activation("swiglu", clamp=1.3),
    "gpt_oss": mm.Activation("swiglu", clamp=7.0, alpha=1.702, beta=1.0),
    "situ": mm.Activation("situ"),
    "situ_linear": mm.Activation("situ", alpha=2.0, beta=0.0),
}
"""Both activations with each of their parameters at work."""

FORMATS = tuple(mm.WEIGHT_FORMATS)
RECIPES = tuple(mm.RECIPES)
FUSING = tuple(name for name in FORMATS if mm.RECIPES[name].shared_formats)


def activations_of(form: str) -> list[str]:
    """Names in `ACTIVATIONS` that the format has."""
    allowed = mm.RECIPES[form].functions
    return [name for name, act in ACTIVATIONS.items() if act.name in allowed]


def config(form: str, **changes: Any) -> mm.MoEConfig:
    """A small config of a format."""
    return mm.MoEConfig(**(shapes.SMALL | dict(weight_format=form) | changes))


def float_matrices(
    cfg: mm.MoEConfig, seed: int = 0, gain: float = 1.0
) -> dict[str, tuple[jax.Array, jax.Array, jax.Array]]:
    """Normal gate, up and down in bfloat16: `routed` and, for num_shared_experts, `shared`.

    Variance 1 / fan-in, gate's and up's standard deviation times `gain`.
    """
    rng = np.random.default_rng(seed)

    def draw(*shape: int, scale: float = 1.0) -> jax.Array:
        values = rng.standard_normal(shape, np.float32) * np.float32(scale * shape[-1] ** -0.5)
        return jnp.asarray(values, jnp.bfloat16)

    def mlp(lead: tuple[int, ...], inter: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        gate, up = (draw(*lead, inter, cfg.hidden_size, scale=gain) for _ in range(2))
        return gate, up, draw(*lead, cfg.hidden_size, inter)

    parts = {"routed": mlp((cfg.logical_experts,), cfg.intermediate_size)}
    if cfg.num_shared_experts:
        parts["shared"] = mlp((), cfg.shared_size)
    return parts


@functools.cache
def weights(cfg: mm.MoEConfig, *, gain: float = 4.0, biased: bool = False) -> mm.ExpertWeights:
    """Quantised normal matrices, the shared expert fused where the format can.

    With the default gain a unit token's gate reaches every clamp in `ACTIVATIONS`. NVFP4's input
    scales differ between experts.
    """
    if cfg.activation != ACTIVATIONS["swiglu"]:
        plain = dict(vars(cfg), activation=ACTIVATIONS["swiglu"])
        return weights(mm.MoEConfig(**plain), gain=gain, biased=biased)
    parts = float_matrices(cfg, gain=gain)
    rng = np.random.default_rng(1)
    kwargs: dict[str, Any] = {}
    if cfg.shared_format is not None:
        kwargs["shared"] = parts.get("shared")
    if cfg.recipe.activations.has_global_scale:
        scales = rng.uniform(0.25, 1.0, cfg.logical_experts)
        kwargs["w2_input_scale"] = jnp.asarray(scales, jnp.float32)
    if biased:
        sizes = (cfg.intermediate_size, cfg.intermediate_size, cfg.hidden_size)
        kwargs["biases"] = tuple(
            jnp.asarray(rng.standard_normal((cfg.logical_experts, size)), jnp.float32)
            for size in sizes
        )
    return mm.quantize_experts(cfg, *parts["routed"], **kwargs)


def filled_up(
    cfg: mm.MoEConfig, hidden: int, biases: tuple[Any, Any, Any] | None = None
) -> mm.ExpertWeights:
    """Weights of a model of a smaller hidden size, with biases of bfloat16 values; None: normal."""
    gate, up, down = float_matrices(cfg)["routed"]
    gate, up = (each.at[..., hidden:].set(0) for each in (gate, up))
    down = down.at[..., hidden:, :].set(0)
    if biases is None:
        rng = np.random.default_rng(6)
        sizes = (cfg.intermediate_size, cfg.intermediate_size, cfg.hidden_size)
        shapes_ = [(cfg.logical_experts, size) for size in sizes]
        gate_bias, up_bias, down_bias = (
            jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes_
        )
        biases = (gate_bias, up_bias, down_bias.at[:, hidden:].set(0))
    return mm.quantize_experts(cfg, gate, up, down, biases=biases)


def tokens(cfg: mm.MoEConfig, num_tokens: int, seed: int = 2) -> tuple[jax.Array, ...]:
    """x, topk_ids and topk_weights: rows of different size, of several one of zeros; distinct ids,
    random."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_tokens, cfg.hidden_size))
    x *= 2.0 ** rng.uniform(-3, 2, (num_tokens, 1))
    if num_tokens > 1:
        x[num_tokens // 2] = 0
    order = np.argsort(rng.random((num_tokens, cfg.logical_experts)), axis=1)
    topk_weights = rng.random((num_tokens, cfg.top_k))
    return (
        jnp.asarray(x, jnp.bfloat16),
        jnp.asarray(order[:, : cfg.top_k], jnp.int32),
        jnp.asarray(topk_weights, jnp.float32),
    )


def routings(cfg: mm.MoEConfig, num_tokens: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """(topk_ids, padding_mask) by the kind of load they make, for ranks of equally many rows."""
    rng = np.random.default_rng(3)
    row = np.arange(num_tokens)
    scattered = np.asarray(tokens(cfg, num_tokens)[1])
    everywhere = np.arange(num_tokens * cfg.top_k).reshape(num_tokens, -1) % cfg.num_experts
    one = np.full_like(scattered, -1)
    one[:, 0] = 5
    pairs = np.repeat(scattered[:, : cfg.top_k // 2], 2, axis=1)
    holes = np.where(rng.random(scattered.shape) < 0.4, -1, scattered)
    last_rank = np.where(row[:, None] < num_tokens // 8, -1, cfg.num_experts - 1 - scattered % 2)
    one_row_block = np.where(row[:, None] < num_tokens // 8, 5, everywhere)
    none = np.zeros(num_tokens, bool)
    return {
        "even": (everywhere.astype(np.int32), none),
        "random": (scattered, none),
        "uneven": (scattered, row % 8 >= row // 8),
        "idle half": (scattered, row >= num_tokens // 2),
        "idle first rank, all to the last": (last_rank.astype(np.int32), none),
        "one expert": (one, none),
        "first rank alone to one expert": (one_row_block.astype(np.int32), none),
        "duplicates": (pairs, none),
        "unrouted slots": (holes, none),
        "nothing": (np.full_like(scattered, -1), none),
    }


def dense_mlp(cfg: mm.MoEConfig) -> Callable[[jax.Array], jax.Array]:
    """An unfused shared expert in plain float32."""
    gate, up, down = (part.astype(jnp.float32) for part in float_matrices(cfg)["shared"])

    def apply(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return (jax.nn.silu(wide @ gate.T) * (wide @ up.T)) @ down.T

    return apply


def ep_mesh(num_ranks: int, kind: AxisType = AxisType.Auto) -> Mesh:
    """The first devices in one axis, "ep"."""
    devices = jax.devices()[:num_ranks]
    return jax.make_mesh((num_ranks,), ("ep",), axis_types=(kind,), devices=devices)


def sharded(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """The arrays of a tree split over a mesh as a like tree of PartitionSpecs says."""
    return jax.tree.map(lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec)), tree, specs)


def counts_of(topk_ids: np.ndarray, mask: np.ndarray, num_experts: int) -> np.ndarray:
    """Tokens of each expert."""
    real = topk_ids[~mask]
    return np.bincount(real[real >= 0], minlength=num_experts)


def relative_error(got: Any, want: Any) -> float:
    """Euclidean norm of the difference over that of `want`; 0 for equal zeros."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    difference = np.linalg.norm(got - want)
    return 0.0 if difference == 0 else float(difference / np.linalg.norm(want))


def assert_agree(got: Any, want: Any, form: str, where: str) -> None:
    """Asserts that two outputs [T, H] of one format agree as `tolerances.AGREEMENT` says."""
    limit = tolerances.AGREEMENT[form]
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, where
    assert np.isfinite(got).all() and np.isfinite(want).all(), f"{where}: not finite"
    error = relative_error(got, want)
    assert error <= limit.norm, f"{where}: relative error {error}, allowed {limit.norm}"
    by_token = [relative_error(g, w) for g, w in zip(got, want, strict=True)]
    worst = int(np.argmax(by_token)) if by_token else 0
    assert not by_token or by_token[worst] <= limit.token, (
        f"{where}: token {worst} has relative error {by_token[worst]}, allowed {limit.token}"
    )
