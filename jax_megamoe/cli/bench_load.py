"""`python -m jax_megamoe bench load`: from a checkpoint's file to parameters in kernel layout.

`load_experts`, beside NumPy reading the same bytes and beside the way one writes it first: every
tensor copied into its parameter, then every parameter brought into kernel layout as a whole.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jax_megamoe import _checks
from jax_megamoe.cli.measurements import Measurements
from jax_megamoe.config import ExpertSpec
from jax_megamoe.formats import WEIGHT_FORMATS
from jax_megamoe.weights.checkpoint.header import StoredTensor, read_header
from jax_megamoe.weights.checkpoint.load import load_experts
from jax_megamoe.weights.layout import split_rows, w2_scale_to_kernel, w13_to_kernel
from jax_megamoe.weights.params import default_layout

PREFIX = "experts"
CASES = (
    ("bf16", "bf16"),
    ("fp8_block", "fp8_block"),
    ("mxfp8", "mxfp8"),
    ("nvfp4", "nvfp4"),
    ("mxfp4", "mxfp4"),
    ("bf16", "mxfp4"),
)
"""What is measured: the stored format, the layer's format."""

_PARTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
_SUFFIXES = ("weight", "weight_scale", "weight_scale_2")


@dataclass(frozen=True)
class LoadShape:
    """Sizes of a loaded layer, by default eight experts of Qwen3-235B."""

    num_experts: int = 8
    hidden_size: int = 4096
    intermediate_size: int = 1536


@dataclass(frozen=True)
class LoadRow:
    """One way from a stored format to a layer's; median seconds.

    Attributes:
        stored: format of the file.
        target: format of the layer.
        num_bytes: of the file.
        read: seconds of NumPy reading the file.
        load: seconds of `load_experts`.
        plain: seconds of `numpy_load`.
    """

    stored: str
    target: str
    num_bytes: int
    read: float
    load: float
    plain: float


@dataclass(frozen=True)
class LoadResult:
    """What `bench_load` measured."""

    shape: LoadShape
    rows: tuple[LoadRow, ...]

    def report(self) -> Measurements:
        """The result as a table."""
        shape = self.shape
        return Measurements(
            title="Loading a checkpoint",
            heading=(
                f"{shape.num_experts} experts, hidden {shape.hidden_size}, intermediate "
                f"{shape.intermediate_size}, rates in GB/s of the file"
            ),
            notes=(
                "Medians of one run, calls in turns, the file in the page cache. `read` is NumPy "
                "reading the file, `load` load_experts, `of read` its rate over read's; `NumPy` "
                "copies every tensor into its parameter and then brings every parameter into "
                "kernel layout, `faster` is its time over load's."
            ),
            columns=tuple(_COLUMNS),
            rows=tuple(tuple(text(row) for text in _COLUMNS.values()) for row in self.rows),
        )


def _rate(row: LoadRow, seconds: float) -> str:
    return f"{row.num_bytes / seconds / 1e9:.2f}"


_COLUMNS: dict[str, Callable[[LoadRow], str]] = {
    "stored": lambda row: row.stored,
    "layer": lambda row: row.target,
    "MB": lambda row: f"{row.num_bytes / 1e6:.1f}",
    "read": lambda row: _rate(row, row.read),
    "load": lambda row: _rate(row, row.load),
    "of read": lambda row: f"{row.read / row.load:.2f}",
    "NumPy": lambda row: _rate(row, row.plain),
    "faster": lambda row: f"{row.plain / row.load:.2f} x",
}
"""What is said of a row, by the head of its column."""


def bench_load(
    shape: LoadShape, formats: Sequence[str], *, seed: int = 0, repeats: int = 5
) -> LoadResult:
    """Loads each of `CASES` with a layer in one of `formats`, from a file in a temporary folder.

    Args:
        shape: sizes of the layer.
        formats: names of weight formats.
        seed: of the tensors.
        repeats: measured calls of each way, after one warm-up.

    Raises:
        ValueError: fewer than one repeat, or sizes that no layer has.
    """
    repeats, seed = _checks.integer("repeats", repeats, minimum=1), _checks.seed(seed)
    rows: list[LoadRow] = []
    with TemporaryDirectory(prefix="jax-megamoe-bench-") as folder:
        path = Path(folder, "model.safetensors")
        for stored, target in CASES:
            if target in formats:
                write_layer(path, shape, stored, seed=seed)
                rows.append(_measured(path, shape, stored, target, repeats))
    return LoadResult(shape, tuple(rows))


def _measured(path: Path, shape: LoadShape, stored: str, target: str, repeats: int) -> LoadRow:
    config = load_config(shape, target)
    ways: tuple[Callable[[], object], ...] = (
        lambda: np.fromfile(path, np.uint8),
        lambda: jax.block_until_ready(load_experts(config, path, prefix=PREFIX, progress=False)),
        lambda: numpy_load(path, config),
    )
    times: list[list[float]] = [[] for _ in ways]
    for turn in range(repeats + 1):
        for way, seconds in zip(ways, times, strict=True):
            start = time.perf_counter()
            way()
            if turn:
                seconds.append(time.perf_counter() - start)
    read, load, plain = map(statistics.median, times)
    return LoadRow(stored, target, path.stat().st_size, read, load, plain)


def load_config(shape: LoadShape, weight_format: str) -> ExpertSpec:
    """The experts that are loaded."""
    return ExpertSpec(
        num_experts=shape.num_experts,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        weight_format=WEIGHT_FORMATS[weight_format],
    )


