"""Command lines as a user types them."""

import os
import subprocess
import sys
from pathlib import Path

TINY = "--ranks 2 --experts 4 --top-k 2 --hidden 128 --intermediate 128 --tokens 16"
"""The demo at its smallest sizes."""
RUN = [sys.executable, "-m", "jax_megamoe"]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command line in `folder`, on a terminal of 80 columns."""
    environment = os.environ | {"COLUMNS": "80"}
    return subprocess.run(
        arguments,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
