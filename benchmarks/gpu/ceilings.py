"""What the GPU can do at most, measured in the same minutes as the layers: prints JSON.

A process of its own: PyTorch's cuBLASLt is the FP8 ceiling, and its pool must not lie beside JAX's.
"""

import itertools
import json
import statistics

import driver
import torch

SIZE = 8192


def matmul_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a product of two square matrices of random values."""
    left, right = (torch.randn(SIZE, SIZE, device="cuda").to(dtype) for _ in range(2))
    one = torch.ones((), device="cuda")

    def product() -> None:
        if dtype == torch.bfloat16:
            torch.matmul(left, right.t())
        else:
            torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16)

    for _ in range(3):
        product()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(22)]
    for event in events[:-1]:
        event.record()
        product()
    events[-1].record()
    torch.cuda.synchronize()
    milliseconds = [start.elapsed_time(end) for start, end in itertools.pairwise(events)]
    return 2 * SIZE**3 / statistics.median(milliseconds) * 1e3


def main() -> None:
    """Measures all."""
    torch.zeros(1, device="cuda")
    driver.use_device()
    found = {
        "copy_bytes_per_second": driver.copy_rate(),
        "bf16_flops": matmul_rate(torch.bfloat16),
        "fp8_flops": matmul_rate(torch.float8_e4m3fn),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
