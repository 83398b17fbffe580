"""What the config.json of published models says of their MoE layers, and what follows from it.

Keys that say nothing of these layers are left out. The models' configs are on huggingface.co under
the names given here; DeepSeek-V4's sizes are also in transformers' DeepseekV4Config.
"""

from typing import Any

_FP8 = dict(
    quant_method="fp8",
    fmt="e4m3",
    activation_scheme="dynamic",
    weight_block_size=[128, 128],
)
_DEEPSEEK_V3 = dict(
    model_type="deepseek_v3",
    hidden_act="silu",
    hidden_size=7168,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    moe_layer_freq=1,
    n_group=8,
    n_routed_experts=256,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_experts_per_tok=8,
    num_hidden_layers=61,
    num_nextn_predict_layers=1,
    first_k_dense_replace=3,
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    topk_group=4,
    topk_method="noaux_tc",
    vocab_size=129280,
    quantization_config=_FP8,
)
_DEEPSEEK_V4 = dict(
    model_type="deepseek_v4",
    hidden_act="silu",
    hidden_size=4096,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_experts_per_tok=6,
    num_hash_layers=3,
    num_hidden_layers=43,
    num_nextn_predict_layers=1,
    routed_scaling_factor=1.5,
    scoring_func="sqrtsoftplus",
    swiglu_limit=10.0,
    topk_method="noaux_tc",
    vocab_size=129280,
    expert_dtype="fp4",
    quantization_config=_FP8 | dict(scale_fmt="ue8m0"),
)
_QWEN3_MOE = dict(
    model_type="qwen3_moe",
    decoder_sparse_step=1,
    hidden_act="silu",
    hidden_size=2048,
    intermediate_size=6144,
    mlp_only_layers=[],
    moe_intermediate_size=768,
    norm_topk_prob=True,
    num_experts=128,
    num_experts_per_tok=8,
    num_hidden_layers=48,
    vocab_size=151936,
)
_GPT_OSS = dict(
    model_type="gpt_oss",
    experts_per_token=4,
    hidden_act="silu",
    hidden_size=2880,
    intermediate_size=2880,
    num_experts_per_tok=4,
    num_hidden_layers=36,
    num_local_experts=128,
    swiglu_limit=7.0,
    vocab_size=201088,
    quantization_config=dict(
        quant_method="mxfp4",
        modules_to_not_convert=[
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    ),
)

HF_CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek-ai/DeepSeek-V3": _DEEPSEEK_V3,
    "moonshotai/Kimi-K2-Instruct": _DEEPSEEK_V3
    | dict(
        model_type="kimi_k2",
        n_group=1,
        n_routed_experts=384,
        num_nextn_predict_layers=0,
        first_k_dense_replace=1,
        routed_scaling_factor=2.827,
        topk_group=1,
        vocab_size=163840,
    ),
    "deepseek-ai/DeepSeek-V4-Flash": _DEEPSEEK_V4,
    "deepseek-ai/DeepSeek-V4-Pro": _DEEPSEEK_V4
    | dict(
        hidden_size=7168,
        moe_intermediate_size=3072,
        n_routed_experts=384,
        num_hidden_layers=61,
        routed_scaling_factor=2.5,
    ),
    "Qwen/Qwen3-30B-A3B": _QWEN3_MOE,
    "Qwen/Qwen3-235B-A22B": _QWEN3_MOE
    | dict(
        hidden_size=4096,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        num_hidden_layers=94,
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": _QWEN3_MOE
    | dict(
        model_type="qwen3_next",
        intermediate_size=5632,
        moe_intermediate_size=512,
        num_experts=512,
        num_experts_per_tok=10,
        shared_expert_intermediate_size=512,
    ),
    "deepseek-ai/DeepSeek-V3.2": _DEEPSEEK_V3 | dict(model_type="deepseek_v32"),
    "zai-org/GLM-4.5": dict(
        model_type="glm4_moe",
        hidden_act="silu",
        hidden_size=5120,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        n_group=1,
        n_routed_experts=160,
        n_shared_experts=1,
        norm_topk_prob=True,
        num_experts_per_tok=8,
        num_hidden_layers=92,
        num_nextn_predict_layers=1,
        first_k_dense_replace=3,
        routed_scaling_factor=2.5,
        topk_group=1,
    ),
    "mistralai/Mixtral-8x7B-v0.1": dict(
        model_type="mixtral",
        hidden_act="silu",
        hidden_size=4096,
        intermediate_size=14336,
        num_experts_per_tok=2,
        num_hidden_layers=32,
        num_local_experts=8,
    ),
    "MiniMaxAI/MiniMax-M2": dict(
        model_type="minimax_m2",
        hidden_act="silu",
        hidden_size=3072,
        intermediate_size=1536,
        num_experts_per_tok=8,
        num_hidden_layers=62,
        num_local_experts=256,
        scoring_func="sigmoid",
        quantization_config=_FP8
        | dict(modules_to_not_convert=["gate", "e_score_correction_bias", "lm_head"]),
    ),
    "meta-llama/Llama-4-Scout-17B-16E": dict(
        model_type="llama4",
        text_config=dict(
            model_type="llama4_text",
            hidden_act="silu",
            hidden_size=5120,
            interleave_moe_layer_step=1,
            intermediate_size=8192,
            intermediate_size_mlp=16384,
            num_experts_per_tok=1,
            num_hidden_layers=48,
            num_local_experts=16,
        ),
    ),
    "tencent/Hunyuan-A13B-Instruct": dict(
        model_type="hunyuan_v1_moe",
        hidden_act="silu",
        hidden_size=4096,
        intermediate_size=3072,
        moe_intermediate_size=[3072] * 32,
        moe_topk=[8] * 32,
        norm_topk_prob=True,
        num_experts=64,
        num_hidden_layers=32,
        num_shared_expert=[1] * 32,
    ),
    "baidu/ERNIE-4.5-21B-A3B-PT": dict(
        model_type="ernie4_5_moe",
        hidden_act="silu",
        hidden_size=2560,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        moe_k=6,
        moe_layer_end_index=27,
        moe_layer_interval=1,
        moe_layer_start_index=1,
        moe_num_experts=64,
        moe_num_shared_experts=2,
        num_hidden_layers=28,
        use_bias=False,
    ),
    "openai/gpt-oss-120b": _GPT_OSS,
    "openai/gpt-oss-20b": _GPT_OSS | dict(num_local_experts=32, num_hidden_layers=24),
}

FACTS: dict[str, dict[str, Any]] = {
    "deepseek-ai/DeepSeek-V3": dict(
        experts=256, top_k=8, hidden=7168, inter=2048, shared=2048, form="mxfp8", dense=3
    ),
    "moonshotai/Kimi-K2-Instruct": dict(
        experts=384, top_k=8, hidden=7168, inter=2048, shared=2048, form="mxfp8", dense=1
    ),
    "deepseek-ai/DeepSeek-V4-Flash": dict(
        experts=256, top_k=6, hidden=4096, inter=2048, shared=2048, form="mxfp4", dense=0
    ),
    "deepseek-ai/DeepSeek-V4-Pro": dict(
        experts=384, top_k=6, hidden=7168, inter=3072, shared=3072, form="mxfp4", dense=0
    ),
    "Qwen/Qwen3-30B-A3B": dict(
        experts=128, top_k=8, hidden=2048, inter=768, shared=0, form="bf16", dense=0
    ),
    "Qwen/Qwen3-235B-A22B": dict(
        experts=128, top_k=8, hidden=4096, inter=1536, shared=0, form="bf16", dense=0
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": dict(
        experts=512, top_k=10, hidden=2048, inter=512, shared=512, form="bf16", dense=0
    ),
    "deepseek-ai/DeepSeek-V3.2": dict(
        experts=256, top_k=8, hidden=7168, inter=2048, shared=2048, form="mxfp8", dense=3
    ),
    "zai-org/GLM-4.5": dict(
        experts=160, top_k=8, hidden=5120, inter=1536, shared=1536, form="bf16", dense=3
    ),
    "mistralai/Mixtral-8x7B-v0.1": dict(
        experts=8, top_k=2, hidden=4096, inter=14336, shared=0, form="bf16", dense=0
    ),
    "MiniMaxAI/MiniMax-M2": dict(
        experts=256, top_k=8, hidden=3072, inter=1536, shared=0, form="mxfp8", dense=0
    ),
    "meta-llama/Llama-4-Scout-17B-16E": dict(
        experts=16, top_k=1, hidden=5120, inter=8192, shared=8192, form="bf16", dense=0
    ),
    "tencent/Hunyuan-A13B-Instruct": dict(
        experts=64, top_k=8, hidden=4096, inter=3072, shared=3072, form="bf16", dense=0
    ),
    "baidu/ERNIE-4.5-21B-A3B-PT": dict(
        experts=64, top_k=6, hidden=2560, inter=1536, shared=3072, form="bf16", dense=1
    ),
    "openai/gpt-oss-120b": dict(
        experts=128, top_k=4, hidden=2880, inter=2880, shared=0, form="mxfp4", dense=0
    ),
    "openai/gpt-oss-20b": dict(
        experts=32, top_k=4, hidden=2880, inter=2880, shared=0, form="mxfp4", dense=0
    ),
}
"""Experts, sizes, the format experts run in on a CPU and the number of dense layers in front."""
