"""A checkpoint converted once to kernel layout, in two formats, and read as it is from then on."""

import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jax_megamoe as mm
from jax_megamoe.cli.demo.checkpoint import EXPERTS, write_checkpoint

stored = mm.MoEConfig(
    num_experts=16,
    top_k=4,
    hidden_size=256,
    intermediate_size=256,
    max_num_tokens=64,
    weight_format=mm.BF16,
)
keys = jax.random.split(jax.random.key(0))
x = jax.random.normal(keys[0], (64, 256)).astype(jnp.bfloat16)
router = jax.nn.softmax(jax.random.normal(keys[1], (64, 16)))
topk_weights, topk_ids = jax.lax.top_k(router, stored.top_k)


def convert(checkpoint: Path, form: str) -> None:
    """The experts in a format: converted to a file beside the checkpoint, read and compared."""
    (layer,) = mm.convert_checkpoint(
        checkpoint,
        checkpoint.with_name(f"{form}.safetensors"),
        prefix=EXPERTS,
        progress=False,
        # A field of the spec; what is not given comes from the checkpoint.
        weight_format=form,
    )
    # What the parameters are; top_k and the like are the calls'.
    weights = mm.load_converted(layer.path, layer.spec)

    again = mm.load_experts(layer.spec, checkpoint, prefix=EXPERTS, progress=False)
    for name, array in weights.arrays().items():
        if np.asarray(array).tobytes() != np.asarray(again.arrays()[name]).tobytes():
            raise SystemExit(f"{form}: {name} in the file is not what the checkpoint gives")

    config = replace(stored, weight_format=form)
    y = mm.mega_moe(x, topk_ids, topk_weights, weights, config=config)
    error = jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact)
    print(
        f"{form}: {layer.path.stat().st_size / 1e6:.1f} MB, bit for bit what the checkpoint gives, "
        f"relative error {error:.3f}"
    )
    if not error < 0.25:
        raise SystemExit(f"{form}: expected a relative error below 0.25")


with tempfile.TemporaryDirectory() as folder:
    # As Hugging Face has it: config.json, an index, shards with bfloat16 tensors of every expert.
    checkpoint = Path(folder, "checkpoint")
    print(f"checkpoint: {write_checkpoint(checkpoint, stored, seed=0) / 1e6:.1f} MB in bfloat16")

    # What rounding costs is measured from the checkpoint's own weights in float32.
    plain = mm.load_experts(stored, checkpoint, prefix=EXPERTS, progress=False)
    exact = mm.einsum_moe(x, topk_ids, topk_weights, plain, config=stored, exact=True)
    for form in ("mxfp8", "mxfp4"):
        convert(checkpoint, form)
