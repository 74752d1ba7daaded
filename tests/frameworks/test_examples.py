"""The examples of frameworks train to the weights of one process."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"

# On a machine that is busy with other tests.
pytestmark = pytest.mark.timeout(240)
RUN_SECONDS = 220


@pytest.mark.parametrize(
    ("example", "package"),
    [
        ("plain_torch.py", "torch"),
        ("lightning_trainer.py", "lightning"),
        ("lightning_fabric.py", "lightning"),
        ("accelerate_loop.py", "accelerate"),
        ("hf_trainer.py", "transformers"),
    ],
)
def test_example(example: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; it is in the extra 'frameworks'")
    done = subprocess.run(
        [sys.executable, example, "--steps", "6", "--check"],
        cwd=EXAMPLES,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"loss of the first step [0-9.]+, of the last [0-9.]+", done.stdout)
    assert "largest difference of a weight to one process: 0.0e+00" in done.stdout
