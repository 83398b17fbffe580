"""What one launch computes, as numbers and names: the input of every planner."""

from dataclasses import dataclass

from jax_megamoe.config import MoEConfig


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Sizes, formats and options of one MegaMoE launch on one rank.

    Attributes:
        num_experts: over all ranks.
        max_num_tokens: tokens per rank the buffer is asked to hold, before alignment.
        num_tokens: this call's tokens on this rank.
        weight_format: what the routed weights are stored as: ``"mxfp4"``, ``"mxfp8"``, ``"nvfp4"``,
            ``"bf16"`` or ``"fp8_block"``.
        num_shared_experts: fused shared experts the buffer has room for.
        shared_format: format of the fused shared weights; None: none are passed.
        activation: ``"swiglu"``, ``"swigluoai"`` (alpha 1.702, beta 1) or ``"situ"``.
        clamp: None: no limit.
        stats: whether tokens per local expert are counted.
        x_scales: whether tokens carry a float32 scale each (NVFP4).
        l1_alphas, l2_alphas, l2_act_scales: whether per-expert float32 factors are passed.
        l2_activation_scale: the one scale of all layer-2 inputs (vllm's NVFP4), by value; None: an
            operand of this name holds it.
        num_tokens_bound: most tokens of any rank in this call (SM90); 0: unknown.
    """

    num_ranks: int
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    max_num_tokens: int
    num_tokens: int
    weight_format: str
    num_shared_experts: int = 0
    shared_format: str | None = None
    activation: str = "swiglu"
    clamp: float | None = None
    alpha: float = 1.0
    beta: float = 0.0
    fast_math: bool = True
    stats: bool = False
    x_scales: bool = False
    l1_alphas: bool = False
    l2_alphas: bool = False
    l2_act_scales: bool = False
    l2_activation_scale: float | None = 1.0
    num_tokens_bound: int = 0

    @property
    def all_tokens(self) -> int:
        """Tokens of all ranks, as far as one knows: as many on each as here."""
        return self.num_tokens * self.num_ranks

    @property
    def local_experts(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.num_ranks

    @property
    def fused_shared_experts(self) -> int:
        """Shared experts with weights in the call: the kernel's own count."""
        return 0 if self.shared_format is None else self.num_shared_experts


def problem_of(config: MoEConfig, num_ranks: int, num_tokens: int) -> Problem:
    """A call's numbers, as far as they are the same for every family."""
    return Problem(
        num_ranks=num_ranks,
        num_experts=config.num_experts,
        top_k=config.top_k,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        max_num_tokens=config.max_num_tokens,
        num_tokens=num_tokens,
        weight_format=config.weight_format.name,
        num_shared_experts=config.num_shared_experts,
        shared_format=config.shared_format if config.num_shared_experts else None,
        activation=config.activation.name,
        clamp=config.activation.clamp,
        alpha=config.activation.alpha,
        beta=config.activation.beta,
        fast_math=config.fast_math,
    )
