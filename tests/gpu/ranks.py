"""The layers, loads and arrays of the checks of expert parallelism, and their comparison."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import tolerances
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_megamoe as mm
from jax_megamoe.weights.drawn import random_experts
from jax_megamoe.weights.params import ExpertWeights

Numpy = np.ndarray[Any, Any]
Tokens = tuple[Any, ...]
"""x, topk_ids, topk_weights, padding_mask: of all ranks in NumPy, or placed in JAX."""

NUM_SCANNED = 8


@dataclass(frozen=True)
class Cell:
    """A layer, and a number of tokens on each rank."""

    config: mm.MoEConfig
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.num_tokens} of {self.config.max_num_tokens} tokens a rank"

    def on_one_device(self, num_ranks: int) -> "Cell":
        """The same tokens as one rank's."""
        sizes = dict(vars(self.config), max_num_tokens=self.config.max_num_tokens * num_ranks)
        return Cell(mm.MoEConfig(**sizes), self.num_tokens * num_ranks)


def cells(small: bool, recipe: str = "fp8_block") -> list[Cell]:
    """What is checked: several tile heights; of fp8_block, tokens received in a ring and in one
    pool.

    Args:
        small: sizes that a CPU can run.
        recipe: of the layer.
    """
    if small:
        sizes = dict(num_experts=16, top_k=4, hidden_size=512, intermediate_size=256)
        counts = {32: (8, 32), 16: (5,)}
    else:
        sizes = dict(num_experts=32, top_k=8, hidden_size=2048, intermediate_size=768)
        counts = {1024: (8, 129, 1024), 512: (40,)}
    return [
        Cell(mm.MoEConfig(**sizes, max_num_tokens=most, weight_format=recipe), count)
        for most, each in counts.items()
        for count in each
    ]


