"""The layer in NumPy, one token and one expert at a time, written from the formats' formulas alone.

It shares no code with the package. Sums are float64, everything that rounds is float32.
"""

import ml_dtypes
import numpy as np

from jax_megamoe.config import Activation, MoEConfig
from jax_megamoe.weights.params import ExpertWeights

F32 = np.float32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F32)
GROUP = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16, "mxfp4_bf16": 32}
PACKED = ("mxfp4_block", "nvfp4_block")
"""Recipes whose codes and scales are in one array."""
SIGN_NIBBLE = (1, 3, 5, 7, 0, 2, 4, 6)
"""Where FlashInfer's kernels look for the sign of each of eight codes."""


def moe(
    x: np.ndarray,
    topk_ids: np.ndarray,
    topk_weights: np.ndarray,
    weights: ExpertWeights,
    cfg: MoEConfig,
    *,
    rounds: bool = True,
) -> np.ndarray:
    """The layer's output, float32 [T, H], before the last rounding to BF16.

    Args:
        x: [T, H].
        topk_ids: physical slots, -1 for unrouted.
        topk_weights: float32 [T, K].
        weights: one rank's, all experts.
        cfg: the layer.
        rounds: False for exact arithmetic on the stored weights.
    """
    form = cfg.recipe.name
    # sgl's NVFP4 kernel, whose row order it is, weighs before it quantises and has no floors.
    early_nvfp4 = weights.layout == "sgl_fp4"
    matrices, every_bias = experts(weights, form), biases(weights)
    a_scale = (
        F32(np.asarray(weights.routed.w2_input_scale).max() or 1) if form == "nvfp4" else F32(1)
    )
    out = np.zeros((len(x), cfg.hidden_size), F32)
    for t, row in enumerate(np.asarray(x, F32)):
        if weights.shared is not None:
            assert cfg.shared_format is not None
            mlp = shared(weights, cfg.shared_format)
            out[t] = _expert(row, F32(1), mlp, None, cfg, cfg.shared_format, F32(1), rounds)
        for k, e in enumerate(topk_ids[t]):
            if e < 0:
                continue
            weight = F32(topk_weights[t, k])
            bias = None if every_bias is None else [part[e] for part in every_bias]
            late = (form in ("nvfp4", "mxfp4_bf16") and not early_nvfp4) or not rounds
            early = F32(1) if late else weight
            mlp = [part[e] for part in matrices]
            rule = "sgl_nvfp4" if early_nvfp4 else form
            y = _expert(row, early, mlp, bias, cfg, rule, a_scale, rounds)
            out[t] = out[t] + (y * weight if late else y)
    return out


def _expert(row, weight, mlp, bias, cfg, form, a_scale, rounds):
    """One token through one expert; `weight` multiplies before the second matmul."""
    gate_w, up_w, down_w = (part.astype(np.float64) for part in mlp)
    bias = [0.0, 0.0, 0.0] if bias is None else bias
    x = quantise(row, form) if rounds else row
    gate = (x @ gate_w.T + bias[0]).astype(F32)
    up = (x @ up_w.T + bias[1]).astype(F32)
    sm100 = "block" not in form
    if rounds and sm100:
        gate, up = bf16(gate), bf16(up)
    # The scale of second inputs goes into the same factor in sgl's NVFP4 kernel.
    factor = weight * (F32(1) / a_scale) if rounds and form == "sgl_nvfp4" else weight
    hidden = activate(gate, up, cfg.activation, bf16 if rounds and sm100 else F32) * factor
    if rounds:
        hidden = requantise(hidden, form, a_scale)
    y = (hidden @ down_w.T + bias[2] * np.float64(weight)).astype(F32)
    return bf16(y) if rounds else y


