"""A peer that needs torch, in a process of its own: torch's memory pool and JAX's stay apart.

The process is `torch_peer`. Each of its lines answers one of ours, as JSON.
"""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax_megamoe.cli.gpu.models import Model

COMPILES, ANSWERS = 300.0, 60.0
"""Seconds after which a process is given up that compiles its kernels, or that times a layer."""

_MODULE = "jax_megamoe.cli.gpu.torch_peer"


class PeerProcess:
    """One peer; whatever goes wrong there becomes the reason why its layers have no time."""

    def __init__(self, name: str, command: Sequence[str] | None = None) -> None:
        """Starts nothing yet.

        Args:
            name: a key of `contenders.TORCH_PEERS`.
            command: the process; None: this Python's `torch_peer`.
        """
        self._command = [*(command or (sys.executable, "-m", _MODULE)), name]
        self._process: subprocess.Popen[str] | None = None
        self._said: queue.Queue[str | None] = queue.Queue()
        self._log = tempfile.TemporaryFile("w+", errors="replace")
        self._why = ""

    def start(
        self,
        models: Mapping[str, Model],
        cells: Sequence[tuple[str, str]],
        token_counts: Sequence[int],
    ) -> None:
        """Starts the process, which compiles what it will be asked for.

        Args:
            models: layers by name.
            cells: names of models, each with a recipe.
            token_counts: tokens of a call.
        """
        # Its JAX only draws tokens, and must not take the GPU's memory.
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        try:
            self._process = subprocess.Popen(
                self._command,
                text=True,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
            )
        except OSError as error:
            self._why = str(error)
            return
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        described = {name: model.described() for name, model in models.items()}
        self._tell(dict(models=described, cells=cells, token_counts=list(token_counts)))

    def wait(self) -> dict[str, str]:
        """Versions that its times depend on, once it has compiled."""
        found = self._answer(COMPILES)
        return {} if found is None else found["versions"]

    def times(
        self, model: str, recipe: str, token_counts: Sequence[int]
    ) -> Iterator[tuple[int, float | None, str]]:
        """Tokens, median microseconds of a layer, and why there is none."""
        self._tell(dict(model=model, recipe=recipe))
        for count in token_counts:
            found = self._answer(ANSWERS)
            if found is None:
                yield count, None, self._why
            else:
                yield count, found["microseconds"], found["why"]

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
        self._log.close()

    def _tell(self, line: dict[str, Any]) -> None:
        if self._why or self._process is None or self._process.stdin is None:
            return
        try:
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # the process ended: its answer says why

    def _read(self, pipe: Any) -> None:
        for line in pipe:
            self._said.put(line)
        self._said.put(None)

    def _answer(self, seconds: float) -> dict[str, Any] | None:
        """The next line, or None where the process has ended, failed or hangs."""
        if self._why:
            return None
        try:
            line = self._said.get(timeout=seconds)
            found = None if line is None else json.loads(line)
        except queue.Empty:
            self._why = f"no answer in {seconds:.0f} s"
        except ValueError:
            self._why = "no JSON in its answer"
        else:
            if found is not None and "failed" not in found:
                return found
            self._why = self._last_words() if found is None else found["failed"]
        return None

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return f"its process ended: {lines[-1] if lines else 'without a word'}"[:200]
