"""examples/generate.py against transformers: logits after a prompt, and greedy tokens; its
attention, and that a step copies no cache."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import attention
import generation_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from flax import nnx
from jax.sharding import AxisType
from scripts import load_script


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return load_script(Path(__file__).parents[1] / "examples" / "generate.py")


@pytest.fixture
def users_modes() -> Iterator[None]:
    """JAX as a user has it, where an example may add arrays of different ranks."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("name", cases.MODELS)
@pytest.mark.usefixtures("users_modes")
def test_as_transformers(name: str, generate: ModuleType, tmp_path: Path) -> None:
    """Four prompts of different lengths in one batch, over four expert-parallel devices."""
    cases.write(tmp_path, name)
    mesh = jax.make_mesh((4,), ("ep",), (AxisType.Auto,), devices=jax.devices()[:4])
    model = generate.Decoder.load(tmp_path, mesh=mesh, max_num_tokens=16)
    prompts = cases.PROMPTS[name]
    longest = max(map(len, prompts))
    tokens = np.zeros((len(prompts), longest), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)
    cache = model.empty_cache(len(tokens), longest)
    logits, _ = generate.prefill(model, jnp.asarray(tokens), lengths, cache)
    with np.load(cases.RECORD) as record:
        want, want_tokens = record[f"{name}_logits"], record[f"{name}_tokens"]
    error = np.linalg.norm(np.asarray(logits) - want) / np.linalg.norm(want)
    assert error < tolerances.LOGITS, error
    got = generate.generate(model, prompts, cases.NEW_TOKENS, mesh)
    np.testing.assert_array_equal(got, want_tokens)


@pytest.mark.parametrize("name", cases.MODELS)
@pytest.mark.usefixtures("users_modes")
def test_a_step_copies_no_cache(name: str, generate: ModuleType, tmp_path: Path) -> None:
    """The step's program makes nothing of the cache's size but the cache, which is its argument.

    Says nothing of a layer's slices, which XLA treats otherwise on GPUs.
    """
    cases.write(tmp_path, name)
    model = generate.Decoder.load(tmp_path, max_num_tokens=16)
    cache, tokens = model.empty_cache(2, 512), jnp.zeros(2, jnp.int32)

    @partial(jax.jit, static_argnums=0, donate_argnums=4)
    def run(graph: Any, state: Any, tokens: jax.Array, lengths: jax.Array, cache: Any) -> Any:
        return generate.after_token(nnx.merge(graph, state), tokens, lengths, cache)

    compiled = run.lower(*nnx.split(model), tokens, tokens, cache).compile()
    size = sum(array.nbytes for array in cache)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= size
    shape = ",".join(map(str, cache.keys.shape))
    copies = re.findall(rf"^.* = \w+\[{shape}\]\S* copy\(.*$", compiled.as_text(), re.MULTILINE)
    assert not copies, copies


ATTENDED = {
    "two queries a head, the last position": (3, 4, 2, 32, 100, attention.FULL, False),
    "a window, sinks, groups of eight": (2, 16, 2, 64, 130, 9, True),
    "a group of three, sinks": (2, 12, 4, 32, 64, attention.FULL, True),
    "fewer positions than a block": (1, 4, 2, 32, 5, 3, False),
    "the token alone": (2, 8, 2, 32, 64, 1, False),
}
"""B, heads, kv_heads, head_dim, positions of the cache, the window, whether there are sinks."""


@pytest.mark.parametrize("name", ATTENDED)
@pytest.mark.usefixtures("users_modes")
def test_kernel_attends_as_xla(name: str, rng: np.random.Generator) -> None:
    """The GPU's kernel, interpreted, for the second of two layers."""
    sequences, heads, kv_heads, size, length, window, has_sinks = ATTENDED[name]

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    shape = (2, sequences, kv_heads, length, size)
    positions = np.arange(sequences)[:, None] * 7 % length
    positions[0] = length - 1
    cache = attention.Cache(drawn(*shape), drawn(*shape))
    place = attention.Place(
        cache,
        attention.Cache(*(array[1] for array in cache)),
        jnp.int32(1),
        jnp.asarray([2, window], jnp.int32),
        jnp.asarray(positions, jnp.int32),
        turns=(jnp.zeros(()), jnp.zeros(())),
    )
    inputs = drawn(sequences, 1, heads + 2 * kv_heads, size), place
    sinks = drawn(heads) if has_sinks else None
    want = np.asarray(attention.mixed_by_xla(*inputs, sinks), np.float32)
    got = np.asarray(attention.mixed_by_kernel(*inputs, sinks, interpret=True), np.float32)
    assert want.shape == got.shape == (sequences, 1, heads, size)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < tolerances.ATTENTION, error
