"""What a MoE layer computes: `MoEConfig`, its `ExpertSpec` and `Activation`, frozen and checked.

Neither imports JAX: a config can be made, compared, hashed and planned for on a machine without it.
"""

# Arguments are checked at run time too.
# pyright: reportUnnecessaryIsInstance=false

import math
from dataclasses import dataclass
from typing import Any

from jax_megamoe import _checks
from jax_megamoe.formats import (
    ACTIVATION_FORMATS,
    MXFP4,
    RECIPES,
    WEIGHT_FORMATS,
    ActivationFormat,
    Recipe,
    WeightFormat,
    recipe_of,
)

SIZE_MULTIPLE = 128
"""hidden_size and intermediate_size are multiples of this in every format."""


def padded_size(size: int) -> int:
    """The next hidden_size or intermediate_size that `MoEConfig` takes."""
    return -(-size // SIZE_MULTIPLE) * SIZE_MULTIPLE


_ACTIVATION_DEFAULTS = {"swiglu": (1.0, 0.0), "situ": (4.0, 25.0)}


@dataclass(frozen=True, init=False)
class Activation:
    """The gated activation between the two matmuls, in float32.

    * ``swiglu``: ``gate * sigmoid(alpha * gate) * (up + beta)``, after gate is clamped from above
      and up to ``[-clamp, clamp]`` when clamp is set. alpha defaults to 1, beta to 0. DeepSeek-V4
      has clamp 10, GPT-OSS alpha 1.702, beta 1, clamp 7.
    * ``situ``: gate branch ``alpha * tanh(gate / alpha) * sigmoid(gate)``, linear branch
      ``beta * tanh(up / beta)``, or up itself when beta is 0. alpha defaults to 4, beta to 25
      (Kimi-K3).

    Args:
        name: ``"swiglu"`` or ``"situ"``.
        clamp: the limit, >= 0; None or infinity for none. Not with situ.
        alpha: finite; > 0 for situ.
        beta: finite; >= 0 for situ.

    Raises:
        ValueError: an unknown name, a non-finite alpha or beta, a negative or NaN clamp, situ with
            a clamp, with alpha <= 0 or with beta < 0.
        TypeError: a parameter that is not a number.
    """

    name: str
    clamp: float | None
    alpha: float
    beta: float

    def __init__(
        self,
        name: str,
        *,
        clamp: float | None = None,
        alpha: float | None = None,
        beta: float | None = None,
    ) -> None:
        _checks.one_of("activation", name, _ACTIVATION_DEFAULTS)
        default_alpha, default_beta = _ACTIVATION_DEFAULTS[name]
        alpha = _checks.finite("activation alpha", default_alpha if alpha is None else alpha)
        beta = _checks.finite("activation beta", default_beta if beta is None else beta)
        if name == "situ":
            if clamp is not None:
                raise ValueError(
                    _checks.message("activation clamp", "None for situ, which has no clamp", clamp)
                )
            if alpha <= 0:
                raise ValueError(
                    _checks.message("activation alpha", "a number > 0 for situ", alpha)
                )
            if beta < 0:
                raise ValueError(_checks.message("activation beta", "a number >= 0 for situ", beta))
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "clamp", _checked_clamp(clamp))
        object.__setattr__(self, "alpha", alpha)
        object.__setattr__(self, "beta", beta)


def _checked_clamp(clamp: object) -> float | None:
    if clamp is None:
        return None
    if isinstance(clamp, bool) or not isinstance(clamp, int | float):
        raise TypeError(_checks.message("activation clamp", "a number or None", repr(clamp)))
    if math.isnan(clamp) or clamp < 0:
        raise ValueError(_checks.message("activation clamp", "a number >= 0 or None", clamp))
    return None if math.isinf(clamp) else float(clamp)


