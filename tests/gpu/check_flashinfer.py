"""4-bit experts on one H200, one rank: FlashInfer's kernels through `mega_moe` under jit.

    PYTHONPATH=.:tests:tests/gpu:benchmarks/gpu python tests/gpu/check_flashinfer.py \
        [--recipe nvfp4_block] [--quick | --shapes v4_flash]

Against `reference` and, for mxfp4_block, the bare launch that FlashInfer's own host code plans;
what is checked of each layer stands in one_rank.py. Besides: parameters whose scales spread over
more octaves than E4M3 has, and a layer whose intermediate size is over half
its hidden size.
"""

import argparse

import bare_launch
import jax
import jax.numpy as jnp
import one_rank
import workload
from jax import lax
from jaxtyping import Array

import jax_megamoe as mm
from jax_megamoe.weights.drawn import random_experts
from jax_megamoe.weights.params import default_layout

OCTAVES = 24
"""Over how many the scales of a matrix spread; E4M3 holds 11 beside the codes' own."""

SHAPES = (*workload.SHAPES, "gpt_oss")


def spread(config: mm.MoEConfig, key: Array) -> mm.ExpertWeights:
    """Random parameters, each group of 32 or 16 scaled down by up to OCTAVES octaves, in the layout
    of the kernel: `to_layout` rounds what it cannot decode, and logs how much."""
    plain = random_experts(config, key, layout="interleave8")
    mx = plain.format == "mxfp4"

    def moved(words: Array, key: Array) -> Array:
        scales = lax.bitcast_convert_type(words, jnp.uint8).astype(jnp.int32)
        # A step of UE8M0 is an octave, of E4M3 an eighth of one; neither gets to 0.
        down = jax.random.randint(key, scales.shape, 0, OCTAVES * (1 if mx else 8))
        scales = jnp.maximum(scales - down, 1).astype(jnp.uint8)
        return lax.bitcast_convert_type(scales, jnp.int32)

    names = ("w13_weight_scale", "w2_weight_scale")
    keys = jax.random.split(key, len(names))
    scales = {n: moved(getattr(plain.routed, n), k) for n, k in zip(names, keys, strict=True)}
    return mm.to_layout(plain.with_routed(**scales), default_layout(config))


def wide_spread(layer: one_rank.Layer) -> None:
    """Weights that the kernel cannot decode as they are."""
    params = spread(layer.cfg, jax.random.key(7))
    tokens = workload.tokens(layer.cfg, 64)
    y = layer.call(*tokens, params)
    name = layer.record(f"scales over {OCTAVES} octaves", y)
    layer.against_reference(y, tokens, name, params)


def main() -> None:
    """The script of one recipe."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--recipe", choices=["mxfp4_block", "nvfp4_block"], default="mxfp4_block")
    recipe = parser.parse_known_args()[0].recipe
    script = f"check_flashinfer_{recipe}"
    records = bare_launch.FLASHINFER_RECORDS if recipe == "mxfp4_block" else None
    one_rank.run(one_rank.Subject(script, recipe, SHAPES, records, (wide_spread,)))


if __name__ == "__main__":
    main()
