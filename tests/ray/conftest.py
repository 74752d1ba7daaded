"""An environment for programs that use Ray, in which a Ray of somebody else on this machine is not found."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
EXAMPLES = Path(__file__).parents[2] / "examples"
RUN_SECONDS = 170.0


def needs(package: str) -> pytest.MarkDecorator:
    """Skip the tests of a module where the package is not installed. Importing it here would take seconds."""
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed; `make ray` installs it")


@contextlib.contextmanager
def ray_environment() -> Iterator[dict[str, str]]:
    """Ray's files are in a folder of their own: with a short name, as the names of its sockets are long."""
    folder = tempfile.mkdtemp(prefix="bh-ray-", dir="/tmp")
    own = {
        "RAY_TMPDIR": folder,
        "RAY_ADDRESS": "local",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    }
    try:
        yield {**os.environ, **own}
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # processes of Ray that are ending still write there


@pytest.fixture(scope="session")
def environment() -> Iterator[dict[str, str]]:
    with ray_environment() as made:
        yield made


def run_program(program: Path, *args: str, environment: dict[str, str]) -> str:
    """Run a program to its end; returns what it has printed."""
    done = subprocess.run(
        [sys.executable, program, *args],
        cwd=program.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
