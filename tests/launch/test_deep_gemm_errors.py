"""deep_gemm.py: when `mega_moe` takes the kernels, and what refuses a call or falls back."""

import importlib.util
import sys
from pathlib import Path

import cases
import jax
import pytest
from emulation import B200, H200, MEGA, STAGING, Emulation, call, config, fallback, kernel_of
from fake_toolchain import write_headers

import jax_megamoe as mm
from jax_megamoe import compile
from jax_megamoe.compile import MissingDependency, builder, sources
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.runtime import extension

# The choice of an implementation.


def test_none_takes_the_kernels_where_they_run(emulation: Emulation) -> None:
    call(config(), implementation=None)
    assert [kernel_of(each).symbol for each in emulation.driver.launches()] == [STAGING, MEGA]


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_another_named_implementation_launches_nothing(
    implementation: str, emulation: Emulation
) -> None:
    call(config(), implementation=implementation)
    assert not emulation.driver.launches() and not emulation.memory.allocated


def test_without_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    cfg = config(max_num_tokens=61)
    text = "device: expected a CUDA device for implementation deep_gemm, got cpu"
    with pytest.raises(NotImplementedError, match=f"^{text}$"):
        call(cfg)
    assert fallback(cfg, caplog) == f"{cfg} runs implementation xla: {text}"


