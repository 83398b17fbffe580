"""hf_config.py: what published configs say, and what is refused."""

import json
import warnings
from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx
from hf_configs import FACTS, HF_CONFIGS

import jax_megamoe as mm
from jax_megamoe.nn.hf_config import block_spec, layers_of, read_hf_config
from jax_megamoe.weights.checkpoint.families import FAMILIES

V3, V4 = "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V4-Flash"
QWEN, GPT_OSS = "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-120b"
PLAIN = mm.Activation("swiglu")
ACTIVATIONS = {
    "deepseek_v4": mm.Activation("swiglu", clamp=10.0),
    "gpt_oss": mm.Activation("swiglu", clamp=7.0, alpha=1.702, beta=1.0),
}


@pytest.mark.parametrize("name", FACTS)
def test_block_of_a_published_model(name: str) -> None:
    """Built with shapes alone, on a mesh: the largest has 25 billion parameters a layer."""
    hf_config, facts = HF_CONFIGS[name], FACTS[name]
    mesh = jax.make_mesh((8,), ("ep",))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "experts: FP8 weights in 128x128 blocks are requantised")
        block = mm.MegaMoEBlock.from_config(hf_config, mesh=mesh, axis="ep", max_num_tokens=512)
    config, settings = block.config, block.router.settings
    assert (config.num_experts, config.top_k) == (facts["experts"], facts["top_k"])
    assert (settings.num_experts, settings.top_k) == (facts["experts"], facts["top_k"])
    assert block.stored_sizes == (facts["hidden"], facts["inter"])
    rounded = tuple(-(-size // 128) * 128 for size in block.stored_sizes)
    assert (config.hidden_size, config.intermediate_size) == rounded
    assert config.weight_format.name == facts["form"]
    assert config.activation == ACTIVATIONS.get(hf_config["model_type"], PLAIN)
    assert config.max_num_tokens == 512
    assert block.router.weight.shape == (facts["experts"], facts["hidden"])
    # A shared expert is fused in its own precision only: these files have it in FP8 blocks.
    apart = name in (V3, "deepseek-ai/DeepSeek-V3.2", "moonshotai/Kimi-K2-Instruct")
    if apart or hf_config["model_type"] in ("qwen3_next", "llama4"):
        assert config.num_shared_experts == 0
        assert block.shared_expert.gate_proj.shape == (facts["shared"], facts["hidden"])
        has_gate = block.shared_expert.output_gate is not None
        assert has_gate == (hf_config["model_type"] == "qwen3_next")
    else:
        assert block.shared_expert is None
        assert config.shared_size == facts["shared"]
    assert (block.experts.routed.w13_bias is not None) == (hf_config["model_type"] == "gpt_oss")
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(nnx.state(block)))


@pytest.mark.parametrize("name", FACTS)
def test_layers_and_family(name: str) -> None:
    hf_config, dense = HF_CONFIGS[name], FACTS[name]["dense"]
    layers, text = layers_of(hf_config), hf_config.get("text_config", hf_config)
    extra = text.get("num_nextn_predict_layers", 0)
    assert layers.count == text["num_hidden_layers"] + extra
    for index in range(dense):
        with pytest.raises(ValueError, match="expected an MoE layer, got a dense one"):
            layers.moe_kind(index)
    hashed = hf_config.get("num_hash_layers", 0)
    kinds = [layers.moe_kind(index) for index in range(dense, layers.count)]
    assert kinds == ["hashed"] * hashed + ["scored"] * (layers.count - dense - hashed)
    assert block_spec(hf_config, layers.count - 1).family == FAMILIES[hf_config["model_type"]].name


def test_routers() -> None:
    def router(name: str, layer_index: int | None = None) -> mm.Router:
        return block_spec(HF_CONFIGS[name], layer_index).router

    assert router(V3) == mm.Router(
        num_experts=256,
        top_k=8,
        scoring="sigmoid",
        renormalize=True,
        scaling_factor=2.5,
        num_groups=8,
        top_groups=4,
        has_correction_bias=True,
    )
    assert router("moonshotai/Kimi-K2-Instruct") == mm.Router(
        num_experts=384,
        top_k=8,
        scoring="sigmoid",
        renormalize=True,
        scaling_factor=2.827,
        has_correction_bias=True,
    )
    v4 = dict(num_experts=256, top_k=6, scoring="sqrtsoftplus", renormalize=True)
    assert router(V4) == mm.Router(**v4, scaling_factor=1.5, has_correction_bias=True)
    assert router(V4, 3) == router(V4)
    assert router(V4, 2) == mm.Router(**v4, scaling_factor=1.5, table_size=129280)
    assert router(QWEN) == mm.Router(num_experts=128, top_k=8, renormalize=True)
    assert router(GPT_OSS) == mm.Router(
        num_experts=128, top_k=4, scoring="topk_softmax", has_bias=True
    )


def test_routers_of_further_families() -> None:
    def router(name: str) -> mm.Router:
        return block_spec(HF_CONFIGS[name], 5).router

    assert router("deepseek-ai/DeepSeek-V3.2") == router(V3)
    sigmoid = dict(scoring="sigmoid", renormalize=True, has_correction_bias=True)
    assert router("zai-org/GLM-4.5") == mm.Router(
        num_experts=160, top_k=8, scaling_factor=2.5, **sigmoid
    )
    assert router("MiniMaxAI/MiniMax-M2") == mm.Router(num_experts=256, top_k=8, **sigmoid)
    assert router("mistralai/Mixtral-8x7B-v0.1") == mm.Router(
        num_experts=8, top_k=2, renormalize=True
    )
    assert router("tencent/Hunyuan-A13B-Instruct") == mm.Router(
        num_experts=64, top_k=8, renormalize=True
    )
    assert router("baidu/ERNIE-4.5-21B-A3B-PT") == mm.Router(
        num_experts=64, top_k=6, renormalize=True, has_correction_bias=True
    )
    assert router("meta-llama/Llama-4-Scout-17B-16E") == mm.Router(
        num_experts=16, top_k=1, scoring="sigmoid", weighs_input=True
    )


def test_values_of_one_layer() -> None:
    """Hunyuan's lists; without an index all layers must have one value."""
    name = "tencent/Hunyuan-A13B-Instruct"
    hf_config = HF_CONFIGS[name] | dict(moe_topk=[8] * 31 + [4])
    assert [block_spec(hf_config, index).router.top_k for index in (30, 31)] == [8, 4]
    message = "moe_topk in hf_config: expected an integer, or a list of one the same for all layers"
    with pytest.raises(ValueError, match=message):
        block_spec(hf_config)
    short = HF_CONFIGS[name] | dict(num_shared_expert=[1] * 3)
    with pytest.raises(ValueError, match=r"num_shared_expert .* one for layer 5, got a list"):
        block_spec(short, 5)


def test_keys_as_transformers_saves_them() -> None:
    """Its config classes rename some keys."""
    v4 = {k: v for k, v in HF_CONFIGS[V4].items() if k != "num_hash_layers"}
    kinds = ["hash_moe"] * 3 + ["moe"] * 40
    assert block_spec(v4 | dict(mlp_layer_types=kinds), 2).router.table_size == 129280
    layers = layers_of(v4 | dict(mlp_layer_types=kinds))
    assert (layers.count, layers.moe_kind(2), layers.moe_kind(3)) == (44, "hashed", "scored")
    qwen = {k: v for k, v in HF_CONFIGS[QWEN].items() if k != "num_experts"}
    assert block_spec(qwen | dict(num_local_experts=128)) == block_spec(HF_CONFIGS[QWEN])


def test_a_config_is_an_object_a_dict_or_a_path(tmp_path: Path) -> None:
    class Config:
        def to_dict(self) -> dict[str, Any]:
            return HF_CONFIGS[QWEN]

    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIGS[QWEN]))
    for given in (Config(), HF_CONFIGS[QWEN], tmp_path, str(tmp_path / "config.json")):
        assert read_hf_config(given) == HF_CONFIGS[QWEN]


