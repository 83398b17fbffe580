"""Times layers in one run: routings that take turns, medians, and the GPU's own ceilings."""

import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jax_megamoe import _checks
from jax_megamoe.cli.gpu import contenders
from jax_megamoe.cli.gpu.models import Model
from jax_megamoe.cli.gpu.result import Ceilings, GpuResult, Timing
from jax_megamoe.compile import BuildError, describe_toolchain
from jax_megamoe.config import MoEConfig
from jax_megamoe.formats import RECIPES
from jax_megamoe.launch.runnable import supported
from jax_megamoe.plan.refusal import Refusal

ROUTINGS = 16
"""Layers of a timed program, each with another routing: what one read is not in the L2 cache when
the next reads."""

PACKAGES = ("jax-megamoe", "jax", "jaxlib", "jax-cuda13-plugin", "sgl-deep-gemm", "tokamax")
REFUSED = (BuildError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What a layer raises that cannot run here; too little memory is a RuntimeError."""

Timer = Callable[[Callable[[], Any]], float]
"""Median microseconds of a call of a function."""

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Request:
    """What to time.

    Attributes:
        models: layers by name.
        recipes: names of the recipes; None: those with a fused kernel for the device, else bf16.
        token_counts: tokens of a call.
        implementations: of ours.
        peers: whether to time what others have.
        command: arguments of `python -m jax_megamoe`.
    """

    models: dict[str, Model]
    recipes: tuple[str, ...] | None = None
    token_counts: tuple[int, ...] = (1, 8, 64, 256, 1024, 4096)
    implementations: tuple[str, ...] = contenders.IMPLEMENTATIONS
    peers: bool = True
    command: str = "bench gpu"


def timed(function: Callable[[], Any], *, enough: float = 0.1, repeats: int = 5) -> float:
    """Median microseconds of a call by the host's clock, each repeat as many calls in a row as take
    `enough` seconds."""
    jax.block_until_ready(function())
    start = time.perf_counter()
    jax.block_until_ready(function())
    calls = max(1, int(enough / (time.perf_counter() - start)))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls - 1):
            function()
        jax.block_until_ready(function())
        times.append((time.perf_counter() - start) / calls)
    return 1e6 * statistics.median(times)


def needs_gpu(device: jax.Device) -> None:
    """Refuses a device that is no GPU.

    Raises:
        NotImplementedError: in one line, what is needed.
    """
    if device.platform != "gpu":
        text = "a GPU that JAX sees: pip install 'jax-megamoe[cuda13]' on a machine with one"
        hint = "--device cpu tries the command without one"
        raise NotImplementedError(_checks.message("device", text, device.device_kind, hint))


def recipes_of(model: Model, num_tokens: int, device: jax.Device) -> tuple[str, ...]:
    """Recipes of which the device has a fused kernel for the model; bf16 where there is none."""
    found = tuple(
        name
        for name, recipe in RECIPES.items()
        if model.activation.name in recipe.functions
        and not isinstance(supported(model.config(name, num_tokens), device), Refusal)
    )
    return found or ("bf16",)


def measure(
    request: Request, *, timer: Timer = timed, progress: Progress = lambda *_: None
) -> GpuResult:
    """Times every layer of a request on the default device.

    Args:
        request: what to time.
        timer: how.
        progress: told what is timed next, and the share of all that is done.

    Raises:
        ValueError: sizes that no layer has.
    """
    device = jax.devices()[0]
    progress("copy and matmul rates", 0.0)
    ceilings = _ceilings(timer, small=device.platform == "cpu")
    entries = _entries(request, device)
    timings: list[Timing] = []
    for index, (name, implementation, recipe, prepare) in enumerate(entries):
        like = Timing(name, recipe, implementation, 0, None)

        def say(text: str, index: int = index, like: Timing = like) -> None:
            words = (like.model, *like.series, text)
            progress(" ".join(words), index / len(entries))

        timings += _rows(like, (request.models[name], prepare), request.token_counts, timer, say)
    progress("done", 1.0)
    return GpuResult(request.command, device.device_kind, versions(), ceilings, tuple(timings))


def _entries(
    request: Request, device: jax.Device
) -> list[tuple[str, str, str, contenders.Prepare]]:
    """Model, implementation or peer, recipe and what prepares it, in the order of the table."""
    found: list[tuple[str, str, str, contenders.Prepare]] = []
    peers = contenders.peers() if request.peers else {}
    for name, model in request.models.items():
        recipes = request.recipes or recipes_of(model, max(request.token_counts), device)
        for recipe in recipes:
            model.config(recipe, max(request.token_counts))
            found += [
                (name, each, recipe, contenders.OURS[each]) for each in request.implementations
            ]
        found += [(name, each, "bf16", prepare) for each, prepare in peers.items()]
    return found


def _rows(
    like: Timing,
    what: tuple[Model, contenders.Prepare],
    counts: Sequence[int],
    timer: Timer,
    progress: Callable[[str], None],
) -> Iterator[Timing]:
    """The timings of one implementation of a model."""
    model, prepare = what
    place = (like.model, like.recipe, like.implementation)
    progress("parameters")
    try:
        made = prepare(model, like.recipe, max(counts))
    except REFUSED as error:
        yield from (Timing(*place, count, None, why=_line(error)) for count in counts)
        return
    run = rotated(made.layer, model.num_experts)
    for count in counts:
        progress(f"{count} tokens")
        x, ids, factors = tokens(model, count)
        call = partial(run, x, ids, factors, made.parameters)
        try:
            taken, why = timer(call) / ROUTINGS, ""
        except REFUSED as error:
            taken, why = None, _line(error)
        experts = len(np.unique(np.asarray(ids)))
        read, flops = experts * made.weight_bytes, float(model.flops(count))
        yield Timing(*place, count, taken, weight_bytes=read, flops=flops, why=why)


def _line(error: Exception) -> str:
    """The first line of an error, which says what is missing."""
    return (str(error).splitlines() or [""])[0][:200] or type(error).__name__


def tokens(sizes: Model | MoEConfig, num_tokens: int, seed: int = 1) -> tuple[Array, Array, Array]:
    """x bfloat16 [T, H] and a random routing: ids int32 [T, K], weights float32 [T, K], sum 1."""
    first, second = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(first, (num_tokens, sizes.hidden_size), jnp.bfloat16)
    return x, *routing(sizes, num_tokens, second)


def routing(
    sizes: Model | MoEConfig, num_tokens: int, key: Array, lead: tuple[int, ...] = ()
) -> tuple[Array, Array]:
    """Random ids int32 [*lead, T, K], distinct in a token, and weights float32 that sum to 1."""
    logits = jax.random.normal(key, (*lead, num_tokens, sizes.num_experts))
    factors, ids = lax.top_k(jax.nn.softmax(logits), sizes.top_k)
    return ids, factors / factors.sum(-1, keepdims=True)


def rotated(layer: Callable[..., Array], num_experts: int) -> Callable[..., Array]:
    """f(x, ids, factors, parameters): `ROUTINGS` layers in one program, the nth with every id
    further by n strides; each reads the tokens of the one before, to which nothing is added."""
    stride = max(1, num_experts // ROUTINGS)

    def step(x: Array, n: Array, ids: Array, *rest: Any) -> tuple[Array, None]:
        y = layer(x, (ids + n * stride) % num_experts, *rest)
        # 0 times y keeps the layer in the program; where y is not finite, that shows.
        return x + y * jnp.bfloat16(0), None

    def run(x: Array, *rest: Any) -> Array:
        turns = jnp.arange(ROUTINGS, dtype=jnp.int32)
        return lax.scan(lambda carry, n: step(carry, n, *rest), x, turns)[0]

    return jax.jit(run)


def _ceilings(timer: Timer, *, small: bool) -> Ceilings:
    """The copy rate, and the rates of a large product."""
    size = 1 << (20 if small else 30)
    source = jnp.zeros(size, jnp.uint8)
    copy = jax.jit(lambda array: array ^ jnp.uint8(1))
    rate = 2 * size / timer(lambda: copy(source)) * 1e6
    side = 256 if small else 8192
    products = (_product_rate(timer, side, each) for each in (jnp.bfloat16, jnp.float8_e4m3fn))
    return Ceilings(rate, *products)


def _product_rate(timer: Timer, side: int, dtype: Any) -> float:
    """FLOP/s of a product of square matrices; 0 where XLA has none of the dtype here."""
    keys = jax.random.split(jax.random.key(0))
    left, right = (jax.random.normal(key, (side, side), jnp.float32).astype(dtype) for key in keys)
    product = jax.jit(
        lambda a, b: lax.dot_general(
            a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        ).astype(jnp.bfloat16)
    )
    try:
        return 2 * side**3 / timer(lambda: product(left, right)) * 1e6
    except REFUSED:
        return 0.0


def versions() -> dict[str, str]:
    """Of what the times depend on: packages, kernel sources, compilers, the driver."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    for each in describe_toolchain():
        if each.found and each.part.startswith(("kernel source", "compiler")):
            found[each.part] = each.found.split(" in ", maxsplit=1)[0]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
        found["driver"] = done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        pass
    return found