def test_sizes_that_the_kernel_refuses(
    emulation: Emulation, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = config(hidden_size=384)
    text = "hidden_size: expected a multiple of 256, got 384"
    with pytest.raises(ValueError, match=f"^{text}$"):
        call(cfg)
    assert fallback(cfg, caplog).endswith(f"runs implementation xla: {text}")
    assert not emulation.driver.launches() and not emulation.memory.allocated


@pytest.mark.parametrize(
    ("device", "form", "text"),
    [
        (H200, "mxfp4", "device: expected compute capability 10.x for sm100_fp8_fp4_mega_moe, got"),
        (B200, "fp8_block", "device: expected compute capability 9.0 for fp8_block, got 10.0"),
        (DeviceSpec(120, 188), "bf16", "device: expected compute capability 10.x for sm100_bf16"),
        (DeviceSpec(100, 142), "mxfp8", "num_sms: expected a multiple of 4, got 142"),
    ],
)
def test_formats_that_the_device_does_not_run(
    device: DeviceSpec, form: str, text: str, emulation: Emulation
) -> None:
    emulation.device = device
    with pytest.raises((NotImplementedError, ValueError), match=f"^{text}"):
        call(config(form))


@pytest.mark.parametrize("ranks", [1, 4])
def test_biases_fall_back(
    ranks: int, emulation: Emulation, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = config(max_num_tokens=62 + ranks)
    place = dict(mesh=cases.ep_mesh(4), axis="ep") if ranks == 4 else {}
    biased = cases.weights(cfg, biased=True)
    text = (
        "weights: expected no biases for implementation deep_gemm, or folded ones, got w13_bias "
        "and w2_bias"
    )
    hint = r"jax_megamoe.fold_biases\(config, weights\) folds them; or use xla"
    with pytest.raises(NotImplementedError, match=f"^{text}; {hint}$"):
        call(cfg, weights=biased, **place)
    assert text in fallback(cfg, caplog, weights=biased, **place)
    assert not emulation.memory.allocated


@pytest.mark.parametrize("ranks", [1, 4])
def test_folded_biases_launch(ranks: int, emulation: Emulation) -> None:
    cfg = config("mxfp4", hidden_size=512, max_num_tokens=62 + ranks)
    place = dict(mesh=cases.ep_mesh(4), axis="ep") if ranks == 4 else {}
    call(cfg, weights=mm.fold_biases(cfg, cases.filled_up(cfg, 448)), implementation=None, **place)
    symbols = [kernel_of(each).symbol for each in emulation.driver.launches()]
    assert sorted(symbols) == sorted([STAGING, MEGA] * ranks)


def test_nvfp4_rows_in_the_other_order(emulation: Emulation) -> None:
    cfg = config("nvfp4", kernel_source="sgl", hidden_size=512)
    other = cases.weights(config("nvfp4", kernel_source="vllm", hidden_size=512))
    text = (
        r"weights.layout: expected 'sgl_fp4' for the kernel source sgl, got 'interleave8'; "
        r"jax_megamoe.to_layout\(weights, 'sgl_fp4'\) moves them"
    )
    with pytest.raises(ValueError, match=f"^{text}$"):
        call(cfg, weights=other)
    assert not emulation.memory.allocated
    call(cfg, weights=mm.to_layout(other, "sgl_fp4"))
    assert list(emulation.launches(MEGA)) == [0]


# What is missing.


def test_without_the_kernel_source(emulation: Emulation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "find_source", sources.find_source)
    monkeypatch.setattr(compile, "has_source", sources.has_source)
    monkeypatch.delenv("JAX_MEGAMOE_SGL_ROOT", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    text = (
        r"kernel source: expected the distribution sgl-deep-gemm, got none installed; "
        r"pip install 'jax-megamoe\[cuda13\]', or python -m jax_megamoe sources fetch sgl"
    )
    with pytest.raises(MissingDependency, match=f"^{text}$"):
        call(config())
    assert not emulation.memory.allocated


def test_without_a_compiler(
    emulation: Emulation,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_headers(tmp_path / "include")
    monkeypatch.setenv("JAX_MEGAMOE_SGL_ROOT", str(tmp_path))
    monkeypatch.setenv("JAX_MEGAMOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_MEGAMOE_COMPILER", "nvrtc")
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    monkeypatch.setattr(compile, "build", builder.build)
    builder._make_compiler.cache_clear()
    text = (
        r"nvrtc: expected cuda-bindings and nvidia-cuda-nvrtc, got .*; "
        r"pip install 'jax-megamoe\[cuda13\]'"
    )
    with pytest.raises(MissingDependency, match=text):
        call(config(max_num_tokens=59))
    assert "nvrtc: expected cuda-bindings" in fallback(config(max_num_tokens=59), caplog)
    assert not emulation.driver.launches() and not emulation.memory.allocated


def test_without_the_compiled_module(
    emulation: Emulation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = config(max_num_tokens=60)
    with monkeypatch.context() as patch:
        patch.delattr("jax_megamoe.runtime._ffi")
        patch.setitem(sys.modules, "jax_megamoe.runtime._ffi", None)
        extension.module.cache_clear()
        text = "jax_megamoe: expected its compiled module _ffi, got .*; build it with `pip install"
        with pytest.raises(ImportError, match=f"^{text}"):
            call(cfg)
        assert "expected its compiled module _ffi" in fallback(cfg, caplog)
    extension.module.cache_clear()
    assert extension.module().__name__.endswith("_ffi")


# Limits of a call.


@pytest.mark.parametrize("ranks", [1, 4])
def test_more_tokens_than_the_buffer_holds(ranks: int, emulation: Emulation) -> None:
    cfg = config(max_num_tokens=8)
    text = "num_tokens: expected at most max_num_tokens = 8, got 9"
    place = dict(mesh=cases.ep_mesh(4), axis="ep") if ranks == 4 else {}
    with pytest.raises(ValueError, match=f"^{text}$"):
        call(cfg, 9 * ranks, **place)
    assert not emulation.memory.allocated


def test_experts_that_do_not_divide(emulation: Emulation) -> None:
    text = "num_experts: expected a multiple of the 8 expert-parallel ranks, got 12"
    with pytest.raises(ValueError, match=text):
        call(config(num_experts=12), mesh=cases.ep_mesh(8), axis="ep")
    with pytest.raises(ValueError, match=text):
        mm.check_supported(config(num_experts=12), jax.devices()[0], 8)


@pytest.mark.parametrize(
    ("cfg", "num_ranks", "text"),
    [
        (config(num_experts=146), 73, "num_ranks: expected at most 72, got 73"),
        (config(num_experts=64, top_k=33), 8, "top_k: expected at most 31, got 33"),
        (
            config(num_experts=64, top_k=32, num_shared_experts=1),
            8,
            "top_k with the shared expert's slot: expected at most 32, got 33",
        ),
        (config(num_experts=4096), 8, "num_experts: expected at most 2048, got 4096"),
        (config(num_experts=1024), 1, "num_experts per rank: expected at most 512, got 1024"),
        (config(hidden_size=4352), 1, "hidden_size: expected a multiple of 512, got 4352"),
        (config(hidden_size=16384), 1, "hidden_size: expected at most 8192 in a ring for every"),
        (config("bf16", hidden_size=16384), 1, "hidden_size: expected at most 9216, got 16384"),
        (
            config(max_num_tokens=1 << 20, num_experts=72),
            72,
            "max_num_tokens: expected a ring of at most 8388608 received tokens, got",
        ),
    ],
)
def test_limits_of_sm100(
    cfg: mm.MoEConfig, num_ranks: int, text: str, emulation: Emulation
) -> None:
    with pytest.raises(ValueError, match=f"^{text}"):
        mm.check_supported(cfg, jax.devices()[0], num_ranks)


@pytest.mark.parametrize(
    ("changes", "num_ranks", "text"),
    [
        ({"num_experts": 66}, 33, "num_ranks: expected at most 32, got 33"),
        ({"num_experts": 64, "top_k": 33}, 8, "top_k: expected at most 32, got 33"),
        ({"hidden_size": 768}, 1, "hidden_size: expected a multiple of 512, got 768"),
        ({"intermediate_size": 384}, 1, "intermediate_size: expected a multiple of 256, got 384"),
        ({"intermediate_size": 8192}, 1, "intermediate_size: expected at most 4096, got 8192"),
    ],
)
def test_limits_of_sm90(
    changes: dict[str, int], num_ranks: int, text: str, emulation: Emulation
) -> None:
    emulation.device = H200
    cfg = config("fp8_block", **(dict(hidden_size=512) | changes))
    with pytest.raises(ValueError, match=f"^{text}"):
        mm.check_supported(cfg, jax.devices()[0], num_ranks)


def test_check_supported_names_the_source(emulation: Emulation) -> None:
    device = jax.devices()[0]
    assert mm.check_supported(config("mxfp4"), device, 8) == "sgl"
    assert mm.check_supported(config("mxfp4", kernel_source="vllm"), device, 16) == "vllm"
    odd = mm.Activation("swiglu", alpha=1.5)
    for form in ("mxfp4", "nvfp4", "bf16"):
        assert mm.check_supported(config(form, activation=odd), device) == "vllm"
    emulation.device = H200
    assert mm.check_supported(config("fp8_block", hidden_size=512), device, 16) == "sgl"
