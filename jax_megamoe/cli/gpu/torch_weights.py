"""Random quantised matrices in checkpoint order for peers that need torch, and layers of them.

Only the process of a peer imports this.
"""

from dataclasses import dataclass
from typing import Any

import torch  # pyright: ignore[reportMissingImports]

from jax_megamoe.cli.gpu.models import Model

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_RMS = (sum(each**2 for each in E2M1) / len(E2M1)) ** 0.5


@dataclass(frozen=True)
class Matrix:
    """One matrix of every expert, rows contiguous.

    Attributes:
        codes: uint8 [E, N, K / 2] for MXFP4, the even element in the low bits; E4M3 [E, N, K].
        scale: UE8M0 as uint8 [E, N, K / 32] for MXFP4; float32 [E, N / 128, K / 128].
    """

    codes: Any
    scale: Any

    def expert(self, index: int) -> Any:
        """float32 [N, K]."""
        codes, scale = self.codes[index], self.scale[index]
        if codes.dtype != torch.uint8:
            wide = scale.repeat_interleave(128, 0)[: codes.shape[0]]
            return codes.float() * wide.repeat_interleave(128, 1)[:, : codes.shape[1]]
        values = torch.tensor([*E2M1, *(-each for each in E2M1)], device=codes.device)
        pairs = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
        return values[pairs.long()] * torch.exp2(scale.float() - 127).repeat_interleave(32, 1)


def random_matrix(shape: tuple[int, int, int], recipe: str, seed: int) -> Matrix:
    """A matrix [E, N, K] of about variance 1 / K; codes of MXFP4 are uniform, E4M3's normal.

    Args:
        shape: (E, N, K).
        recipe: ``"fp8_block"``, or one of MXFP4 weights.
        seed: of its random numbers.
    """
    experts, rows, columns = shape
    draw = dict(device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
    if recipe != "fp8_block":
        codes = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, **draw)
        middle = 127 + round(float(torch.log2(torch.tensor(columns**-0.5 / _RMS))))
        size = (experts, rows, columns // 32)
        scale = torch.randint(middle - 1, middle + 2, size, dtype=torch.uint8, **draw)
        return Matrix(codes, scale)
    codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
    for each in codes:  # one at a time: the normal numbers are twice as large as the codes
        each.copy_(64 * torch.randn((rows, columns), dtype=torch.bfloat16, **draw))
    blocks = (experts, -(-rows // 128), -(-columns // 128))
    return Matrix(codes, (0.5 + torch.rand(blocks, **draw)) * columns**-0.5 / 64)


def layer(
    x: Any, routing: tuple[Any, Any], matrices: tuple[Matrix, Matrix], model: Model, *, pairs: bool
) -> Any:
    """The layer in float32, without biases.

    Args:
        x: bfloat16 [T, H].
        routing: ids int32 [T, K] and weights float32 [T, K].
        matrices: w13 [E, 2I, H] and w2 [E, H, I].
        model: its activation.
        pairs: gate and up rows take turns in w13; else all gate rows come first.
    """
    ids, factors = routing
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    act = model.activation
    for index in torch.unique(ids).tolist():
        token, slot = (ids == index).nonzero(as_tuple=True)
        both = x[token].float() @ matrices[0].expert(index).T
        gate, up = (both[:, 0::2], both[:, 1::2]) if pairs else both.chunk(2, dim=1)
        if act.clamp is not None:
            gate, up = gate.clamp(max=act.clamp), up.clamp(-act.clamp, act.clamp)
        hidden = gate * torch.sigmoid(act.alpha * gate) * (up + act.beta)
        out = hidden @ matrices[1].expert(index).T
        total.index_add_(0, token, out * factors[token, slot, None])
    return total
