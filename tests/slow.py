"""Which test files are slow: several seconds of processor time, most of it XLA's compiler or other
processes. `pytest -m "not slow"` leaves them out."""

from pathlib import Path

FOLDER = Path(__file__).parent

SLOW = (
    "test_examples.py",
    "test_manual.py",
    "test_mesh.py",
    "cli/test_ahead.py",
    "cli/test_bench_gpu.py",
    "cli/test_bench_load.py",
    "cli/test_demo.py",
    "compile/test_kernels.py",
    "compile/test_slots.py",
    "emulator",
    "ffi/test_fuzz.py",
    "ffi/test_processes.py",
    "gpu/test_decoder.py",
    "gpu/test_decoder_kernels.py",
    "gpu/test_grouped_script.py",
    "gpu/test_layer_trace.py",
    "kernels",
    "launch",
    "nn",
    "numerics/test_quantization.py",
    "op/test_accuracy.py",
    "op/test_aot.py",
    "op/test_bias_columns.py",
    "op/test_compiled_program.py",
    "op/test_grad.py",
    "op/test_mega_moe.py",
    "op/test_reference.py",
    "op/test_vmap.py",
    "op/test_xla.py",
    "routing/test_rebalance.py",
    "weights/test_experts.py",
    "weights/test_requantize.py",
    "weights/checkpoint/test_convert.py",
    "weights/checkpoint/test_dialects.py",
    "weights/checkpoint/test_fuzz.py",
    "weights/checkpoint/test_load.py",
    "weights/checkpoint/test_load_memory.py",
    "weights/checkpoint/test_load_processes.py",
    "weights/checkpoint/test_stacked_scales.py",
)
"""Files and folders below tests/."""

NOT_SLOW = ("nn/test_hf_config.py",)
"""Exceptions in those folders."""


def is_slow(path: Path) -> bool:
    """Whether a test file is one of them."""
    if any(path == FOLDER / each for each in NOT_SLOW):
        return False
    return any(path.is_relative_to(FOLDER / each) for each in SLOW)
