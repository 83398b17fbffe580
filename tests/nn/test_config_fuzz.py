"""Configs from outside, mutated: whatever a field holds, there is a block, or one kind of error."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hf_configs import HF_CONFIGS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jax_megamoe.config import MoEConfig
from jax_megamoe.nn.hf_config import block_spec, layers_of, read_hf_config
from jax_megamoe.weights.checkpoint.select import (
    read_gate_up_order,
    read_quantization_config,
    stored_scheme,
)

PREFIX = "model.layers.1.mlp.experts"
MODULES = {f"{PREFIX}.{expert}.{name}_proj" for expert in (0, 1) for name in ("gate", "down")}
GROUP = dict(targets=["Linear"], weights=dict(num_bits=8, type="float", block_structure=[128, 128]))
QUANTIZATIONS: list[dict[str, Any]] = [
    dict(quant_method="fp8", weight_block_size=[128, 128], ignored_layers=["lm_head"]),
    dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "re:.*gate$"]),
    dict(quant_method="modelopt", quant_algo="NVFP4", exclude_modules=["lm_head"]),
    dict(quant_algo="MIXED_PRECISION", quantized_layers={f"{PREFIX}.0": dict(quant_algo="MXFP8")}),
    dict(
        quant_method="compressed-tensors",
        format="float-quantized",
        config_groups=dict(group_0=GROUP),
        ignore=["re:.*lm_head"],
    ),
]
KEYS = st.text(max_size=3)
JUNK = st.one_of(
    st.sampled_from(
        [
            None,
            True,
            "false",
            1.5,
            float("nan"),
            float("inf"),
            -1,
            0,
            2**31,
            10**30,
            [],
            {},
            [None],
            ["re:([a-z.0-9]+)+$X"],
            ["re:(unbalanced"],
            "re:(((.*)*)*)*X",
            dict(a=[1]),
            [[128, 128]],
            [0.5, 128],
            "x" * 5000,
        ]
    ),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        ),
        max_leaves=6,
    ),
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    found: list[tuple[Any, Any]] = []
    keys = (
        list(value)
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else ()
    )
    for key in keys:
        found += [(value, key), *places(value[key])]
    return found


@st.composite
def mutated_configs(draw: st.DrawFn) -> dict[str, Any]:
    """A published config with some values replaced or taken away."""
    config = dict(HF_CONFIGS[draw(st.sampled_from(sorted(HF_CONFIGS)))])
    if draw(st.booleans()):
        config["quantization_config"] = draw(st.sampled_from(QUANTIZATIONS))
    config = json.loads(json.dumps(config))
    if draw(st.booleans()):
        config = dict(model_type="some_vl", text_config=config)
    for _ in range(draw(st.integers(1, 3))):
        at = places(config)
        if not at:
            break
        container, key = draw(st.sampled_from(range(len(at))).map(at.__getitem__))
        if draw(st.booleans()):
            container[key] = copy.deepcopy(draw(JUNK))  # values are mutated in turn
        else:
            container.pop(key)
    return config


def read_everything(source: Any) -> None:
    """All that is read of a config before any tensor is."""
    fields = read_hf_config(source)
    for index in (None, 0, 5):
        spec = block_spec(fields, index)
        hidden_size, intermediate_size = spec.padded_sizes
        MoEConfig(
            num_experts=spec.router.num_experts,
            top_k=spec.router.top_k,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            max_num_tokens=1,
        )
    assert layers_of(fields).count > 0
    for modules in ((), MODULES):
        stored_scheme(fields, PREFIX, modules)


@settings(max_examples=400, deadline=None)
@given(mutated_configs())
def test_mutated_configs(config: dict[str, Any]) -> None:
    """ValueError names the argument; NotImplementedError is for what is well-formed."""
    try:
        read_everything(config)
    except NotImplementedError:
        pass
    except ValueError as error:
        known = ("hf_config", "pattern", "layer 0", "layer 5", "layer_index")
        assert any(name in str(error) for name in known), error
        assert len(str(error)) < 3000


EDITS = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.integers(0, 20),
        st.binary(max_size=4) | st.sampled_from([b"[" * 3000, b"9" * 5000]),
    ),
    min_size=1,
    max_size=3,
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(edits=EDITS)
def test_mutated_files(edits: list[tuple[float, int, bytes]], tmp_path: Path) -> None:
    """Bytes cut and put in: whoever reads the file names it."""
    text = bytearray(json.dumps(HF_CONFIGS["deepseek-ai/DeepSeek-V3"]).encode())
    for place, size, new in edits:
        start = int(place * len(text))
        text[start : start + size] = new
    path = tmp_path / "config.json"
    path.write_bytes(text)
    for read in (read_everything, read_quantization_config, read_gate_up_order):
        try:
            read(tmp_path)
        except NotImplementedError:
            pass
        except ValueError as error:
            known = ("config.json", "layer 0", "layer 5", "layer_index")
            assert any(name in str(error) for name in known), error


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, "\ud800", '{"a": NaN', "\x00", ""])
def test_files_that_are_no_json(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogatepass"))
    for read in (read_hf_config, read_quantization_config, read_gate_up_order):
        with pytest.raises(ValueError, match=r"config\.json: expected (JSON|a JSON object), got"):
            read(tmp_path)