def write_layer(path: Path, shape: LoadShape, stored: str, *, seed: int) -> None:
    """Writes a safetensors file with a layer's experts, all alike, stored in a format.

    Args:
        path: the file, replaced.
        shape: sizes of the layer.
        stored: name of the format.
        seed: of the random elements and scales.
    """
    rng = np.random.default_rng(seed)
    hidden, inter = shape.hidden_size, shape.intermediate_size
    sizes = dict(gate_proj=(inter, hidden), up_proj=(inter, hidden), down_proj=(hidden, inter))
    tensors: dict[str, np.ndarray] = {}
    for part, size in sizes.items():
        for suffix, array in _random_matrix(rng, stored, *size).items():
            for expert in range(shape.num_experts):
                tensors[f"{PREFIX}.{expert}.{part}.{suffix}"] = array
    save_file(tensors, path)


def _random_matrix(rng: np.random.Generator, stored: str, n: int, k: int) -> dict[str, np.ndarray]:
    """Tensors of one projection [N, K] by suffix: any finite elements, scales near 2^-7."""
    if stored == "bf16":
        return dict(weight=rng.standard_normal((n, k), np.float32).astype(ml_dtypes.bfloat16))
    if stored in ("fp8_block", "mxfp8"):
        signs = rng.integers(0, 2, (n, k), np.uint8) << 7
        codes = rng.integers(0, 0x7F, (n, k), np.uint8) | signs
        weight = codes.view(ml_dtypes.float8_e4m3fn)
        if stored == "mxfp8":
            return dict(weight=weight, weight_scale=rng.integers(115, 125, (n, k // 32), np.uint8))
        blocks = rng.uniform(0.004, 0.016, (n // 128, k // 128))
        return dict(weight=weight, weight_scale=blocks.astype(np.float32))
    pairs = rng.integers(0, 256, (n, k // 2), np.uint8)
    if stored == "mxfp4":
        return dict(weight=pairs, weight_scale=rng.integers(115, 125, (n, k // 32), np.uint8))
    scales = rng.integers(1, 0x7F, (n, k // 16), np.uint8).view(ml_dtypes.float8_e4m3fn)
    return dict(weight=pairs, weight_scale=scales, weight_scale_2=np.asarray(2**-14, np.float32))


def numpy_load(path: Path, config: ExpertSpec) -> dict[str, np.ndarray]:
    """The layer's parameters by field, in plain NumPy: a tensor at a time into the parameter, then
    each parameter permuted as a whole; bf16 is cast to mxfp4 where the layer is.

    Args:
        path: a file of `write_layer`.
        config: the layer, of the stored format, or mxfp4.
    """
    tensors, _ = read_header(path)
    requantised = config.weight_format.name == "mxfp4"
    layout = default_layout(config)
    fields: dict[str, np.ndarray] = {}
    for name, parts in _PARTS.items():
        whole: dict[str, np.ndarray] = {}
        for expert in range(config.num_experts):
            for row, part in enumerate(parts):
                for suffix, array in _matrix(tensors, expert, part, requantised).items():
                    if suffix not in whole:
                        size = (config.num_experts, len(parts), *array.shape)
                        whole[suffix] = np.empty(size, array.dtype)
                    whole[suffix][expert, row] = array
        for suffix, stacked in whole.items():
            field = name.replace("weight", suffix)
            fields[field] = _in_kernel_layout(stacked, suffix, layout if len(parts) == 2 else None)
    if config.weight_format.weight.has_global_scale:
        fields["w2_input_scale"] = np.zeros(config.num_experts, np.float32)
    return fields


def _matrix(
    tensors: Mapping[str, StoredTensor], expert: int, part: str, requantised: bool
) -> dict[str, np.ndarray]:
    """Arrays of one projection by suffix."""
    names = {suffix: f"{PREFIX}.{expert}.{part}.{suffix}" for suffix in _SUFFIXES}
    arrays = {suffix: tensors[name].read() for suffix, name in names.items() if name in tensors}
    if requantised and arrays["weight"].dtype == ml_dtypes.bfloat16:
        weight, scale = numpy_mxfp4(arrays["weight"])
        return dict(weight=weight, weight_scale=scale)
    return arrays


def _in_kernel_layout(stacked: np.ndarray, suffix: str, layout: str | None) -> np.ndarray:
    """A parameter [E, projections, N, K] of w13, or of w2 (layout None), in its final order."""
    if suffix == "weight_scale_2":
        return stacked[:, 0]
    experts, parts, rows, columns = stacked.shape
    whole = stacked.reshape(experts, parts * rows, columns)
    if suffix == "weight_scale" and whole.dtype == np.float32:
        return whole
    if layout is not None:
        whole = w13_to_kernel(whole, layout)
    if suffix == "weight_scale":
        whole = np.ascontiguousarray(w2_scale_to_kernel(whole))
    axis = -1 if suffix == "weight_scale" else -2
    return whole if layout is None else split_rows(whole, layout, axis)


def numpy_mxfp4(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """MXFP4 of a matrix by `quantize_mxfp4`'s rule: E2M1 pairs and UE8M0 bytes, both uint8."""
    blocks = w.astype(np.float32).reshape(*w.shape[:-1], -1, 32)
    scale = np.maximum(np.abs(blocks).max(-1), np.float32(1e-4)) / np.float32(6)
    bits = scale.view(np.int32)
    exponents = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    values = np.ldexp(blocks, 127 - exponents[..., None])
    codes = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    codes[codes == 8] = 0  # no negative zero
    pairs = codes.reshape(*w.shape[:-1], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, exponents.astype(np.uint8)