def loads(cell: Cell, num_ranks: int) -> dict[str, Tokens]:
    """Tokens of all ranks by the load they make; rows that are no tokens hold NaN."""
    cfg, total = cell.config, num_ranks * cell.num_tokens
    rank, row = np.divmod(np.arange(total), cell.num_tokens)
    found = cases.routings(cfg, total)
    scattered, none = found["random"]
    local = cfg.num_experts // num_ranks
    routings = {
        "random": found["random"],
        "even": found["even"],
        "uneven ranks": (scattered, row >= cell.num_tokens * (rank + 1) // num_ranks),
        "an idle rank": (scattered, rank == 0),
        "one busy rank": (scattered, rank < num_ranks - 1),
        "all to the last rank": (scattered % local + (num_ranks - 1) * local, none),
        "each to its own rank": (scattered % local + rank[:, None] * local, none),
        "all to one expert": found["one expert"],
        "duplicates": found["duplicates"],
        "ids -1": found["unrouted slots"],
        "no tokens": (scattered, ~none),
    }
    x, _, factors = (np.asarray(array) for array in cases.tokens(cfg, total))
    made = {}
    for name, (ids, mask) in routings.items():
        tokens = x.copy()
        tokens[mask] = np.nan
        made[name] = (tokens, ids.astype(np.int32), factors, mask)
    return made


class World:
    """The ranks: a device each, in this process or in several.

    Attributes:
        mesh: one axis, "ep".
        num_ranks: its size.
    """

    def __init__(self, devices: list[jax.Device]) -> None:
        self.mesh = Mesh(np.array(devices), ("ep",))
        self.num_ranks = len(devices)

    def place(self, tree: Any) -> Any:
        """NumPy arrays split over the ranks along their first dimension."""
        sharding = NamedSharding(self.mesh, P("ep"))

        def one(array: Any) -> jax.Array:
            host = np.asarray(array)
            return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

        return jax.tree.map(one, tree)


def outside(cell: Cell, world: World | None, how: str) -> Callable[..., Any]:
    """f(tokens, weights) -> (y, counts), `mega_moe` opening `shard_map` itself if at all."""
    where = {} if world is None else dict(mesh=world.mesh, axis="ep")

    def call(tokens: Tokens, weights: ExpertWeights) -> Any:
        *arrays, mask = tokens
        options = dict(config=cell.config, implementation=how, return_stats=True)
        return mm.mega_moe(*arrays, weights, padding_mask=mask, **where, **options)

    return call


def inside(cell: Cell, world: World, how: str) -> Callable[..., Any]:
    """The same with `mega_moe` in the caller's `shard_map`, which alone knows the mesh."""

    def call(tokens: Tokens, weights: ExpertWeights) -> Any:
        *arrays, mask = tokens
        options = dict(config=cell.config, implementation=how, return_stats=True)
        return mm.mega_moe(*arrays, weights, padding_mask=mask, axis="ep", **options)

    return mapped(call, world)


def mapped(call: Callable[..., Any], world: World) -> Callable[..., Any]:
    """`call` on each rank's part of everything."""
    return jax.shard_map(call, mesh=world.mesh, in_specs=P("ep"), out_specs=P("ep"))


def two_layers(call: Callable[..., Any]) -> Callable[..., Any]:
    """f(tokens, weights, other weights): one layer after the other, on one symmetric buffer."""

    def both(tokens: Tokens, first: ExpertWeights, second: ExpertWeights) -> Any:
        y, _ = call(tokens, first)
        return call((y, *tokens[1:]), second)

    return both


def scanned(call: Callable[..., Any]) -> Callable[..., Any]:
    """f(tokens, weights): a residual layer many times over, by `scan`."""

    def layers(tokens: Tokens, weights: ExpertWeights) -> Any:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            y, counts = call((x, *tokens[1:]), weights)
            # Bounded, and rounded once however it is fused.
            return jnp.bfloat16(0.5) * x + jnp.clip(y, -1, 1), counts

        x, counts = jax.lax.scan(layer, tokens[0], None, length=NUM_SCANNED)
        return x, counts[-1]

    return layers


def save_weights(folder: Path, cfg: mm.MoEConfig) -> tuple[ExpertWeights, ExpertWeights]:
    """Writes a layer's parameters where `load_weights` finds them; returns what that would."""
    arrays = {name: np.asarray(a) for name, a in cases.weights(cfg).routed.arrays().items()}
    stored = {name: a.view(np.uint8) if a.itemsize == 1 else a for name, a in arrays.items()}
    np.savez(folder / "weights.npz", **stored)
    return load_weights(folder, cfg)


def load_weights(folder: Path, cfg: mm.MoEConfig) -> tuple[ExpertWeights, ExpertWeights]:
    """The parameters in NumPy, and the same with the experts in reverse order."""
    with np.load(folder / "weights.npz") as file:
        stored = {name: file[name] for name in file.files}
    fp8, is_fp8 = ml_dtypes.float8_e4m3fn, cfg.weight_format.name == "fp8_block"
    arrays = {name: a.view(fp8) if is_fp8 and a.itemsize == 1 else a for name, a in stored.items()}
    backwards = {name: np.ascontiguousarray(a[::-1]) for name, a in arrays.items()}
    like = jax.eval_shape(partial(random_experts, cfg), jax.random.key(0))
    return like.with_routed(**arrays), like.with_routed(**backwards)


def assert_agree(got: Any, want: Any, how: str, where: str, recipe: str = "fp8_block") -> float:
    """Asserts that an implementation's y [T, H] agrees with `reference`; returns its error."""
    of_kernel = how == "deep_gemm"
    table = tolerances.KERNEL_AGREEMENT if of_kernel else tolerances.AGREEMENT
    limit = table[recipe]
    error = cases.relative_error(got, want)
    token = max(map(cases.relative_error, np.asarray(got), np.asarray(want)))
    assert error <= limit.norm, f"{where}: error {error}, allowed {limit.norm}"
    assert token <= limit.token, f"{where}: error {token} of a token, allowed {limit.token}"
    return error


def assert_same(got: jax.Array, want: Numpy, how: str, recipe: str = "fp8_block") -> None:
    """Asserts that this process's rows of `got` [T, H] are those of `want`.

    Bit for bit under deep_gemm; another implementation, in a trial run without GPUs, sums in an
    order that depends on the ranks.
    """
    for shard in got.addressable_shards:
        rows = np.asarray(shard.data)
        expected = want.view(rows.dtype)[shard.index]
        where = f"rows {shard.index[0]}"
        if how != "deep_gemm":
            assert_agree(rows, expected, how, where, recipe)
            continue
        different = np.argwhere(rows.view(np.uint16) != expected.view(np.uint16))
        if len(different):
            first = tuple(int(i) for i in different[0])
            raise AssertionError(
                f"{where}: {len(different)} of {rows.size} values differ, the first at {first}: "
                f"got {rows[first]}, expected {expected[first]}"
            )


def assert_counts(got: jax.Array, tokens: Tokens, cfg: mm.MoEConfig) -> None:
    """Asserts this process's part of the tokens of each expert."""
    _, ids, _, mask = tokens
    want = cases.counts_of(ids, mask, cfg.num_experts)
    for shard in got.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), want[shard.index])


def assert_repeats(
    call: Callable[..., Any],
    loads: list[Tokens],
    weights: ExpertWeights,
    world: World,
    num_calls: int,
) -> None:
    """Asserts that calls of several loads in turn keep giving the bits of the first of each."""

    def count(wrong: Any, y: Any, first: Any) -> Any:
        differs = jax.lax.bitcast_convert_type(y, jnp.uint16) != first
        return wrong + jnp.sum(differs, dtype=jnp.int32)

    @jax.jit
    def step(wrong: Any, tokens: Any, weights: Any, first: Any) -> Any:
        y, _ = call(tokens, weights)
        return mapped(count, world)(wrong, y, first)

    @jax.jit
    def bits(tokens: Any, weights: Any) -> Any:
        return jax.lax.bitcast_convert_type(call(tokens, weights)[0], jnp.uint16)

    firsts = [bits(tokens, weights) for tokens in loads]
    wrong = world.place(np.zeros(world.num_ranks, np.int32))
    for index in range(num_calls):
        which = index % len(loads)
        wrong = step(wrong, loads[which], weights, firsts[which])
    for shard in wrong.addressable_shards:
        number = int(np.asarray(shard.data)[0])
        assert number == 0, f"{number} values differed on {shard.device}"
