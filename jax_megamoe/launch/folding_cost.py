"""What folded biases cost a layer: bytes of its parameters, operations of a token."""

from dataclasses import dataclass

import jax

from jax_megamoe.config import MoEConfig
from jax_megamoe.plan import folding
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.refusal import Refusal, missing
from jax_megamoe.runtime.devices import spec_of
from jax_megamoe.weights.params import parameter_shapes


@dataclass(frozen=True)
class FoldingCost:
    """A layer with folded biases, beside the same layer without biases, by a fused kernel.

    Attributes:
        plain: the layer without biases, its sizes filled up as far as the kernel asks.
        folded: the layer with them, filled up further where that left too few columns.
        plain_bytes, folded_bytes: bytes of all ranks' parameters, second biases included.
        plain_operations, folded_operations: of a token, two for a product and its sum: the matmuls
            of its experts, and the second biases' [1, E] by [E, H].
        gathered_bytes: of the second biases, which a call gathers over ranks; 0 on one.
    """

    plain: MoEConfig
    folded: MoEConfig
    plain_bytes: int
    folded_bytes: int
    plain_operations: int
    folded_operations: int
    gathered_bytes: int


def folding_cost(
    config: MoEConfig, device: jax.Device | DeviceSpec, num_ranks: int = 1, *, hidden_size: int
) -> FoldingCost:
    """What `fold_biases` costs a model on a device, by arithmetic; nothing is allocated or run.

    Decoding reads the weights of the chosen experts, a long prompt is bound by operations: the
    ratios of the bytes and of the operations bound what more a layer takes. Not measured.

    Args:
        config: the layer, sizes filled up to multiples of 128 at least.
        device: the device of each rank, or what a plan depends on of one that is not here.
        num_ranks: expert-parallel ranks.
        hidden_size: of the model.

    Raises:
        NotImplementedError: a recipe that holds no bias exactly, or no sizes near the config's that
            a fused kernel of the device takes with columns to spare.
    """
    reason = folding.unfoldable(config)
    spec = device if isinstance(device, DeviceSpec) else spec_of(device, config.reserved_sms)
    for refused in (reason, spec):
        if isinstance(refused, Refusal):
            raise refused.error()
    assert isinstance(spec, DeviceSpec)
    plain = folding.kernel_sizes(config, spec, num_ranks)
    folded = folding.folded_sizes(config, spec, num_ranks, hidden_size)
    if plain is None or folded is None:
        expected = "sizes that a fused kernel of the device takes, with columns to spare"
        got = f"{config.hidden_size} and {config.intermediate_size}"
        raise missing("config", expected, got).error()
    second = 4 * folded.num_experts * folded.hidden_size
    return FoldingCost(
        plain,
        folded,
        plain_bytes=parameter_shapes(plain).num_bytes,
        folded_bytes=parameter_shapes(folded).num_bytes + second,
        plain_operations=_operations(plain),
        folded_operations=_operations(folded) + 2 * folded.num_experts * folded.hidden_size,
        gathered_bytes=second if num_ranks > 1 else 0,
    )


def _operations(config: MoEConfig) -> int:
    return 6 * config.top_k * config.hidden_size * config.intermediate_size
