"""What a block checks of its parts, and of a checkpoint before it is loaded."""

from jax.sharding import AbstractMesh, Mesh

from jax_megamoe import _checks
from jax_megamoe.config import MoEConfig
from jax_megamoe.nn.hf_config import HASHED
from jax_megamoe.routing.router import Router
from jax_megamoe.weights.params import ExpertWeights


def check_block_sizes(
    config: MoEConfig, router: Router, stored_sizes: tuple[int, int], shared_size: int
) -> None:
    """Raises ValueError for a router, sizes or a shared expert that are not the config's."""
    for name, got, wanted in (
        ("num_experts", router.num_experts, config.logical_experts),
        ("top_k", router.top_k, config.top_k),
    ):
        if got != wanted:
            raise ValueError(_checks.message(f"router {name}", f"{wanted}, the config's", got))
    own = dict(hidden_size=config.hidden_size, intermediate_size=config.intermediate_size)
    for (name, limit), size in zip(own.items(), stored_sizes, strict=True):
        number = _checks.integer(f"stored_sizes {name}", size, minimum=1)
        _checks.at_most(f"stored_sizes {name}", number, limit, f"config.{name}")
    if config.num_shared_experts and shared_size not in (0, config.shared_size):
        expected = f"{config.shared_size}, the config's {config.num_shared_experts} experts"
        raise ValueError(_checks.message("shared_size", expected, shared_size))


def check_kind(router: Router, kind: str, layer_index: int) -> None:
    """Raises ValueError for a layer that chooses its experts in another way than the router."""
    hashed = bool(router.table_size)
    if hashed != (kind == HASHED):
        by = {True: "one that looks experts up by token id", False: "one that scores experts"}
        hint = f"make the block with from_config(..., layer_index={layer_index})"
        raise ValueError(_checks.message(f"layer {layer_index}", by[hashed], by[not hashed], hint))


def check_biases(wanted: bool, experts: ExpertWeights, prefix: str) -> None:
    """Raises ValueError for experts that have biases where the block has none, or the reverse."""
    has = experts.routed.w13_bias is not None
    if has != wanted:
        words = {True: "biases of the experts", False: "no biases of the experts"}
        raise ValueError(_checks.message(prefix, words[wanted], words[has]))


def concrete_mesh(mesh: Mesh | AbstractMesh | None) -> Mesh | None:
    """The mesh to load parameters onto; raises ValueError inside a trace."""
    if isinstance(mesh, AbstractMesh):
        expected = "a call outside jit: files are read"
        raise ValueError(_checks.message("load", expected, "one in a trace"))
    return mesh
