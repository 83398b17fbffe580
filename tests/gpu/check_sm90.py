"""fp8_block on one H200, one rank: `mega_moe` under jit against `reference` and the bare launch.

    PYTHONPATH=.:tests:tests/gpu:benchmarks/gpu python tests/gpu/check_sm90.py [--quick]

What is checked stands in one_rank.py.
"""

import bare_launch
import one_rank
import workload

if __name__ == "__main__":
    one_rank.run(
        one_rank.Subject("check_sm90", "fp8_block", tuple(workload.SHAPES), bare_launch.RECORDS)
    )