def activate(gate: np.ndarray, up: np.ndarray, act: Activation, to_limit=F32) -> np.ndarray:
    """SwiGLU or SiTU with clamp, alpha and beta, float32."""
    if act.clamp is not None:
        limit = F32(to_limit(F32(act.clamp)))
        gate = np.minimum(gate, limit)
        up = np.maximum(np.minimum(up, limit), -limit)
    gate, up = gate.astype(np.float64), up.astype(np.float64)
    if act.name == "swiglu":
        return (gate / (1 + np.exp(-act.alpha * gate)) * (up + act.beta)).astype(F32)
    linear = act.beta * np.tanh(up / act.beta) if act.beta else up
    return (act.alpha * np.tanh(gate / act.alpha) / (1 + np.exp(-gate)) * linear).astype(F32)


def quantise(x: np.ndarray, form: str) -> np.ndarray:
    """The values that a token [H] has for the first matmul, float64."""
    x = x.astype(F32)
    if form in ("mxfp8", "mxfp4"):
        return _mxfp8(x)
    if form == "nvfp4":
        # By the product, as in golden/staging.npz: BF16 tokens sit on ties, where an ulp counts.
        token = np.maximum(np.abs(x).max(), F32(1e-12)) * F32(1 / 2688)
        blocks = (x / token).reshape(-1, 16)
        largest = np.abs(blocks).max(1, keepdims=True) / F32(6)
        scale = e4m3(np.clip(largest, F32(2.0**-9), F32(448)))
        return (e2m1(blocks / scale).astype(np.float64) * scale).reshape(-1) * token
    if form == "sgl_nvfp4":
        token = np.maximum(np.abs(x).max(), F32(1e-4)) / F32(2688)
        blocks = x.reshape(-1, 16)
        scale = e4m3(np.abs(blocks).max(1, keepdims=True) / (F32(6) * token))
        codes = e2m1(blocks * _inverse(scale, token))
        return (codes.astype(np.float64) * scale).reshape(-1) * token
    if "block" in form:
        blocks = x.reshape(-1, 128)
        scale = np.maximum(np.abs(blocks).max(1, keepdims=True), F32(1e-10)) / F32(448)
        return (e4m3(blocks * (F32(1) / scale)).astype(np.float64) * scale).reshape(-1)
    return bf16(x).astype(np.float64)


def requantise(hidden: np.ndarray, form: str, a_scale: np.floating) -> np.ndarray:
    """The values that hidden values [I] have for the second matmul, float64."""
    if form == "nvfp4":
        blocks = hidden.reshape(-1, 16)
        largest = np.abs(blocks).max(1, keepdims=True) / (F32(6) * a_scale)
        scale = e4m3(np.clip(largest, F32(2.0**-9), F32(448)))
        codes = e2m1(blocks * (F32(1) / (scale * a_scale)))
        return (codes.astype(np.float64) * scale).reshape(-1) * a_scale
    if form == "sgl_nvfp4":
        blocks = hidden.reshape(-1, 16)
        scale = e4m3(np.abs(blocks).max(1, keepdims=True) * F32(1 / 6))
        codes = e2m1(blocks * _inverse(scale, F32(1)))
        return (codes.astype(np.float64) * scale).reshape(-1) * a_scale
    if form in PACKED:
        # FlashInfer's kernels: a power of two next above, no floor.
        blocks = hidden.reshape(-1, 128)
        largest = np.abs(blocks).max(1, keepdims=True).astype(np.float64)
        scale = np.exp2(np.ceil(np.log2(np.where(largest > 0, largest, 1) / 448)))
        return (e4m3((blocks / scale).astype(F32)).astype(np.float64) * scale).reshape(-1)
    if form == "fp8_block":
        blocks = hidden.reshape(-1, 128)
        largest = np.maximum(np.abs(blocks).max(1, keepdims=True), F32(1e-10))
        scale = largest * (F32(1) / F32(448))
        return (e4m3(blocks * (F32(1) / scale)).astype(np.float64) * scale).reshape(-1)
    return quantise(hidden, form)


def _inverse(scale: np.ndarray, factor: np.floating) -> np.ndarray:
    """1 / (scale * factor), 0 where the scale is 0."""
    safe = np.where(scale > 0, scale * factor, F32(1))
    return np.where(scale > 0, F32(1) / safe, F32(0)).astype(F32)


