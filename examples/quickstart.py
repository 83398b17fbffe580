"""A MoE layer in MXFP8: quantise its weights, run it, spread it over all devices, compare."""

import jax
import jax.numpy as jnp

import jax_megamoe as mm

config = mm.MoEConfig(
    num_experts=16,
    top_k=4,
    hidden_size=512,
    intermediate_size=256,
    max_num_tokens=128,  # on each rank
    weight_format=mm.MXFP8,
)


def normal(seed: int, *shape: int) -> jax.Array:
    """Random bfloat16 of variance 1 / fan-in."""
    values = jax.random.normal(jax.random.key(seed), shape) * shape[-1] ** -0.5
    return values.astype(jnp.bfloat16)


gate, up = normal(0, 16, 256, 512), normal(1, 16, 256, 512)  # [experts, intermediate, hidden]
down = normal(2, 16, 512, 256)  # [experts, hidden, intermediate]
weights = mm.quantize_experts(config, gate, up, down)

x = 512**0.5 * normal(3, 128, 512)  # [tokens, hidden]
router_logits = jax.random.normal(jax.random.key(4), (128, 16))
topk_weights, topk_ids = jax.lax.top_k(jax.nn.softmax(router_logits), config.top_k)

# One device.
y = mm.mega_moe(x, topk_ids, topk_weights, weights, config=config)

# Expert parallel: tokens and experts split over the devices of a mesh axis.
mesh = jax.make_mesh((jax.device_count(),), ("ep",))
layer = mm.MegaMoE(config, weights, mesh=mesh, axis="ep")
y_ep = layer(x, topk_ids, topk_weights)

# The same weights without rounding of tokens and hidden values.
exact = mm.einsum_moe(x, topk_ids, topk_weights, weights, config=config, exact=True)
for name, got in {"one device": y, f"{mesh.size} ranks": y_ep}.items():
    error = jnp.linalg.norm(got - exact) / jnp.linalg.norm(exact)
    print(f"{name}: {got.shape} {got.dtype}, relative error {error:.3f}")
