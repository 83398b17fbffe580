"""examples/generate.py against transformers: logits after a prompt, and greedy tokens."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import generation_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from jax.sharding import AxisType


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    path = Path(__file__).parents[1] / "examples" / "generate.py"
    spec = importlib.util.spec_from_file_location("generate", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate"] = module
    spec.loader.exec_module(module)
    return module


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
