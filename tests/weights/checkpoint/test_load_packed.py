"""Checkpoints into FlashInfer's layouts: as loading for another kernel and moving them."""

import logging
from pathlib import Path
from typing import Any

import checkpoint_files as files
import jax
import numpy as np
import pytest
from checkpoint_files import PREFIX, assert_same
from jax.sharding import Mesh

import jax_megamoe as mm
from jax_megamoe.weights.checkpoint.load import load_experts, reload_experts

E, H, INTER = 4, 128, 128
RECIPES = pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])


def config(form: str, **changes: Any) -> mm.MoEConfig:
    return files.make_config(form, E, H, INTER, **changes)


def load(tensors: Any, cfg: mm.MoEConfig, **kwargs: Any) -> mm.ExpertWeights:
    return load_experts(cfg, tensors, prefix=PREFIX, progress=False, **kwargs)


@RECIPES
def test_as_moved_into_the_layout(tmp_path: Path, rng: np.random.Generator, form: str) -> None:
    tensors = files.per_expert(files.SOURCES[form](rng, E, H, INTER))
    cfg = config(f"{form}_block")
    got = load(tensors, cfg)
    assert_same(got, mm.to_layout(load(tensors, config(form)), got.layout))
    assert_same(load(files.write_folder(tmp_path / "m", tensors), cfg), got)
    mesh = Mesh(np.array(jax.devices()[:2]), ("ep",))
    assert_same(load(tensors, cfg, mesh=mesh, axis="ep"), got)


@RECIPES
def test_floats_are_quantised(rng: np.random.Generator, form: str) -> None:
    source = files.floats(rng, E, H, INTER)
    cfg = config(f"{form}_block")
    got = load(files.per_expert(source), cfg)
    matrices = (source[part].weight for part in ("gate", "up", "down"))
    assert_same(got, mm.quantize_experts(cfg, *map(jax.numpy.asarray, matrices)))


@RECIPES
def test_reloaded_in_place(rng: np.random.Generator, form: str) -> None:
    cfg = config(f"{form}_block")
    a, b = (files.per_expert(files.SOURCES[form](rng, E, H, INTER)) for _ in range(2))
    first = load(a, cfg)
    assert_same(reload_experts(cfg, first, b, prefix=PREFIX), load(b, cfg))
    half = {name: b[name] for name in b if ".2.down_proj" in name}
    assert_same(reload_experts(cfg, first, half, prefix=PREFIX), load(a | half, cfg))


@RECIPES
def test_saved_and_loaded(tmp_path: Path, rng: np.random.Generator, form: str) -> None:
    cfg = config(f"{form}_block")
    weights = load(files.per_expert(files.SOURCES[form](rng, E, H, INTER)), cfg)
    mm.save_experts(tmp_path / "layer.safetensors", cfg, weights)
    assert_same(mm.load_converted(tmp_path / "layer.safetensors", cfg), weights)
    with pytest.raises(ValueError, match=r"layout of layer.safetensors: expected '.*', got 'flash"):
        mm.load_converted(tmp_path / "layer.safetensors", config(form))


def test_scales_too_far_apart_are_counted_once(
    rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    source = files.mxfp4(rng, E, H, INTER)
    source["down"].scale[1, 5] = 90
    source["down"].scale[1, 6:] = 127
    tensors = files.per_expert(source)
    with caplog.at_level(logging.WARNING, logger="jax_megamoe"):
        got = load(tensors, config("mxfp4_block"))
    (record,) = caplog.records
    plain = mm.dequantize_experts(config("mxfp4"), load(tensors, config("mxfp4")))
    packed = mm.dequantize_experts(config("mxfp4_block"), got)
    different = sum(int((a != b).sum()) for a, b in zip(plain, packed, strict=True))
    assert record.getMessage().startswith(f"{PREFIX}: {different} weights are rounded for")
    assert different
