"""Launches of the MX kernels without shared experts, by the formulas of DeepGEMM's host code alone.

Nothing of `plan/` is used: what a launch is must come out the same twice. The form is that of the
golden records' launches.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

SIGNALS = 21_140_864
"""Bytes of counters at the start of a symmetric buffer."""

SHARED_MEMORY = 232_448
FULL_POOL_FROM = 6144
"""Tokens of a buffer from which sgl's kernel takes no ring."""

WEIGHTS = {
    # bits, driver data type, C++ type
    "mxfp4": (4, 14, "cutlass::detail::float_e2m1_unpacksmem_t"),
    "mxfp8": (8, 0, "cutlass::float_e4m3_t"),
}


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def up(a: int, b: int) -> int:
    return ceil(a, b) * b


@dataclass(frozen=True)
class Call:
    """Numbers of one launch: ranks, experts of all ranks, and so on."""

    source: str
    ranks: int
    experts: int
    top_k: int
    hidden: int
    inter: int
    asked: int
    tokens: int
    sms: int
    weights: str
    activation: str = "swiglu"
    clamp: float | None = None
    alpha: float = 1.0
    beta: float = 0.0
    fast_math: bool = True
    stats: bool = False
    rank: int = 0

    @property
    def local(self) -> int:
        return self.experts // self.ranks

    @property
    def held(self) -> int:
        """Tokens that the buffer has room for."""
        return up(self.asked, 1920)

    @property
    def received(self) -> int:
        return self.ranks * self.held * min(self.top_k, self.local)

    @property
    def pool(self) -> int:
        return up(self.received + 239 * self.local, 1920)

    @property
    def ring(self) -> int:
        if self.source == "sgl" and self.held >= FULL_POOL_FROM:
            return self.pool
        return up(max(map(self._need, (8, 16, 32, 64, 96, 128, 192, 240))), 1920)

    def _need(self, rows: int) -> int:
        clusters, n1, n2 = self.sms // 2, 2 * self.inter // 256, self.hidden // 256
        tiles = ceil(self.received, rows) + self.local
        ahead = ceil(n1 + (tiles - 1) * max(0, n1 - n2), clusters) + 1
        warm = max(ceil(ceil(clusters, n2) * n1, clusters), ahead)
        waves = min(warm, ceil(n1 * tiles, clusters))
        live = ceil(min(waves * clusters, n1 * tiles), n1)
        grow = ceil(tiles * (n2 - n1), n2) if n2 > n1 else 0
        return rows * min(tiles, live + grow + ceil(clusters, min(n1, n2)))

    @property
    def tile(self) -> int:
        mean = np.float32(self.tokens) * np.float32(self.ranks) * np.float32(self.top_k)
        mean = np.float32(mean / np.float32(self.experts))
        likely = float(np.float32(mean + np.sqrt(mean)))
        if mean <= 24:
            return 16 if mean <= 10 else 32
        count, tiles = math.ceil(likely / 240), (64, 128, 192, 240)
        if count == 1 and likely > 192 and self.local <= 13:
            count, tiles = 2, tiles[1:]
        return next(each for each in tiles if count * each >= likely)

    @property
    def stored(self) -> tuple[int, int]:
        if self.tile == 240:
            return 24, 8
        rows = {16: 8, 32: 16, 64: 16, 128: 32, 192: 48 if self.source == "sgl" else 32}[self.tile]
        return rows, rows

    @property
    def pull(self) -> int:
        size = self.hidden
        while size > 8192:
            size //= 2
        return size

    @property
    def stages_and_bytes(self) -> tuple[int, int]:
        first, second = self.stored
        fixed = up(4 * self.experts, 1024) + up(4 * self.pull, 1024)
        fixed += up(max(256 * first, 512 * second), 1024) + 32 * first + 292
        stage = (self.tile // 2 + 128) * 128 + (up(self.tile, 128) + 128) * 4 + 16
        stages = (SHARED_MEMORY - fixed) // stage
        return stages, fixed + stages * stage

    def offsets(self) -> dict[str, int]:
        """Bytes from the buffer's start to its regions; `end`: its size."""
        is_sgl, held, ring = self.source == "sgl", self.held, self.ring
        meta = SIGNALS + 4 * self.experts * held + 12 * self.pool
        meta += 4 * held * self.top_k if is_sgl else 0
        sizes = {
            "x": held * self.hidden,
            "x_sf": held * self.hidden // 32,
            "topk_idx": 8 * held * self.top_k,
            "topk_weights": 4 * held * self.top_k,
            "l1_acts": ring * self.hidden,
            "l1_acts_sf": 16 * ring * self.hidden // 32,
            "factors": 4 * ring,
            "l2_acts": ring * self.inter,
            "l2_acts_sf": 16 * ring * self.inter // 32,
            "combine": self.top_k * held * 2 * self.hidden,
            "x_scales": 4 * (held + ring) if is_sgl else 0,
        }
        found, at = {}, up(meta, 16)
        for name, size in sizes.items():
            found[name], at = at, at + size
        return found | {"end": at}


def launch(call: Call, arch: str) -> dict[str, Any]:
    """The launch."""
    stages, shared_memory = call.stages_and_bytes
    stem = "sm100_fp8_fp4_mega_moe"
    return {
        "entry": f"{stem}_impl",
        "include": f"deep_gemm/impls/{stem}.cuh",
        "template_args": _template(call, stages),
        "grid": [call.sms, 1, 1],
        "block": [512, 1, 1],
        "smem": shared_memory,
        "cluster": [2, 1, 1],
        "launch_attrs": [[4, [2, 1, 1]]],
        "args": [*_scalars(call), *_maps(call), _pointer("sm_locality_domains")],
        "nvcc_flags": [f"--gpu-architecture={arch}"],
    }


def _cpp(value: float | None) -> str:
    if value is None or value == math.inf:
        return "cute::numeric_limits<float>::infinity()"
    mantissa, exponent = float(np.float32(value)).hex().split("p")
    return f"{mantissa.rstrip('0').rstrip('.')}p{exponent}f".replace("0xp", "0x0p")


def _template(call: Call, stages: int) -> list[str]:
    first, second = call.stored
    head = (call.held, call.hidden, call.inter, call.experts, 0, call.top_k, call.tile, 128, 128)
    tiles = (first, second, up(call.tile, 128), 128)
    kind = ["MmaKind::MXFP8FP4"] if call.source == "sgl" else []
    machine = (call.ring, 16 * call.ring, stages, call.pull, 128, 128, 256, call.sms, call.ranks)
    fast, weight = str(call.fast_math).lower(), WEIGHTS[call.weights][2]
    if call.source == "vllm":
        step = str(call.activation == "swiglustep").lower()
        tail = [step, _cpp(call.alpha), _cpp(call.beta), fast, weight]
    else:
        alpha = 1.702 if call.activation == "swigluoai" else 0.0
        tail = [_cpp(alpha), "false", fast, *["false"] * 5, weight, _cpp(4.0), _cpp(25.0)]
        tail += [*["false"] * 3, _cpp(1e-6), "false"]
    numbers = [*map(str, head + tiles), *kind, *map(str, machine)]
    return [*numbers, _cpp(call.clamp), *tail]


def _pointer(name: str, is_there: bool = True) -> dict[str, Any]:
    return {"name": name, "ptr": {"tensor": name, "offset": 0} if is_there else None}


def _scalars(call: Call) -> list[dict[str, Any]]:
    absent = ["l1_alphas", "l2_alphas", "l2_act_scales", "post_expert_norm_weight"]
    base = {"tensor": "sym_buffer", "offset": 0}
    peers = {"base": base, "rank": call.rank, "offsets_are_peer_minus_self_then_zero": True}
    return [
        _pointer("y", call.tokens > 0),
        _pointer("cumulative_local_expert_recv_stats", call.stats),
        *(_pointer(name, False) for name in absent if call.source == "sgl"),
        {"name": "num_tokens", "u32": call.tokens},
        {"name": "sym_buffer", "sym": peers},
    ]


def _maps(call: Call) -> list[dict[str, Any]]:
    """Nine maps; those of shared experts, which there are none of, repeat them."""
    at, ring, half = call.offsets(), call.ring, call.tile // 2
    maps: list[dict[str, Any]] = []

    def add(name: str, dtype: int, shape: tuple[list[int], list[int], list[int]], swizzle: int,
            base: tuple[str, int]) -> None:  # fmt: skip
        dims, strides, box = shape
        where = {"tensor": base[0], "offset": base[1]}
        fields = dict(base=where, dtype=dtype, dims=dims, strides=strides, box=box)
        more = dict(elem_strides=[1] * len(dims), interleave=0, swizzle=swizzle, l2=3, oob=0)
        maps.append({"name": name, "tmap": fields | more})

    for layer, k, n in (("l1", call.hidden, 2 * call.inter), ("l2", call.inter, call.hidden)):
        bits, kind, _ = WEIGHTS[call.weights]
        row, rows = k * bits // 8, 16 * ring
        acts = ("sym_buffer", at[f"{layer}_acts"])
        add(f"{layer}_acts", 0, ([k, ring], [k], [128, half]), 3, acts)
        scales = ([rows, k // 128], [4 * rows], [up(call.tile, 128), 1])
        add(f"{layer}_acts_sf", 3, scales, 0, ("sym_buffer", at[f"{layer}_acts_sf"]))
        matrix = ([k, n // 2, 2, call.local], [row, row * n // 2, row * n], [128, 128, 1, 1])
        add(f"{layer}_weights", kind, matrix, 3, (f"{layer}_weights", 0))
        scales = ([n, k // 128 * call.local], [4 * n], [128, 1])
        add(f"{layer}_weights_sf", 3, scales, 0, (f"{layer}_weights_sf", 0))
        if layer == "l1":
            output = ([call.inter, ring], [call.inter], [64, call.stored[0]])
            add("l1_output", 0, output, 2, ("sym_buffer", at["l2_acts"]))
    return [*maps, *({**each, "name": f"shared_{each['name']}"} for each in maps)]
