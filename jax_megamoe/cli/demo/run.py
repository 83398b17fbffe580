"""Make a checkpoint, load it in each format, run it expert-parallel, compare, report."""

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, BFloat16, Float32, Int32
from rich.console import Console
from rich.table import Table

from jax_megamoe import _checks
from jax_megamoe.cli.demo.checkpoint import (
    EXPERTS,
    PROJECTIONS,
    ROUTER,
    expert_name,
    write_checkpoint,
)
from jax_megamoe.cli.demo.picture import save_picture
from jax_megamoe.cli.demo.result import BOUNDS, FormatResult
from jax_megamoe.config import MoEConfig
from jax_megamoe.formats import WEIGHT_FORMATS, as_weight_format
from jax_megamoe.nn.layer import MegaMoE
from jax_megamoe.op.reference import einsum_moe
from jax_megamoe.weights.checkpoint.load import load_experts
from jax_megamoe.weights.checkpoint.tensors import Checkpoint

AXIS = "ep"
REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """What the demo runs.

    Attributes:
        num_experts, top_k, hidden_size, intermediate_size: sizes of the layer.
        num_tokens: tokens of all ranks together, a multiple of `num_ranks`.
        num_ranks: CPU devices, over which the experts are spread.
        formats: names of the weight formats, each once.
        seed: of weights and tokens.
        output: folder of the picture, and of the checkpoint in `checkpoint/`.
        keep: leave the checkpoint there.

    Raises:
        ValueError, TypeError: sizes that do not fit; see `MoEConfig`.
    """

    num_experts: int = 64
    top_k: int = 8
    hidden_size: int = 512
    intermediate_size: int = 256
    num_tokens: int = 512
    num_ranks: int = 8
    formats: tuple[str, ...] = tuple(WEIGHT_FORMATS)
    seed: int = 0
    output: Path = Path("megamoe-demo")
    keep: bool = False

    def __post_init__(self) -> None:
        for name in self.formats:
            as_weight_format(name, "formats")
        self.config("bf16").experts_per_rank(self.num_ranks)
        _checks.multiple("num_tokens", self.num_tokens, self.num_ranks, "ranks get equally many")
        _checks.seed(self.seed)

    def config(self, form: str) -> MoEConfig:
        """The layer in a format."""
        return MoEConfig(
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            max_num_tokens=self.num_tokens,
            weight_format=as_weight_format(form),
        )


class Tokens(NamedTuple):
    """Routed tokens: x [T, H], topk_ids [T, K], topk_weights [T, K]."""

    x: BFloat16[Array, "tokens hidden"]
    topk_ids: Int32[Array, "tokens top_k"]
    topk_weights: Float32[Array, "tokens top_k"]


