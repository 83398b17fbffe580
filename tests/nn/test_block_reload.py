"""MegaMoEBlock under a server: a layer's new parameters and new places, uncompiled."""

from typing import Any

import cases
import jax
import numpy as np
import pytest
import transformers_cases
from flax import nnx

import jax_megamoe as mm

CASES = {case.name: case for case in transformers_cases.CASES}


def block_of(name: str, **options: Any) -> mm.MegaMoEBlock:
    """A block with 24 slots for its 16 experts, over 8 devices."""
    place = dict(mesh=cases.ep_mesh(8), axis="ep", num_experts=24, implementation="xla")
    options = dict(max_num_tokens=32, weight_format="bf16", layer_index=1) | place | options
    return mm.MegaMoEBlock.from_config(CASES[name].hf_config, **options)


def changed(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Other values of the same tensors."""
    return {name: (array[::-1] * 0.75).astype(array.dtype) for name, array in tensors.items()}


def state_of(block: mm.MegaMoEBlock) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(block))
    return {".".join(path): np.asarray(leaf[...]) for path, leaf in flat}


@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v3"])
def test_reload_and_rebalance_compile_nothing(name: str) -> None:
    tensors = transformers_cases.checkpoint(CASES[name])
    served, fresh = block_of(name), block_of(name)
    served.load(tensors, 1)
    traces = []

    @nnx.jit
    def call(block: mm.MegaMoEBlock, x: jax.Array) -> jax.Array:
        traces.append(1)
        return block(x)

    x = cases.tokens(served.config, 32)[0]
    want = call(served, x)
    loads = np.arange(16) ** 2
    placement = served.rebalance(loads=loads)
    np.testing.assert_array_equal(placement, mm.solve_placement(loads, 24, 8))
    np.testing.assert_array_equal(call(served, x), want)
    served.reload(changed(tensors), 1)
    np.testing.assert_array_equal(served.experts.placement, placement)
    got = call(served, x)
    assert len(traces) == 1
    fresh.load(changed(tensors), 1)
    np.testing.assert_array_equal(got, call(fresh, x))
    assert cases.relative_error(np.asarray(got, np.float32), np.asarray(want, np.float32)) > 0.1


def test_what_does_not_fit_changes_nothing() -> None:
    tensors = transformers_cases.checkpoint(CASES["qwen3_next"])
    block = block_of("qwen3_next")
    block.load(tensors, 1)
    before, other = state_of(block), changed(tensors)
    gate = "model.layers.1.mlp.gate.weight"
    wrong = other | {gate: other[gate].astype(np.float32)}
    message = r"^model.layers.1.mlp: weight: expected dtype bfloat16, got float32; load\(\) takes"
    with pytest.raises(TypeError, match=message):
        block.reload(wrong, 1)
    down = next(name for name in other if ".experts." in name and "down_proj" in name)
    with pytest.raises(ValueError, match=r"down_proj.* expected shape"):
        block.reload(other | {down: other[down][..., :-1]}, 1)
    after = state_of(block)
    assert after.keys() == before.keys()
    for name, array in before.items():
        assert after[name].tobytes() == array.tobytes(), name