class _DefaultFormat(str):
    """A precision that nobody asked for: `dataclasses.replace` hands it on as it hands on one that
    somebody did, and with another weight format the default is another."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True)
class ExpertSpec:
    """Sizes and format of a layer's expert parameters: all that loading them needs.

    A `MoEConfig` is an `ExpertSpec` too, with the fields that calls need.

    Attributes:
        num_experts: physical experts over all ranks, replicas included.
        hidden_size: H, a multiple of 128.
        intermediate_size: I of one routed expert, a multiple of 128.
        weight_format: a `WeightFormat` or its name.
        num_shared_experts: width of a fused shared expert in units of intermediate_size; 0: none.
        num_logical_experts: experts the router knows; None: num_experts. Physical slot p holds
            logical expert p % num_logical_experts, until a rebalance says otherwise.
        shared_format: precision of a fused shared expert; None: the format's default, which follows
            the format in `dataclasses.replace`.

    Raises:
        ValueError: a size out of range or off its multiple, a shared precision that the format does
            not have.
        TypeError: a field of the wrong type.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    weight_format: WeightFormat = MXFP4
    num_shared_experts: int = 0
    num_logical_experts: int | None = None
    shared_format: str | None = None

    def __post_init__(self) -> None:
        for field in ("num_experts", "hidden_size", "intermediate_size"):
            object.__setattr__(self, field, _checks.integer(field, getattr(self, field), minimum=1))
        shared = _checks.integer("num_shared_experts", self.num_shared_experts)
        object.__setattr__(self, "num_shared_experts", shared)
        self._set_formats()
        _checks.multiple("hidden_size", self.hidden_size, SIZE_MULTIPLE)
        _checks.multiple("intermediate_size", self.intermediate_size, SIZE_MULTIPLE)
        if self.num_logical_experts is not None:
            logical = _checks.integer("num_logical_experts", self.num_logical_experts, minimum=1)
            _checks.at_most(
                "num_logical_experts",
                logical,
                self.num_experts,
                "num_experts",
                "every expert needs a physical slot",
            )
            object.__setattr__(self, "num_logical_experts", logical)
        recipe = self.recipe
        if isinstance(self.shared_format, _DefaultFormat):
            object.__setattr__(self, "shared_format", None)
        if self.shared_format is not None:
            name = f"shared_format of {recipe.name}"
            _checks.one_of(name, self.shared_format, recipe.shared_formats)
        elif recipe.shared_formats:
            default = _DefaultFormat(recipe.shared_formats[0])
            object.__setattr__(self, "shared_format", default)

    def _set_formats(self) -> None:
        """The name of a format into the format."""
        if isinstance(self.weight_format, str):
            _checks.one_of("weight_format", self.weight_format, WEIGHT_FORMATS)
            object.__setattr__(self, "weight_format", WEIGHT_FORMATS[self.weight_format])
        _check_format("weight_format", self.weight_format, WeightFormat)

    @property
    def recipe(self) -> Recipe:
        """What the weight format makes with the activations that it usually meets."""
        return recipe_of(self.weight_format)

    @property
    def logical_experts(self) -> int:
        """num_logical_experts, or num_experts where there are no replicas."""
        return self.num_experts if self.num_logical_experts is None else self.num_logical_experts

    @property
    def shared_size(self) -> int:
        """S, the shared expert's intermediate size."""
        return self.intermediate_size * self.num_shared_experts

    def experts_per_rank(self, num_ranks: int) -> int:
        """Local experts of each of `num_ranks` ranks.

        Raises:
            ValueError: the physical experts do not divide by the ranks.
        """
        num_ranks = _checks.integer("num_ranks", num_ranks, minimum=1)
        if self.num_experts % num_ranks:
            raise ValueError(
                _checks.message(
                    "num_experts",
                    f"a multiple of the {num_ranks} expert-parallel ranks",
                    self.num_experts,
                    "experts are placed whole and evenly: add replicas or change the ranks",
                )
            )
        return self.num_experts // num_ranks


def check_config(config: object, kind: type[ExpertSpec]) -> None:
    """Raises TypeError unless `config` is an `ExpertSpec`, or a `MoEConfig` where `kind` is."""
    if not isinstance(config, kind):
        expected = f"a jax_megamoe.{kind.__name__}"
        raise TypeError(_checks.message("config", expected, type(config).__name__))


def _check_format(name: str, value: object, kind: Any) -> None:
    if not isinstance(value, kind):
        expected = "a format or the name of one"
        raise TypeError(_checks.message(name, expected, type(value).__name__))