def run_demo(settings: DemoSettings, console: Console | None = None) -> bool:
    """Runs the demo, prints its table and writes ``demo.png`` into `settings.output`.

    JAX must have `settings.num_ranks` devices.

    Returns:
        Whether every error is within its bound.
    """
    console = console or Console()
    settings.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = settings.output / "checkpoint" if settings.keep else Path(temporary)
        stored = write_checkpoint(folder, settings.config("bf16"), seed=settings.seed)
        console.print(
            f"Made a checkpoint as Qwen3-MoE's: {settings.num_experts} experts of "
            f"{settings.hidden_size} x {settings.intermediate_size}, bfloat16, "
            f"{stored / 1e6:.1f} MB",
            f"(kept: {folder})" if settings.keep else "",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        results = run_formats(settings, folder)
    console.print(results_table(results, settings))
    _draw(results, settings, console)
    bad = [result.form for result in results if not result.within_bounds]
    if bad:
        console.print(f"[bold red]Errors larger than allowed: {', '.join(bad)}[/]")
    return not bad


def run_formats(settings: DemoSettings, folder: Path) -> list[FormatResult]:
    """The layer in the checkpoint, in each format over all ranks."""
    checkpoint = Checkpoint(folder)
    tokens = make_tokens(checkpoint, settings)
    exact = exact_layer(checkpoint, tokens, settings.num_experts)
    mesh = jax.make_mesh((settings.num_ranks,), (AXIS,), axis_types=(AxisType.Auto,))
    configs = [settings.config(form) for form in settings.formats]
    return [run_format(config, folder, tokens, exact, mesh) for config in configs]


def results_table(results: list[FormatResult], settings: DemoSettings) -> Table:
    """One row a format; errors beyond their bound in red."""
    table = Table(
        title=f"{settings.num_tokens} tokens, top {settings.top_k}, over {settings.num_ranks} "
        "expert-parallel CPU devices",
        caption="Relative errors of the output, in brackets the largest allowed: against the exact "
        "layer (float32, the checkpoint's weights) and against einsum on the format's weights.",
    )
    table.add_column("format")
    for name in ("parameters", "error to exact", "error to einsum", "tokens/s"):
        table.add_column(name, justify="right")
    for result in results:
        bounds = BOUNDS[result.form]
        table.add_row(
            result.form,
            f"{result.parameter_bytes / 1e6:.1f} MB",
            _error(result.error_exact, bounds.exact),
            _error(result.error_einsum, bounds.einsum),
            f"{result.tokens_per_second:,.0f}",
        )
    return table


def _error(error: float, bound: float) -> str:
    text = f"{error:.2g} ({bound:g})"
    return text if error <= bound else f"[bold red]{text}[/]"


def _draw(results: list[FormatResult], settings: DemoSettings, console: Console) -> None:
    path = settings.output / "demo.png"
    try:
        save_picture(path, results, settings.num_ranks)
    except ImportError as error:
        said = f"No picture ({error}): pip install matplotlib"
    else:
        said = f"Picture: {path.resolve()}"
    console.print(said, highlight=False, markup=False, soft_wrap=True)


def make_tokens(checkpoint: Checkpoint, settings: DemoSettings) -> Tokens:
    """Normal tokens through the checkpoint's router: softmax, the top k, renormalised.

    The tokens have a part in common, so that some experts are wanted more often than others.
    """
    common, own = jax.random.split(jax.random.key(settings.seed))
    shape = (settings.num_tokens, settings.hidden_size)
    x = 0.5 * jax.random.normal(common, (1, shape[1])) + 0.75**0.5 * jax.random.normal(own, shape)
    x = x.astype(jnp.bfloat16)
    router = jnp.asarray(checkpoint.tensor(ROUTER).read())
    logits = jnp.einsum("th,eh->te", x, router, preferred_element_type=jnp.float32)
    topk_weights, topk_ids = jax.lax.top_k(jax.nn.softmax(logits), settings.top_k)
    return Tokens(x, topk_ids, topk_weights / topk_weights.sum(-1, keepdims=True))


def exact_layer(checkpoint: Checkpoint, tokens: Tokens, num_experts: int) -> np.ndarray:
    """The layer in NumPy, float32, straight from the checkpoint's tensors, expert by expert."""
    x, ids, weights = (np.asarray(array) for array in tokens)
    x = x.astype(np.float32)
    y = np.zeros_like(x)
    for expert in range(num_experts):
        row, slot = np.nonzero(ids == expert)
        names = (expert_name(expert, projection) for projection in PROJECTIONS)
        gate, up, down = (checkpoint.tensor(name).read().astype(np.float32) for name in names)
        h = np.einsum("th,ih->ti", x[row], gate, optimize=True)
        h = h / (1 + np.exp(-h)) * np.einsum("th,ih->ti", x[row], up, optimize=True)
        out = weights[row, slot, None] * np.einsum("ti,hi->th", h, down, optimize=True)
        np.add.at(y, row, out)
    return y


@nnx.jit
def _call(layer: MegaMoE, tokens: Tokens) -> tuple[Array, Array]:
    return layer(*tokens, return_stats=True)


def run_format(
    config: MoEConfig, folder: Path, tokens: Tokens, exact: np.ndarray, mesh: Mesh
) -> FormatResult:
    """Loads the checkpoint in the config's format over the mesh, runs the layer and compares."""
    weights = load_experts(config, folder, prefix=EXPERTS, mesh=mesh, axis=AXIS)
    layer = MegaMoE(config, weights, mesh=mesh, axis=AXIS, implementation="xla")
    spread = jax.device_put(tokens, NamedSharding(mesh, P(AXIS)))
    y, counts = jax.block_until_ready(_call(layer, spread))
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(_call(layer, spread))
        seconds.append(time.perf_counter() - start)
    on_one = jax.device_put(weights, mesh.devices.flat[0])
    quantised = einsum_moe(*tokens, on_one, config=config)
    return FormatResult(
        form=config.weight_format.name,
        parameter_bytes=weights.num_bytes,
        error_exact=relative_error(y, exact),
        error_einsum=relative_error(y, quantised),
        tokens_per_second=len(exact) / statistics.median(seconds),
        counts=np.asarray(counts),
    )


def relative_error(got: Array, want: Array | np.ndarray) -> float:
    """Euclidean norm of the difference over `want`'s."""
    got64, want64 = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got64 - want64) / np.linalg.norm(want64))
