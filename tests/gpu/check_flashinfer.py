"""4-bit experts on one H200, one rank: FlashInfer's kernels through `mega_moe` under jit.

    PYTHONPATH=.:tests:tests/gpu:benchmarks/gpu python tests/gpu/check_flashinfer.py \
        [--recipe nvfp4_block] [--quick | --shapes v4_flash]

Against `reference` and, for mxfp4_block, the bare launch that FlashInfer's own host code plans;
what is checked of each layer stands in one_rank.py. Besides: parameters whose scales spread over
more octaves than E4M3 has, and a layer whose intermediate size is over half its hidden size.
"""

import argparse

import bare_launch
import one_rank
import workload

SHAPES = (*workload.SHAPES, "gpt_oss")


def main() -> None:
    """The script of one recipe."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--recipe", choices=["mxfp4_block", "nvfp4_block"], default="mxfp4_block")
    recipe = parser.parse_known_args()[0].recipe
    records = bare_launch.FLASHINFER_RECORDS if recipe == "mxfp4_block" else None
    one_rank.run(one_rank.Subject(f"check_flashinfer_{recipe}", recipe, SHAPES, records))


if __name__ == "__main__":
    main()
