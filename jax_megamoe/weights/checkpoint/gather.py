"""Sorting a checkpoint's tensors by expert and projection, in whatever order they come."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import get_args

from jax_megamoe import _checks
from jax_megamoe.config import ExpertSpec
from jax_megamoe.weights.checkpoint.dialects import SHARED, Dialect, Kind, Part, Role
from jax_megamoe.weights.checkpoint.families import GateUpOrder
from jax_megamoe.weights.checkpoint.projection import FLOATS, UNPACKED, Piece, Projection
from jax_megamoe.weights.checkpoint.tensors import Tensor

Key = tuple[int, Part]
"""A logical expert (or `SHARED`) and its ``gate``, ``up`` or ``down``."""

EACH_PART: tuple[Part, ...] = ("gate", "up", "down")
"""The projections of an expert."""


@dataclass(frozen=True)
class _StackOrder:
    """How tensors of all experts are arranged: matrices as [K, N]; gate and up rows in turns."""

    transposed: bool
    alternating: bool


class Gathering:
    """The tensors of a layer's experts, sorted.

    Args:
        config: the layer.
        dialect: reads the names.
        wanted: logical experts (and `SHARED`) to keep; tensors of the others are checked by name.
        stored_sizes: hidden and intermediate size of the checkpoint.
        gate_up_order: how rows of a tensor with gate and up follow each other; None: in turns in
            GPT-OSS's blocks and in transposed stacks with biases (GPT-OSS in BF16), gate rows first
            in what is not transposed; of other transposed stacks nothing is known.

    Attributes:
        projections: matrices by key; whoever has used one takes it out.
        biases: by key.
        input_scales: of the wanted experts' down projections.
    """

    def __init__(
        self,
        config: ExpertSpec,
        dialect: Dialect,
        wanted: set[int],
        *,
        stored_sizes: tuple[int, int],
        gate_up_order: GateUpOrder | None,
    ) -> None:
        self.projections: dict[Key, Projection] = {}
        self.biases: dict[Key, Piece] = {}
        self.input_scales: dict[int, Piece] = {}
        self._config = config
        self._dialect = dialect
        self._wanted = wanted
        self._hidden, self._inter = stored_sizes
        if gate_up_order is not None:
            _checks.one_of("gate_up_order", gate_up_order, get_args(GateUpOrder))
        self._gate_up_order = gate_up_order
        self._is_transposed: bool | None = None
        self._has_blocks = self._has_gate_up_biases = False
        self._undecided: list[tuple[Tensor, Role]] = []
        self._seen: dict[tuple[int, Part, Kind], str] = {}
        self._of_floats: set[Key] = set()

    def concerns(self, name: str) -> bool:
        """Whether the name begins as these experts' do."""
        return name.startswith(f"{self._dialect.prefix}.")

    def role(self, name: str) -> Role | None:
        """What the tensor is, see `Dialect.role`; None too where nobody needs its bytes."""
        role = self._dialect.role(name)
        if role is None or role.kind == "unused":
            return None
        if role.expert is None or role.expert in self._wanted:
            return role
        self._mark(role, name)
        return None

    def take(self, tensor: Tensor, role: Role) -> list[Key]:
        """Sorts one tensor in.

        Returns:
            The keys that something came for, in order.

        Raises:
            ValueError: a tensor that came before, a wrong shape.
            TypeError: a wrong dtype.
            NotImplementedError: packed int4.
        """
        where = f"{tensor.name} in {tensor.origin}"
        self._mark(role, where)
        if role.expert is not None:
            order = _StackOrder(False, self._gate_up_order == "alternating")
            return self._sort(tensor, role, order)
        experts = self._config.logical_experts
        if not tensor.shape or tensor.shape[0] != experts:
            expected = f"{experts} experts on the leading axis (num_logical_experts)"
            raise ValueError(_checks.message(where, expected, f"shape {list(tensor.shape)}"))
        self._learn(tensor, role)
        waiting, self._undecided = [*self._undecided, (tensor, role)], []
        keys: list[Key] = []
        for each in waiting:
            order = self._order_of(*each)
            if order is None:
                self._undecided.append(each)
            else:
                keys += self._sort(*each, order)
        return keys

    def use_order(self, order: GateUpOrder | None) -> None:
        """Takes the model's order of gate and up rows where none was given; before any tensor."""
        self._gate_up_order = self._gate_up_order or order

    def check_order(self) -> None:
        """Raises ValueError for a stack that two models' orders fit."""
        for tensor, role in self._undecided:
            if role.part == "gate_up" and self._is_transposed:
                expected = (
                    "'halves' (gate columns first: Qwen3-VL-MoE, Llama 4) or 'alternating' (gate "
                    "and up columns in turns: GPT-OSS), for its shape is the same in both"
                )
                where = f"gate_up_order of {tensor.name} in {tensor.origin}"
                hint = "pass it, or put the model's config.json beside the file"
                raise ValueError(_checks.message(where, expected, None, hint))

    def incomplete(self, joint: Callable[[int], bool]) -> list[str]:
        """What has come but cannot be used yet, each with what it lacks.

        Args:
            joint: of an expert, whether its gate and up need each other (one global scale).
        """
        lacking = [
            f"how {tensor.name} in {tensor.origin} is arranged" for tensor, _ in self._undecided
        ]
        for (expert, part), projection in sorted(self.projections.items()):
            where = next(iter(projection.pieces.values())).where
            if projection.missing is not None:
                lacking.append(f"{projection.missing} for {where}")
            elif part != "down" and joint(expert):
                other: Part = "up" if part == "gate" else "gate"
                if (expert, other) not in self.projections:
                    lacking.append(f"{other} for {where}, which share a global scale")
        return lacking

    def absent(self, experts: Iterable[int]) -> list[str]:
        """What nothing came for: weights of `experts`, and biases and input scales that only others
        of the wanted ones have.
        """
        keys: list[Key] = list(product(experts, EACH_PART))
        lacking = [f"weight of {_named(key)}" for key in keys if (*key, "weight") not in self._seen]
        local: list[Key] = [
            (expert, part) for expert, part in keys if expert in self._wanted - {SHARED}
        ]
        for kind in ("bias", "input_scale"):
            of_kind = [key for key in local if kind == "bias" or key[1] == "down"]
            none = [key for key in of_kind if (*key, kind) not in self._seen]
            if len(none) < len(of_kind):
                lacking += [f"{kind} of {_named(key)}" for key in none]
        return lacking

    def _mark(self, role: Role, where: str) -> None:
        experts = range(self._config.logical_experts) if role.expert is None else [role.expert]
        for expert, part in product(experts, _parts(role)):
            key = (expert, part, role.kind)
            if key in self._seen:
                expected = f"one {role.kind} of expert {expert}'s {part} projection"
                raise ValueError(_checks.message(where, expected, f"another, {self._seen[key]}"))
            self._seen[key] = where

    def _sort(self, tensor: Tensor, role: Role, order: _StackOrder) -> list[Key]:
        keys: list[Key] = []
        stacked = role.expert is None
        experts = self._wanted - {SHARED} if role.expert is None else {role.expert}
        for expert, part in product(sorted(experts), _parts(role)):
            piece = Piece(
                tensor,
                role,
                index=expert if stacked else None,
                half=EACH_PART.index(part) if role.part == "gate_up" else None,
                transposed=order.transposed and role.kind == "weight",
                alternating=order.alternating,
            )
            self._keep((expert, part), piece)
            keys.append((expert, part))
        return keys

    def _keep(self, key: Key, piece: Piece) -> None:
        expert, part = key
        if piece.role.kind == "input_scale" and part != "down":
            # The first matmul's input is quantised token by token: gate's and up's are not used.
            return
        projection = self.projections.get(key) or Projection(
            self._size(key, self._hidden, self._inter),
            self._size(key, self._config.hidden_size, self._config.intermediate_size),
        )
        projection.add(piece)
        if piece.role.kind == "weight" and piece.dtype in FLOATS:
            self._of_floats.add(key)
        scale = projection.pieces.get("scale") or projection.pieces.get("global_scale")
        if scale is not None and key in self._of_floats:
            expected = "no scale for a weight in floating point"
            raise TypeError(_checks.message(scale.where, expected, scale.dtype))
        if piece.role.kind == "bias":
            self.biases[key] = projection.pieces.pop("bias")
        elif piece.role.kind == "input_scale":
            self.input_scales[expert] = projection.pieces.pop("input_scale")
        if projection.pieces:
            self.projections[key] = projection

    def _size(self, key: Key, hidden: int, inter: int) -> tuple[int, int]:
        expert, part = key
        rows = inter * (self._config.num_shared_experts if expert == SHARED else 1)
        return (hidden, rows) if part == "down" else (rows, hidden)

    def _learn(self, tensor: Tensor, role: Role) -> None:
        """Keeps what the tensor shows of how stacks are arranged."""
        self._has_blocks = self._has_blocks or role.blocks
        if role.kind == "bias" and role.part == "gate_up":
            self._has_gate_up_biases = True
        if role.kind != "weight" or self._is_transposed is not None:
            return
        if str(tensor.dtype) not in UNPACKED:
            self._is_transposed = False if role.part == "gate_up" else None
            return
        rows, columns = self._size((0, _parts(role)[0]), self._hidden, self._inter)
        rows *= len(_parts(role))
        if rows != columns:
            self._is_transposed = tensor.shape[1:] == (columns, rows)

    def _order_of(self, tensor: Tensor, role: Role) -> _StackOrder | None:
        """How a stack is arranged; None where that is not known yet."""
        is_unpacked = role.kind == "weight" and str(tensor.dtype) in UNPACKED
        if is_unpacked and self._is_transposed is None:
            return None
        alternating = False
        if role.part == "gate_up":
            known = self._alternates()
            if known is None:
                return None
            alternating = known
        return _StackOrder(bool(self._is_transposed), alternating)

    def _alternates(self) -> bool | None:
        """Whether gate and up rows are in turns; None where that is not known yet."""
        if self._gate_up_order is not None:
            return self._gate_up_order == "alternating"
        if self._has_blocks:
            return True
        if not self._is_transposed:
            return self._is_transposed
        return True if self._has_gate_up_biases else None


def _parts(role: Role) -> tuple[Part, ...]:
    return ("gate", "up") if role.part == "gate_up" else (role.part,)


def _named(key: Key) -> str:
    expert, part = key
    return f"{'the shared expert' if expert == SHARED else f'expert {expert}'}'s {part} projection"
