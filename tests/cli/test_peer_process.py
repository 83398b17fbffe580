"""cli/gpu/peer_process and torch_peer: a peer's process, and what becomes of its faults."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jax_megamoe.cli.gpu import measure, peer_process, torch_peer
from jax_megamoe.cli.gpu.measure import Request
from jax_megamoe.cli.gpu.models import BF16_ROWS, MODELS, TINY, Model
from jax_megamoe.cli.gpu.peer_process import PeerProcess

PROCESS = """
import json, sys
print("a package speaks", file=sys.stderr)
asked = json.loads(sys.stdin.readline())
assert asked["token_counts"] == [1, 8] and asked["models"]["tiny"]["top_k"] == 4
{first}
for line in sys.stdin:
    cell = json.loads(line)
    for taken in (12.5, None):
        said = dict(microseconds=taken, why="" if taken else "tiles: none fits " + cell["recipe"])
        print(json.dumps(said), flush=True)
"""


@pytest.fixture
def process(tmp_path: Path) -> Callable[..., PeerProcess]:
    """A process of a peer that answers, or whose first answer is another."""

    def make(first: str = 'print(json.dumps({"versions": {"peer": "1.2"}}), flush=True)') -> Any:
        script = tmp_path / "peer.py"
        script.write_text(PROCESS.format(first=first))
        return PeerProcess("peer", [sys.executable, str(script)])

    return make


def test_times_of_another_process(process: Callable[..., PeerProcess]) -> None:
    """Among the rows of a run, with the bytes and FLOP of ours."""
    request = Request(
        {"tiny": TINY},
        token_counts=(1, 8),
        series=(("triton_kernels", BF16_ROWS), ("ragged_dot", "bf16")),
    )
    result = measure.measure(request, timer=lambda _: 1600.0, processes=lambda _: process())
    first, second, ours, _ = result.timings
    assert (first.microseconds, first.why, ours.microseconds) == (12.5, "", 100.0)
    assert (second.microseconds, second.why) == (None, f"tiles: none fits {BF16_ROWS}")
    assert first.weight_bytes == ours.weight_bytes * 17 / 32 / 2 and first.flops == ours.flops
    assert result.versions["peer"] == "1.2"


@pytest.mark.parametrize(
    ("first", "why"),
    [
        ("print(json.dumps(dict(failed='no peer here')), flush=True)", "no peer here"),
        ("raise RuntimeError('no GPU')", "its process ended: RuntimeError: no GPU"),
        ("print('hello', flush=True)", "no JSON in its answer"),
        ("import time; time.sleep(60)", "no answer in 1 s"),
    ],
)
def test_faults_are_reasons(
    process: Callable[..., PeerProcess], first: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_process, "COMPILES", 1.0 if "sleep" in first else 60.0)
    peer = process(first)
    peer.start({"tiny": TINY}, [("tiny", BF16_ROWS)], (1, 8))
    assert peer.wait() == {}
    assert list(peer.times("tiny", BF16_ROWS, (1, 8))) == [(1, None, why), (8, None, why)]
    peer.close()


def test_no_such_program() -> None:
    peer = PeerProcess("peer", ["/no/such/python"])
    peer.start({"tiny": TINY}, [], (1,))
    ((_, _, why),) = peer.times("tiny", BF16_ROWS, (1,))
    assert "No such file or directory" in why
    peer.close()


@pytest.mark.parametrize("name", torch_peer.MODULES)
def test_peers_that_are_not_installed(name: str) -> None:
    """Their real process, without torch or the package."""
    peer = PeerProcess(name)
    peer.start({"tiny": TINY}, [("tiny", BF16_ROWS)], (1,))
    assert peer.wait() == {}
    ((_, taken, why),) = peer.times("tiny", BF16_ROWS, (1,))
    assert taken is None and why.startswith("No module named")
    peer.close()


class FakePeer:
    """Refuses a recipe, and 8 tokens."""

    compiled: Sequence[Any] = ()

    def versions(self) -> dict[str, str]:
        return {"fake": "3"}

    def compile(self, cells: Sequence[tuple[Model, str]], token_counts: Sequence[int]) -> None:
        self.compiled = [(model.num_experts, recipe, *token_counts) for model, recipe in cells]

    def prepare(self, model: Model, recipe: str) -> Callable[[int], Any]:
        if recipe == "fp8_block":
            raise NotImplementedError("no fp8\nat all")

        def of(num_tokens: int) -> Any:
            if num_tokens == 8:
                raise RuntimeError("too many")
            return lambda x, routing: x

        return of

    def reference(self, x: Any, routing: Any) -> Any:
        return x


def test_what_a_peer_process_answers() -> None:
    peer, said = FakePeer(), []
    models = {"v4_flash": MODELS["v4_flash"].described()}
    cells = [["v4_flash", BF16_ROWS], ["v4_flash", "fp8_block"]]
    lines = [json.dumps(dict(models=models, cells=cells, token_counts=[1, 8]))]
    lines += [json.dumps(dict(model=name, recipe=recipe)) for name, recipe in cells]
    torch_peer.serve(peer, lines, said.append, clock=lambda *_: 7.0)
    assert peer.compiled == [(256, recipe, 1, 8) for _, recipe in cells]
    assert said == [
        {"versions": {"fake": "3"}},
        {"microseconds": 7.0, "why": ""},
        {"microseconds": None, "why": "too many"},
        {"microseconds": None, "why": "no fp8"},
        {"microseconds": None, "why": "no fp8"},
    ]


def test_models_travel() -> None:
    for model in MODELS.values():
        assert Model.of(json.loads(json.dumps(model.described()))) == model


def test_turns_are_those_of_ours() -> None:
    found = torch_peer.turns(jnp.array([[0, 255]]), 256)
    assert len(found) == 16
    got = [found[turn].tolist() for turn in (0, 1, 15)]
    assert got == [[[0, 255]], [[16, 15]], [[240, 239]]]
