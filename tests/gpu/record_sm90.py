"""Records the SM90 mega kernel's outputs on an H200, of tests/emulator/sm90_calls.py.

    PYTHONPATH=.:tests:tests/gpu:benchmarks/gpu python tests/gpu/record_sm90.py [FOLDER]

Writes sm90_outputs.npz, the bits of one output a call, to FOLDER or $OUT: it belongs into
tests/golden. Each call runs twice; outputs that differ are named and must not be recorded.
"""

import os
import sys
from functools import partial
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cuda,cpu"

import jax
import numpy as np
from emulator.sm90_calls import calls

import jax_megamoe as mm


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ["OUT"])
    records, unequal = {}, []
    for call in calls():
        x, ids, factors, weights = call.arrays()
        layer = jax.jit(partial(mm.mega_moe, config=call.config(), implementation="deep_gemm"))
        first, second = (np.asarray(layer(x, ids, factors, weights)).view("u2") for _ in range(2))
        if (first != second).any():
            unequal.append(call.name)
        records[call.name] = first
    np.savez_compressed(folder / "sm90_outputs.npz", **records)
    print(f"{jax.devices()[0].device_kind}: {len(records)} calls; differ: {unequal or 'none'}")


if __name__ == "__main__":
    main()
