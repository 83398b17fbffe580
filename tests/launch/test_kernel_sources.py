"""Which source's kernel a call takes, by what is installed and in which order NVFP4's rows are."""

import logging
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulation import H200, MEGA, Emulation, call, config, fallback, kernel_of

import jax_megamoe as mm
from jax_megamoe import compile
from jax_megamoe.compile import MissingDependency
from jax_megamoe.launch import deep_gemm

NO_SGL = r"^kernel source: expected sgl$"


def only(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has one kernel source installed."""

    def find(name: str) -> None:
        if name != source:
            raise MissingDependency(f"kernel source: expected {name}")

    monkeypatch.setattr(compile, "find_source", find)
    monkeypatch.setattr(compile, "has_source", lambda name: name == source)


def test_the_source_that_is_installed_is_used(
    emulation: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    only("vllm", monkeypatch)
    call(config(max_num_tokens=58))
    assert kernel_of(emulation.driver.launches()[-1]).source == "vllm"
    with pytest.raises(MissingDependency, match=NO_SGL):
        call(config(kernel_source="sgl"))
    emulation.device = H200
    with pytest.raises(MissingDependency, match=NO_SGL):
        call(config("fp8_block", hidden_size=512))


def test_nvfp4_rows_of_a_source_that_is_not_installed(
    emulation: Emulation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = config("nvfp4", hidden_size=512, num_shared_experts=1, max_num_tokens=56)
    only("sgl", monkeypatch)
    text = (
        r"kernel source: expected vllm; or jax_megamoe.to_layout\(weights, 'sgl_fp4'\) for sgl's "
        "kernel"
    )
    with pytest.raises(MissingDependency, match=f"^{text}$"):
        call(cfg)
    assert "expected vllm; or jax_megamoe.to_layout" in fallback(cfg, caplog)
    layer = mm.MegaMoE(cfg, cases.weights(cfg))
    assert layer.layout == layer.weights.layout == "sgl_fp4"
    forced = config("nvfp4", hidden_size=512, num_shared_experts=1, kernel_source="vllm")
    assert mm.MegaMoE(forced, cases.weights(forced)).layout == "interleave8"
    assert mm.MegaMoE(cfg, cases.weights(cfg), implementation="xla").layout == "interleave8"
    only("vllm", monkeypatch)
    plain = config("nvfp4", hidden_size=512)
    assert cases.weights(plain).layout == "sgl_fp4"
    assert mm.MegaMoE(plain, cases.weights(plain)).layout == "interleave8"


@pytest.mark.parametrize("ranks", [1, 4])
def test_nvfp4s_shared_expert_is_unfused_on_sgl(
    ranks: int,
    emulation: Emulation,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    only("sgl", monkeypatch)
    cfg = config("nvfp4", hidden_size=512, num_shared_experts=1, max_num_tokens=52 + ranks)
    place = dict(mesh=cases.ep_mesh(4), axis="ep") if ranks == 4 else {}
    layer = mm.MegaMoE(cfg, cases.weights(cfg), **place)
    assert layer.weights.shared is not None
    # What the recording driver's kernel leaves is no result: zeros stand for it.
    kernel = deep_gemm.moe

    def routed(x: Any, *arguments: Any, **options: Any) -> Any:
        kernel(x, *arguments, **options)
        return jnp.zeros_like(x), None

    monkeypatch.setattr(deep_gemm, "moe", routed)
    mask = np.arange(32) % 5 == 1
    x, ids, factors = cases.tokens(cfg, 32)
    with caplog.at_level(logging.INFO, logger="jax_megamoe"):
        got = [layer(x, ids, factors, padding_mask=mask) for _ in range(2)][1]
    assert [record.getMessage() for record in caplog.records] == [
        f"{cfg} runs its shared expert unfused: sgl's nvfp4 kernel, whose row order the weights "
        "have, fuses none; vllm's does (python -m jax_megamoe sources fetch vllm, then "
        "jax_megamoe.to_layout(weights, 'interleave8'))"
    ]
    want = mm.mega_moe(
        x,
        np.full_like(ids, -1),
        factors,
        cases.weights(cfg),
        config=cfg,
        padding_mask=mask,
        implementation="xla",
    )
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    assert not np.asarray(got)[mask].any() and np.asarray(got)[~mask].any()


def test_nvfp4s_shared_expert_forced_on_sgl(emulation: Emulation) -> None:
    cfg = config("nvfp4", hidden_size=512, num_shared_experts=1, kernel_source="sgl")
    text = (
        r"shared_format: expected one of \['nvfp4'\] for sgl's sm100_fp8_fp4_mega_moe, got mxfp8; "
        "vllm's kernel fuses it: python -m jax_megamoe sources fetch vllm"
    )
    for run in (
        lambda: call(cfg),
        lambda: mm.check_supported(cfg, jax.devices()[0]),
        lambda: mm.allocate_buffers(cfg),
    ):
        with pytest.raises(NotImplementedError, match=f"^{text}$"):
            run()


def test_a_shared_function_beside_a_kernel_that_could_fuse(emulation: Emulation) -> None:
    cfg = config(num_shared_experts=1)
    bare = cases.weights(config())
    call(cfg, weights=bare, shared_experts=lambda x: x)
    (launch,) = emulation.launches(MEGA).values()
    call(config(), weights=bare)
    emulation.driver.launches()
    assert (
        kernel_of(launch).template_args == kernel_of(emulation.driver.launches()[-1]).template_args
    )
