"""Runs the layers of `transformers_cases.py` through transformers' own MoE blocks and records what
they give, in tests/golden/transformers/.

Needs torch and transformers (``pip install '.[transformers]'``), on the CPU:
``python tests/record_transformers.py [CASE ...]``, all cases if none is named.
"""

import sys
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers_cases
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextModel
from transformers_cases import CASES, RECORDS, Case

_BIAS = "e_score_correction_bias"


class Output(NamedTuple):
    """What a block of transformers gave, tokens in order.

    Attributes:
        y: float32 [T, H].
        topk_ids: [T, K].
        topk_weights: float32 [T, K].
    """

    y: np.ndarray
    topk_ids: np.ndarray
    topk_weights: np.ndarray


def run(case: Case, dtype: torch.dtype) -> Output:
    """The case through transformers' block, parameters and tokens in this dtype.

    Correction biases stay float32, as transformers loads them.
    """
    config = config_of(case)
    folder, name = case.block.split(".")
    module = import_module(f"transformers.models.{folder}.modeling_{folder}")
    has_index = folder in ("deepseek_v4", "hunyuan_v1_moe")
    block = getattr(module, name)(config, *([case.layer_index] if has_index else []))
    block = block.to(dtype).eval()
    for name, buffer in block.named_buffers():
        if name.endswith("correction_bias"):
            buffer.data = buffer.float()
    block.load_state_dict(_state(case, dtype))
    router = block.router if folder in ("gpt_oss", "llama4") else block.gate
    seen: list[Any] = []
    router.register_forward_hook(lambda module, args, output: seen.append(output))
    y = _output(block, case, dtype)
    if folder == "llama4":
        # Its router gives the weight of every expert, 0 for those that were not chosen.
        weights, ids = seen[0][0].topk(case.hf_config["num_experts_per_tok"])
    else:
        _, weights, ids = seen[0]
    return Output(y, ids.numpy(), weights.float().numpy())


def config_of(case: Case) -> Any:
    """transformers' config of the case."""
    folder = case.block.split(".")[0]
    module = import_module(f"transformers.models.{folder}.configuration_{folder}")
    classes = dict(
        deepseek_v3="DeepseekV3Config",
        deepseek_v4="DeepseekV4Config",
        qwen3_moe="Qwen3MoeConfig",
        qwen3_next="Qwen3NextConfig",
        gpt_oss="GptOssConfig",
        deepseek_v32="DeepseekV32Config",
        glm4_moe="Glm4MoeConfig",
        dots1="Dots1Config",
        ernie4_5_moe="Ernie4_5_MoeConfig",
        hunyuan_v1_moe="HunYuanMoEV1Config",
        llama4="Llama4TextConfig",
        minimax_m2="MiniMaxM2Config",
        mixtral="MixtralConfig",
        olmoe="OlmoeConfig",
        qwen2_moe="Qwen2MoeConfig",
        qwen3_5_moe="Qwen3_5MoeTextConfig",
        qwen3_vl_moe="Qwen3VLMoeTextConfig",
        qwen4_exp="Qwen4ExpTextConfig",
    )
    dropped = ("model_type", "scoring_func") if folder == "dots1" else ("model_type",)
    keys = {key: value for key, value in case.hf_config.items() if key not in dropped}
    return getattr(module, classes[folder])(**keys, experts_implementation="eager")


