"""Run by test_load_processes, twice at once: one of two processes with two CPU devices each.

    python load_process.py <process> <address of process 0> <checkpoint> <prefix> <experts> <H> <I>

Prints how many bytes it read, and the SHA-256 of the part of w2_weight that its devices hold.
"""

import hashlib
import sys

import jax
import numpy as np
from jax.sharding import Mesh

from jax_megamoe.config import MoEConfig
from jax_megamoe.weights.checkpoint.header import StoredTensor
from jax_megamoe.weights.checkpoint.load import load_experts


def main() -> None:
    process, address, checkpoint, prefix = sys.argv[1:5]
    experts, hidden, inter = map(int, sys.argv[5:])
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(address, 2, int(process))
    read = 0
    read_tensor = StoredTensor.read

    def counted(tensor: StoredTensor, index: int | None = None) -> np.ndarray:
        nonlocal read
        array = read_tensor(tensor, index)
        read += array.nbytes
        return array

    StoredTensor.read = counted
    config = MoEConfig(
        num_experts=experts,
        top_k=1,
        hidden_size=hidden,
        intermediate_size=inter,
        max_num_tokens=1,
        weight_format="mxfp4",
    )
    mesh = Mesh(np.array(jax.devices()), ("ep",))
    weights = load_experts(config, checkpoint, prefix=prefix, mesh=mesh, axis="ep", progress=False)
    shards = sorted(
        weights.routed.w2_weight.addressable_shards, key=lambda shard: shard.index[0].start
    )
    held = b"".join(np.asarray(shard.data).tobytes() for shard in shards)
    print(read, hashlib.sha256(held).hexdigest())


if __name__ == "__main__":
    main()