def test_text_model_of_several() -> None:
    """As Kimi-K2.5's, whose quantisation stands in the text model or beside it."""
    kimi = HF_CONFIGS["moonshotai/Kimi-K2-Instruct"]
    assert read_hf_config(dict(model_type="kimi_k25", text_config=kimi)) == kimi
    text = {key: value for key, value in kimi.items() if key != "quantization_config"}
    beside = dict(quant_method="mxfp4")
    outer = dict(model_type="kimi_k25", text_config=text, quantization_config=beside)
    assert read_hf_config(outer) == text | dict(quantization_config=beside)
    unnamed = {key: value for key, value in text.items() if key != "model_type"}
    assert block_spec(dict(model_type="kimi_k2", text_config=unnamed)).family == "Kimi-K2"


def test_excluded_layers_are_bf16_and_the_rest_warns_alike() -> None:
    quantization = HF_CONFIGS[V3]["quantization_config"]
    excluding = quantization | dict(modules_to_not_convert=["model.layers.5.mlp"])
    hf_config = HF_CONFIGS[V3] | dict(quantization_config=excluding)

    def form_of(layer_index: int) -> tuple[str, list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            block = mm.MegaMoEBlock.from_config(
                hf_config, layer_index=layer_index, max_num_tokens=8
            )
        return block.config.weight_format.name, [str(each.message) for each in caught]

    assert form_of(5) == ("bf16", [])
    form, said = form_of(6)
    assert form == "mxfp8" and len(said) == 1 and said[0].startswith("experts: FP8 weights in")
    assert form_of(7) == (form, said)


@pytest.mark.parametrize(
    ("changes", "index", "reason"),
    [
        (dict(mlp_only_layers=[0, 5]), 5, "mlp_only_layers has it"),
        (dict(decoder_sparse_step=2), 6, "decoder_sparse_step is 2"),
        (dict(first_k_dense_replace=3), 2, "first_k_dense_replace is 3"),
        (dict(moe_layer_freq=2), 7, "moe_layer_freq is 2"),
        (dict(mlp_layer_types=["sparse", "dense"] * 24), 7, "mlp_layer_types says dense"),
        (dict(interleave_moe_layer_step=2), 6, "interleave_moe_layer_step is 2"),
        (dict(moe_layers=[0, 5, 7]), 6, "moe_layers has it not"),
        (dict(moe_layer_start_index=4), 3, "moe_layer_start_index is 4"),
        (dict(moe_layer_interval=2), 6, "moe_layer_interval is 2"),
    ],
)
def test_dense_layers_are_refused(changes: dict[str, Any], index: int, reason: str) -> None:
    other = {key: value for key, value in HF_CONFIGS[QWEN].items() if key != "decoder_sparse_step"}
    hf_config = other | changes
    message = rf"layer {index}: expected an MoE layer, got a dense one \({reason}\)"
    with pytest.raises(ValueError, match=message):
        mm.MegaMoEBlock.from_config(hf_config, layer_index=index, max_num_tokens=8)
    assert block_spec(hf_config, index + 1).family == "Qwen3-MoE"


class TestErrors:
    @pytest.mark.parametrize(
        ("name", "changes", "index", "message"),
        [
            (
                QWEN,
                dict(model_type="llama"),
                None,
                r"model_type in hf_config: expected one of \['deepseek_v3', 'deepseek_v32', .*"
                r"'qwen4_exp'\], got 'llama'; build a MegaMoEBlock from its parts",
            ),
            (QWEN, {}, 48, "layer_index: expected one of the model's 48 layers, got 48"),
            (QWEN, {}, -1, "layer_index: expected an integer >= 0, got -1"),
            (
                V3,
                dict(scoring_func="softmax"),
                None,
                r"scoring_func in hf_config: expected one of \['sigmoid'\]",
            ),
            (
                V3,
                dict(topk_method="greedy"),
                None,
                r"topk_method in hf_config: expected one of \['noaux_tc'\]",
            ),
            (
                V4,
                dict(swiglu_limit=0.0),
                None,
                "swiglu_limit in hf_config: expected a number > 0, or null",
            ),
            (V4, dict(scoring_func="tanh"), None, "scoring_func in hf_config: expected one of"),
            (
                QWEN,
                dict(hidden_size=0),
                None,
                "hidden_size in hf_config: expected an integer >= 1, got 0",
            ),
        ],
    )
    def test_values(
        self, name: str, changes: dict[str, Any], index: int | None, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            mm.MegaMoEBlock.from_config(
                HF_CONFIGS[name] | changes, layer_index=index, max_num_tokens=8
            )

    @pytest.mark.parametrize("key", ["hidden_size", "num_experts_per_tok", "norm_topk_prob"])
    def test_missing_key(self, key: str) -> None:
        hf_config = {k: v for k, v in HF_CONFIGS[QWEN].items() if k != key}
        message = rf"{key}( or \w+)* in hf_config: expected .*, got no such key"
        with pytest.raises(ValueError, match=message):
            block_spec(hf_config)

    def test_activation_that_does_not_run(self) -> None:
        message = (
            "hidden_act in hf_config: expected 'silu', which the experts run as SwiGLU, got 'gelu'"
        )
        with pytest.raises(NotImplementedError, match=message):
            block_spec(HF_CONFIGS[QWEN] | dict(hidden_act="gelu"))

    def test_stored_format_that_does_not_run(self) -> None:
        packed = dict(
            quant_method="compressed-tensors",
            format="pack-quantized",
            config_groups=dict(group_0=dict(targets=["Linear"], weights=dict(num_bits=4))),
        )
        kimi = HF_CONFIGS["moonshotai/Kimi-K2-Instruct"] | dict(quantization_config=packed)
        with pytest.raises(NotImplementedError, match="got 'pack-quantized'"):
            mm.MegaMoEBlock.from_config(kimi, max_num_tokens=8)

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(
            FileNotFoundError, match=r"hf_config: expected a config\.json, got .*none"
        ):
            read_hf_config(tmp_path / "none")

    def test_no_json(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ValueError, match=r"config.json: expected JSON, got"):
            read_hf_config(tmp_path)

    @pytest.mark.parametrize("content", ["[]", "null"])
    def test_json_of_another_kind(self, content: str, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=r"config\.json: expected a JSON object, got"):
            read_hf_config(tmp_path)

    def test_neither_config_nor_path(self) -> None:
        with pytest.raises(TypeError, match="hf_config: expected a transformers config"):
            read_hf_config(7)

    @pytest.mark.parametrize(
        ("name", "key", "value", "text"),
        [
            (QWEN, "norm_topk_prob", "false", "true or false, got 'false'"),
            (QWEN, "num_experts", 1.5, r"an integer >= 1, got 1\.5"),
            (QWEN, "num_experts", True, "an integer >= 1, got true"),
            (QWEN, "num_experts_per_tok", "8", "an integer >= 1, got '8'"),
            (QWEN, "hidden_size", None, "an integer >= 1, got null"),
            (QWEN, "hidden_size", 2**31, "an integer <= 2147483647, got 2147483648"),
            (QWEN, "hidden_size", 10**99, "an integer <= 2147483647, got an integer of 329 bits"),
            (QWEN, "mlp_only_layers", {}, "a list, got an object of 0 keys"),
            (QWEN, "mlp_only_layers", [0.5], r"an integer >= 0, got 0\.5"),
            (QWEN, "text_config", [], "a JSON object, got a list of 0"),
            (QWEN, "model_type", ["qwen3_moe"], "a string, got a list of 1"),
            (V3, "routed_scaling_factor", "2.5", r"a finite number, got '2\.5'"),
            (V3, "routed_scaling_factor", float("nan"), "a finite number, got nan"),
            (V3, "n_shared_experts", -1, "an integer >= 0, got -1"),
            (V3, "quantization_config", [], "a JSON object, got a list of 0"),
            (V4, "mlp_layer_types", "moe", "a list, got 'moe'"),
            (V4, "swiglu_limit", True, "a finite number, got true"),
        ],
    )
    def test_fields_of_another_kind(
        self, name: str, key: str, value: Any, text: str, tmp_path: Path
    ) -> None:
        """One kind of error, whoever reads the field; it names the file where there is one."""
        hf_config = HF_CONFIGS[name] | {key: value}
        (tmp_path / "config.json").write_text(json.dumps(hf_config))
        for given, origin in ((hf_config, "hf_config"), (tmp_path, r".*config\.json")):
            with pytest.raises(ValueError, match=f"^{key} in {origin}: expected {text}"):
                mm.MegaMoEBlock.from_config(given, max_num_tokens=8)

    @pytest.mark.parametrize(
        ("name", "changes", "text"),
        [
            (
                "mistralai/Mixtral-8x7B-v0.1",
                dict(norm_topk_prob=False),
                "norm_topk_prob in hf_config: expected true, as in every model of Mixtral, got fal",
            ),
            (
                V4,
                dict(mlp_layer_types=["moe"] * 42),
                "mlp_layer_types in hf_config: expected one of each of the 43 layers, got a list",
            ),
            (
                V4,
                dict(mlp_layer_types=["moe"] * 42 + ["mamba"]),
                r"mlp_layer_types in hf_config: expected a list of \[.*\], got 'mamba'",
            ),
        ],
    )
    def test_values_of_further_families(
        self, name: str, changes: dict[str, Any], text: str
    ) -> None:
        with pytest.raises(ValueError, match=text):
            block_spec(HF_CONFIGS[name] | changes)

    def test_biases_of_linear_layers(self) -> None:
        hf_config = HF_CONFIGS["baidu/ERNIE-4.5-21B-A3B-PT"] | dict(use_bias=True)
        message = "use_bias in hf_config: expected false: an MoE block without biases"
        with pytest.raises(NotImplementedError, match=message):
            block_spec(hf_config)

    def test_a_layer_after_the_last_with_experts(self) -> None:
        hf_config = HF_CONFIGS["baidu/ERNIE-4.5-21B-A3B-PT"] | dict(moe_layer_end_index=20)
        with pytest.raises(ValueError, match=r"a dense one \(moe_layer_end_index is 20\)"):
            block_spec(hf_config, 21)

    def test_two_experts_whose_inputs_are_weighed(self) -> None:
        text = HF_CONFIGS["meta-llama/Llama-4-Scout-17B-16E"]["text_config"]
        message = "router top_k: expected 1 where weights multiply inputs: .*, got 2"
        with pytest.raises(ValueError, match=message):
            block_spec(text | dict(num_experts_per_tok=2))

    def test_a_block_that_does_not_run(self) -> None:
        message = "^hf_config: expected a block that runs, got router top_k: expected at most"
        with pytest.raises(ValueError, match=message):
            block_spec(HF_CONFIGS[QWEN] | dict(num_experts_per_tok=200))

    def test_as_many_layers_as_an_integer_can_say(self) -> None:
        """Nothing loops over them."""
        many = 2**31 - 1
        hf_config = HF_CONFIGS[QWEN] | dict(num_hidden_layers=many)
        assert layers_of(hf_config).moe_kind(many - 1) == "scored"
        hf_config = HF_CONFIGS[V4] | dict(num_hash_layers=many, num_hidden_layers=many)
        assert layers_of(hf_config).moe_kind(many - 1) == "hashed"
        with pytest.raises(ValueError, match="num_hidden_layers in hf_config: expected an int"):
            layers_of(HF_CONFIGS[QWEN] | dict(num_hidden_layers=2**31))

    def test_sizes_as_large_as_an_integer_can_say(self) -> None:
        """A block of shapes costs what its config does."""
        size = 2**31 - 1
        sizes = dict(hidden_size=size, moe_intermediate_size=size, num_experts=size)
        block = mm.MegaMoEBlock.from_config(HF_CONFIGS[QWEN] | sizes, max_num_tokens=8)
        assert block.router.weight.shape == (size, size)
