"""Layers to time, by name."""

from dataclasses import asdict, dataclass
from typing import Any

from jax_megamoe.config import Activation, MoEConfig
from jax_megamoe.formats import RECIPES

SWIGLU = Activation("swiglu")

BF16_ROWS = "mxfp4_bf16"
"""The recipe of MXFP4 weights beside BF16 tokens."""

BYTES_OF_A_WEIGHT = {
    "bf16": 2.0,
    "fp8_block": 1 + 4 / 128**2,
    "mxfp4_block": 17 / 32,
    BF16_ROWS: 17 / 32,
}
"""By recipe, with the weight's part of the scales."""


@dataclass(frozen=True)
class Model:
    """Sizes of one layer's routed experts on one GPU.

    Attributes:
        title: for tables and pictures.
        num_experts, top_k, hidden_size, intermediate_size: as `MoEConfig`.
        activation: of its experts.
        has_biases: whether both matmuls have biases.
    """

    title: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: Activation = SWIGLU
    has_biases: bool = False

    def config(self, recipe: str, num_tokens: int) -> MoEConfig:
        """The layer in a recipe, for calls of up to so many tokens.

        Raises:
            ValueError: sizes that no layer has.
        """
        known = RECIPES[recipe]
        return MoEConfig(
            **self.sizes,
            max_num_tokens=num_tokens,
            weight_format=known.weights,
            activation_format=known.activations,
            activation=self.activation,
        )

    @property
    def sizes(self) -> dict[str, Any]:
        """Its sizes by their names in `MoEConfig`."""
        names = ("num_experts", "top_k", "hidden_size", "intermediate_size")
        return {name: getattr(self, name) for name in names}

    def described(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def of(cls, described: dict[str, Any]) -> "Model":
        """The model that `described` gave."""
        activation = Activation(**described["activation"])
        return cls(**{**described, "activation": activation})

    @property
    def weights_of_an_expert(self) -> int:
        """Elements of its three matrices."""
        return 3 * self.hidden_size * self.intermediate_size

    def flops(self, num_tokens: int) -> int:
        """Floating-point operations of a call's matmuls."""
        return 2 * num_tokens * self.top_k * self.weights_of_an_expert


MODELS = {
    "qwen3_30b": Model("Qwen3-30B-A3B", 128, 8, 2048, 768),
    "dsv3_ep8share": Model("DeepSeek-V3, one of 8 ranks", 32, 8, 7168, 2048),
    "v4_flash": Model("DeepSeek-V4-Flash", 256, 6, 4096, 2048, Activation("swiglu", clamp=10.0)),
    "gpt_oss_120b": Model(
        "GPT-OSS-120B", 128, 4, 2944, 2944,
        Activation("swiglu", clamp=7.0, alpha=1.702, beta=1.0), has_biases=True,
    ),
}  # fmt: skip
"""By name. Of DeepSeek-V3 the experts of one of 8 ranks, with 8 of them to a token as all ranks
would send it together; GPT-OSS's 2880 filled up to a multiple of 128."""

TINY = Model("a small layer", 16, 4, 256, 128)
"""For a machine without a GPU."""