def _state(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The case's checkpoint under the names of transformers' modules, experts stacked."""
    tensors = {
        name.removeprefix(f"{case.prefix}."): _torch(array, dtype)
        for name, array in transformers_cases.checkpoint(case).items()
    }
    for old, new in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        tensors = {name.replace(f".{old}.", f".{new}."): t for name, t in tensors.items()}
    for old, new in (
        ("gate.bias", "gate.e_score_correction_bias"),
        (f"moe_statics.{_BIAS}", f"gate.moe_statics.{_BIAS}"),
    ):
        if old in tensors:
            tensors[new] = tensors.pop(old)
    if case.block.startswith("qwen3_vl_moe."):
        # transposed in the checkpoint, not in the module
        for name in ("experts.gate_up_proj", "experts.down_proj"):
            tensors[name] = tensors[name].transpose(1, 2)
    stacks: dict[str, list[torch.Tensor]] = {}
    numbered = [name for name in tensors if name.startswith("experts.") and name[8].isdecimal()]
    for name in numbered:
        stacks.setdefault(name.split(".")[2], []).append(tensors.pop(name))
    if stacks:
        pairs = zip(stacks["gate_proj"], stacks["up_proj"], strict=True)
        tensors["experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        tensors["experts.down_proj"] = torch.stack(stacks["down_proj"])
    return tensors


def _torch(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    if array.dtype == np.int64:
        return torch.tensor(array)
    wide = torch.tensor(array.astype(np.float32))
    return wide if array.dtype == np.float32 else wide.to(dtype)


_LATENT = dict(
    q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16
)
_LINEAR = dict(
    head_dim=32,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
_ATTENTION: dict[str, dict[str, Any]] = dict(
    deepseek_v3=_LATENT,
    deepseek_v32=_LATENT | dict(index_n_heads=2, index_head_dim=32),
    deepseek_v4=dict(
        num_key_value_heads=1,
        head_dim=32,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=32,
        index_n_heads=2,
        index_head_dim=16,
    ),
    gpt_oss=dict(head_dim=32),
    qwen3_moe=dict(head_dim=32),
    qwen3_next=_LINEAR,
    qwen3_5_moe=_LINEAR,
    qwen4_exp=_LINEAR,
    glm4_moe=dict(head_dim=32),
    hunyuan_v1_moe=dict(head_dim=32),
    llama4=dict(head_dim=32, pad_token_id=0),
    minimax_m2=dict(head_dim=32),
)
"""Small sizes of what is beside the MoE blocks, by folder of transformers' models."""


def save_model(case: Case, folder: Path) -> np.ndarray:
    """Saves a whole model of the family with parameters that transformers drew, as bfloat16.

    Returns:
        float32 y [T, H] of the case's layer in float32, for the case's inputs.
    """
    sizes = dict(num_attention_heads=4, num_key_value_heads=4, vocab_size=64)
    changes = sizes | _ATTENTION.get(case.block.split(".")[0], {})
    config = config_of(replace(case, hf_config=case.hf_config | changes))
    torch.manual_seed(0)
    if case.name == "qwen3_vl_moe":
        model = Qwen3VLMoeTextModel(config).to(torch.bfloat16)
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    layer = getattr(model, "model", model).layers[case.layer_index]
    block = getattr(layer, "feed_forward" if case.name == "llama4" else "mlp").float().eval()
    return _output(block, case, torch.float32)


def _output(block: torch.nn.Module, case: Case, dtype: torch.dtype) -> np.ndarray:
    x, token_ids = transformers_cases.inputs(case)
    arguments = [torch.tensor(x.astype(np.float32)).to(dtype)[None]]
    if case.name == "deepseek_v4_hashed":
        arguments.append(torch.tensor(token_ids)[None])
    with torch.no_grad():
        y = block(*arguments)
    y = y[0] if isinstance(y, tuple) else y
    return y.reshape(x.shape).float().numpy()


def record(case: Case) -> None:
    """Writes the case's record."""
    exact, rounded = run(case, torch.float32), run(case, torch.bfloat16)
    RECORDS.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        RECORDS / f"{case.name}.npz",
        y=exact.y,
        topk_ids=exact.topk_ids.astype(np.int32),
        topk_weights=exact.topk_weights,
        y_bfloat16=rounded.y.view(np.uint32).__rshift__(16).astype(np.uint16),
        weights_crc=np.uint32(transformers_cases.digest(transformers_cases.checkpoint(case))),
        versions=np.array([f"transformers {version('transformers')}", f"torch {version('torch')}"]),
    )
    same = np.mean(np.sort(exact.topk_ids) == np.sort(rounded.topk_ids))
    error = np.linalg.norm(rounded.y - exact.y) / np.linalg.norm(exact.y)
    print(f"{case.name}: bfloat16 against float32 {error:.2e}, same experts {same:.3f}")


if __name__ == "__main__":
    chosen = sys.argv[1:] or [case.name for case in CASES]
    for each in CASES:
        if each.name in chosen:
            record(each)