@dataclass(frozen=True, kw_only=True)
class MoEConfig(ExpertSpec):
    """Sizes, format and activation of one MoE layer; the same on every rank.

    Attributes:
        num_experts, hidden_size, intermediate_size: see `ExpertSpec`.
        num_shared_experts, num_logical_experts, shared_format: see there.
        top_k: experts a token names, 1 to num_logical_experts.
        max_num_tokens: most tokens a rank passes in one call.
        weight_format: a `WeightFormat`, its name, or the name of a `Recipe`, which stands for both
            formats.
        activation: an `Activation`, or the name of one with its default parameters.
        kernel_source: forces a source of kernels, such as ``"sgl"`` or ``"vllm"``; None: the
            preferred one that can. An unknown name is refused by the first call.
        activation_format: an `ActivationFormat` or its name; None: the default of the weight
            format. `recipe` is the pair.
        reserved_sms: streaming multiprocessors that the kernel leaves free for others (collectives
            on another stream); an even number.
        fast_math: the kernels of ``deep_gemm`` and ``grouped`` take approximate exp and reciprocal
            in the activation; False: float32's own. ``xla`` and ``reference`` always have those.

    Raises:
        ValueError: a size out of range or off its multiple, an activation or shared precision that
            the format does not have.
        TypeError: a field of the wrong type.
    """

    top_k: int
    max_num_tokens: int
    activation: Activation = Activation("swiglu")
    kernel_source: str | None = None
    activation_format: ActivationFormat | None = None
    reserved_sms: int = 0
    fast_math: bool = True

    def __post_init__(self) -> None:
        for field in ("top_k", "max_num_tokens"):
            object.__setattr__(self, field, _checks.integer(field, getattr(self, field), minimum=1))
        reserved = _checks.integer("reserved_sms", self.reserved_sms)
        object.__setattr__(self, "reserved_sms", reserved)
        super().__post_init__()
        _checks.multiple("reserved_sms", self.reserved_sms, 2, "the kernel runs pairs of SMs")
        _checks.at_most("top_k", self.top_k, self.logical_experts, "num_logical_experts")
        if isinstance(self.activation, str):
            object.__setattr__(self, "activation", Activation(self.activation))
        self._check_choices()

    def _set_formats(self) -> None:
        """Names into formats; the default activation format into None, however it was named."""
        weights, activations = self.weight_format, self.activation_format
        named: Recipe | None = None
        if isinstance(weights, str):
            _checks.one_of("weight_format", weights, [*{**WEIGHT_FORMATS, **RECIPES}])
            # A name of both stands for the weights: their default recipe is the one of that name.
            named = None if weights in WEIGHT_FORMATS else RECIPES[weights]
            weights = WEIGHT_FORMATS[weights] if named is None else named.weights
        if isinstance(activations, str):
            _checks.one_of("activation_format", activations, ACTIVATION_FORMATS)
            activations = ACTIVATION_FORMATS[activations]
        if named is not None:
            if activations not in (None, named.activations):
                expected = f"None or {named.activations.name} for the recipe {named.name}"
                raise ValueError(_checks.message("activation_format", expected, activations))
            activations = named.activations
        _check_format("weight_format", weights, WeightFormat)
        _check_format("activation_format", activations, ActivationFormat | None)
        if recipe_of(weights, activations) is recipe_of(weights):
            activations = None
        object.__setattr__(self, "weight_format", weights)
        object.__setattr__(self, "activation_format", activations)

    def _check_choices(self) -> None:
        if not isinstance(self.activation, Activation):
            raise TypeError(
                _checks.message("activation", "an Activation or its name", repr(self.activation))
            )
        recipe = self.recipe
        _checks.one_of(f"activation of {recipe.name}", self.activation.name, recipe.functions)
        # Which sources there are is the planners' to say; a config does not know them.
        if not isinstance(self.kernel_source, str | None):
            got = type(self.kernel_source).__name__
            raise TypeError(_checks.message("kernel_source", "the name of a source, or None", got))
        if not isinstance(self.fast_math, bool):
            raise TypeError(_checks.message("fast_math", "a bool", repr(self.fast_math)))

    @property
    def recipe(self) -> Recipe:
        """What the weight format and the activation format make together."""
        return recipe_of(self.weight_format, self.activation_format)
