"""Run by test_load_memory in a process of its own: loads a file and prints what it took of memory.

    python measure_load.py <path> <experts> <hidden> <intermediate> <format>

Prints the bytes of the parameters and the rise of the resident set's peak over its size before. A
small file beside the path, ``warm-up``, is loaded first, so that compiling is not measured.
"""

import sys
from pathlib import Path

import jax

from jax_megamoe.config import MoEConfig
from jax_megamoe.weights.checkpoint.load import load_experts


def resident(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{field}:")[1].split()[0])


def main() -> None:
    path, experts, hidden, inter, form = Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5]

    def load(where: Path, count: int) -> int:
        config = MoEConfig(
            num_experts=count,
            top_k=1,
            hidden_size=hidden,
            intermediate_size=inter,
            max_num_tokens=1,
            weight_format=form,
        )
        weights = load_experts(config, where, prefix="experts", progress=False)
        return jax.block_until_ready(weights).num_bytes

    load(path.with_name("warm-up"), 1)
    before = resident("VmRSS")
    size = load(path, experts)
    print(size, resident("VmHWM") - before)


if __name__ == "__main__":
    main()