def _mxfp8(x: np.ndarray) -> np.ndarray:
    blocks = x.reshape(-1, 32)
    ratio = np.maximum(np.abs(blocks).max(1, keepdims=True), F32(1e-4)) / F32(448)
    bits = ratio.astype(F32).view(np.int32)
    exponent = np.clip((bits >> 23) + (bits & 0x7FFFFF != 0), 1, 254)
    scale = np.exp2(exponent - 127.0)
    return (e4m3((blocks / scale).astype(F32)).astype(np.float64) * scale).reshape(-1)


def bf16(x: np.ndarray) -> np.ndarray:
    """float32 rounded to BF16."""
    return np.asarray(x, F32).astype(ml_dtypes.bfloat16).astype(F32)


def e4m3(x: np.ndarray) -> np.ndarray:
    """float32 rounded to E4M3, saturating."""
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(F32)


def e2m1(x: np.ndarray) -> np.ndarray:
    """float32 rounded to the nearest of `E2M1`, a tie to the even code."""
    distance = np.abs(np.abs(x)[..., None] - E2M1)
    nearest = distance == distance.min(-1, keepdims=True)
    # Of two nearest codes the even one: the first, unless the first is odd.
    first = nearest.argmax(-1)
    tie_up = (nearest.sum(-1) == 2) & (first % 2 == 1)
    return np.sign(x) * E2M1[np.where(tie_up, first + 1, first)]


def row_of(r: int, half: int, layout: str) -> int:
    """Where row r of gate (half 0) or up (half 1) stands in w13."""
    if layout != "sgl_fp4":
        return r // 8 * 16 + 8 * half + r % 8
    return r // 16 * 32 + 16 * (r % 2) + 8 * half + r % 16 // 2


def scale_row_of(r: int) -> int:
    """Where the scale of stored row r stands: within each 128, 32 j + i at 4 i + j."""
    return r // 128 * 128 + r % 32 * 4 + r % 128 // 32


def matrix(weight, scale, form: str, rows: list[int], global_scale=None) -> np.ndarray:
    """The stored rows `rows` of one matrix [N, K / v], decoded: float32 [len(rows), K]."""
    weight = np.asarray(weight)
    if form == "bf16":
        return weight.astype(F32)[rows]
    if form == "mxfp8":
        values = weight.astype(F32)
    else:
        codes = np.stack([weight & 15, weight >> 4], -1).reshape(len(weight), -1)
        values = E2M1[codes & 7] * np.where(codes & 8, F32(-1), F32(1))
    words = np.ascontiguousarray(np.asarray(scale).T)
    scales = words.view(np.uint8)[[scale_row_of(r) for r in range(len(words))]]
    if form == "nvfp4":
        factors = scales.view(ml_dtypes.float8_e4m3fn).astype(F32)
    else:
        factors = np.exp2(scales.astype(F32) - 127)
    decoded = (values * np.repeat(factors, GROUP[form], axis=1))[rows]
    return decoded if global_scale is None else decoded * F32(global_scale)


