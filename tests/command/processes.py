"""Runs the command ``backhaul`` as a process, as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

COMMAND = (sys.executable, "-m", "backhaul")
SECONDS = 200
"""For a command to end, on a machine that is busy with other tests."""


def run_command(
    *arguments: str, cwd: Path | None = None, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    env = {**os.environ, **(environ or {})}
    return subprocess.run(
        [*COMMAND, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=SECONDS, check=False
    )
