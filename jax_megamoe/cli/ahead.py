"""`python -m jax_megamoe compile`: kernels compiled into the cache before anything runs."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jax_megamoe import _checks
from jax_megamoe.compile import Outcome, compile_many
from jax_megamoe.config import MoEConfig
from jax_megamoe.launch.deep_gemm import Route
from jax_megamoe.launch.runnable import check_supported
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.kernel import KernelSpec
from jax_megamoe.plan.launch import KernelLaunch


def kernels(
    configs: Iterable[MoEConfig], device: DeviceSpec, token_counts: Sequence[int], num_ranks: int
) -> tuple[KernelSpec, ...]:
    """The distinct kernels that calls of these configs launch.

    Args:
        configs: the layers.
        device: what they run on.
        token_counts: rows of a rank's calls, each at least 1.
        num_ranks: expert-parallel ranks.

    Raises:
        ValueError: no token counts, one below 1 or over max_num_tokens, or sizes out of the
            kernel's limits.
        NotImplementedError: a format that has no kernel on the device.
    """
    if not token_counts:
        raise ValueError(_checks.message("tokens", "at least one number of tokens", "none"))
    specs: dict[KernelSpec, None] = {}
    for config in configs:
        route = Route(device, check_supported(config, device, num_ranks), num_ranks, "")
        for num_tokens in token_counts:
            _checks.integer("tokens", num_tokens, minimum=1)
            steps = route.plan(config, num_tokens).steps
            specs |= {step.kernel: None for step in steps if isinstance(step, KernelLaunch)}
    return tuple(specs)


def compile_ahead(specs: Sequence[KernelSpec], console: Console) -> bool:
    """Compiles kernels with a progress bar, and prints a table of them.

    Returns:
        Whether every kernel is in the cache now.
    """
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("compile", total=len(specs))
        outcomes = compile_many(specs, on_done=lambda _: progress.advance(task))
    console.print(_table(outcomes))
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    for outcome in failed:
        console.print(f"{outcome.spec.symbol}: {outcome.error}", markup=False)
    return not failed


def _table(outcomes: Iterable[Outcome]) -> Table:
    table = Table("kernel", "source", "arch", "seconds", "cubin kB")
    for outcome in outcomes:
        spec = outcome.spec
        size = "failed" if outcome.error else f"{outcome.cubin_bytes / 1e3:.0f}"
        table.add_row(spec.symbol, spec.source, spec.arch, f"{outcome.seconds:.1f}", size)
    return table