def packed(stored: np.ndarray, form: str, rows: list[int], factor: np.floating) -> np.ndarray:
    """Rows of a matrix as FlashInfer's kernel decodes them, float32 [len(rows), K]."""
    if form == "mxfp4_block":
        down, across, _ = stored.shape
        # [N, K / 128] rows of a tile: 4 x 16 bytes of codes, 4 scales.
        octets = stored[..., :8192].reshape(down, across, 4, 128, 16)
        octets = np.moveaxis(octets, 3, 1).reshape(down * 128, across, 64)
        scales = np.moveaxis(stored[..., 8192:].reshape(down, across, 128, 4), 2, 1)
        factors = np.exp2(scales.reshape(down * 128, across * 4).astype(F32) - 127)
    else:
        parts = stored.reshape(len(stored), -1, 80)
        octets, scales = parts[..., :64], np.ascontiguousarray(parts[..., 64:72])
        factors = scales.view(ml_dtypes.float8_e4m3fn).astype(F32).reshape(len(stored), -1)
    nibbles = np.stack([octets & 15, octets >> 4], -1).reshape(len(octets), -1, 8)
    signs = np.where(nibbles[..., list(SIGN_NIBBLE)] & 8, F32(-1), F32(1))
    values = (E2M1[nibbles & 7] * signs).reshape(len(octets), -1)
    products = values * np.repeat(factors, values.shape[1] // factors.shape[1], axis=1)
    # E4M3 without saturation: nothing in range may overflow.
    decoded = products.astype(ml_dtypes.float8_e4m3fn).astype(F32)
    return decoded[rows] * F32(factor)


def _fp8_block(weight, scale, rows: list[int], first_scale_row: int) -> np.ndarray:
    values = np.asarray(weight).astype(F32)[rows]
    grid = np.asarray(scale)[first_scale_row : first_scale_row + len(rows) // 128]
    return values * np.repeat(np.repeat(grid, 128, 0), 128, 1)


def _rows(weight, layout: str) -> list[list[int]]:
    rows = 128 * weight.shape[-3] if weight.shape[-1] == 8704 else weight.shape[-2]
    inter = rows // 2
    return [[row_of(r, half, layout) for r in range(inter)] for half in (0, 1)]


def _untiled(w: ExpertWeights) -> dict[str, np.ndarray]:
    """The fields of routed experts, rows of tiles one after another."""
    arrays = {name: np.asarray(array) for name, array in w.routed.arrays().items()}
    if w.layout == "sgl_fp4":
        e, tiles, rows, k = arrays["w13_weight"].shape
        arrays["w13_weight"] = arrays["w13_weight"].reshape(e, tiles * rows, k)
        arrays["w13_weight_scale"] = arrays["w13_weight_scale"].reshape(e, -1, tiles * rows)
        if "w13_bias" in arrays:
            arrays["w13_bias"] = arrays["w13_bias"].reshape(e, tiles * rows)
    return arrays


def experts(w: ExpertWeights, form: str) -> list[np.ndarray]:
    """gate [E, I, H], up [E, I, H], down [E, H, I]."""
    arrays = _untiled(w)
    gates = _rows(arrays["w13_weight"], w.layout)
    down_rows = list(range(w.routed.w2_weight.shape[1] * (128 if form == "mxfp4_block" else 1)))
    parts: list[list[np.ndarray]] = [[], [], []]
    for e in range(w.routed.w13_weight.shape[0]):
        one = {name: array[e] for name, array in arrays.items()}
        w13, s13 = one["w13_weight"], one.get("w13_weight_scale")
        w2, s2 = one["w2_weight"], one.get("w2_weight_scale")
        for half in (0, 1):
            if form in PACKED:
                part = packed(w13, form, gates[half], one["w13_weight_scale_2"])
            elif form == "fp8_block":
                part = _fp8_block(w13, s13, gates[half], half * len(gates[0]) // 128)
            else:
                part = matrix(w13, s13, form, gates[half], one.get("w13_weight_scale_2"))
            parts[half].append(part)
        if form in PACKED:
            parts[2].append(packed(w2, form, down_rows, one["w2_weight_scale_2"]))
        elif form == "fp8_block":
            parts[2].append(_fp8_block(w2, s2, down_rows, 0))
        else:
            parts[2].append(matrix(w2, s2, form, down_rows, one.get("w2_weight_scale_2")))
    return [np.stack(part) for part in parts]


def shared(w: ExpertWeights, form: str) -> list[np.ndarray]:
    """gate [S, H], up [S, H] and down [H, S] of the fused shared expert."""
    rows = _rows(w.shared.w13_weight, "interleave8")
    l1 = [matrix(w.shared.w13_weight, w.shared.w13_weight_scale, form, half) for half in rows]
    every = list(range(w.shared.w2_weight.shape[0]))
    return [*l1, matrix(w.shared.w2_weight, w.shared.w2_weight_scale, form, every)]


def biases(w: ExpertWeights) -> list[np.ndarray] | None:
    """gate [E, I], up [E, I] and down [E, H]; None without biases."""
    if w.routed.w13_bias is None:
        return None
    arrays = _untiled(w)
    gate, up = _rows(arrays["w13_weight"], w.layout)
    return [arrays["w13_bias"][:, gate], arrays["w13_bias"][:, up], arrays["w2_bias"]]
