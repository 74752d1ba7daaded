"""The examples run, in a short form."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from backhaul._transport.sockets.certificates import issue

EXAMPLES = Path(__file__).parent.parent / "examples"

# On a machine that is busy with other tests.
pytestmark = pytest.mark.timeout(240)
RUN_SECONDS = 220


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=EXAMPLES, capture_output=True, text=True, timeout=RUN_SECONDS, check=False
    )


def test_hello_workers() -> None:
    done = run("hello_workers.py", "--workers", "3", "--size", "100")
    assert done.returncode == 0, done.stderr
    assert "All results equal the local ones" in done.stdout


def test_hello_workers_says_what_is_wrong() -> None:
    done = run("hello_workers.py", "--workers", "1")
    assert done.returncode == 2
    assert "at least 2 workers" in done.stderr


def test_train_transformer() -> None:
    done = run("train_transformer.py", "--workers", "3", "--steps", "3")
    assert done.returncode == 0, done.stderr
    found = re.search(r"difference of a gradient to one process\D*([0-9.e+-]+)", done.stdout)
    assert found is not None, done.stdout
    assert float(found.group(1)) < 1e-5


def test_train_transformer_says_what_is_wrong() -> None:
    done = run("train_transformer.py", "--workers", "1")
    assert done.returncode == 2
    assert "at least 2 workers" in done.stderr


def test_rnn_split() -> None:
    done = run("rnn_split.py", "--steps", "60")
    assert done.returncode == 0, done.stderr
    first, last = numbers_after("loss", done.stdout)
    assert last < first


def test_parameter_server() -> None:
    done = run("parameter_server.py", "--trainers", "4", "--steps", "60")
    assert done.returncode == 0, done.stderr
    assert "240 steps" in done.stdout
    assert numbers_after("accuracy", done.stdout)[1] > 0.8


def test_pipeline_resnet() -> None:
    done = run("pipeline_resnet.py", "--steps", "3", "--splits", "1", "4")
    assert done.returncode == 0, done.stderr
    assert numbers_after("difference of a gradient to one process", done.stdout)[0] < 1e-5


def test_ddp_and_embeddings() -> None:
    done = run("ddp_and_embeddings.py", "--trainers", "2", "--steps", "5")
    assert done.returncode == 0, done.stderr
    assert numbers_after("difference of a weight to one process", done.stdout)[0] < 1e-5


def test_cartpole_actors() -> None:
    done = run("cartpole_actors.py", "--observers", "2", "--iterations", "5")
    assert done.returncode == 0, done.stderr
    assert numbers_after("average return of the last episodes", done.stdout)[0] > 10


def test_split_learning(tmp_path: Path) -> None:
    for role in ("lab", "bank", "shop"):
        made = issue(b"an authority", role)
        (tmp_path / f"{role}.pem").write_bytes(made.certificate)
        (tmp_path / f"{role}.key").write_bytes(made.key)
        (tmp_path / "authority.pem").write_bytes(made.authority)
    done = run("split_learning.py", "--certificates", str(tmp_path))
    assert done.returncode == 0, done.stderr + done.stdout
    assert "equal to the last bit: yes" in done.stdout
    assert numbers_after("accuracy on new customers", done.stdout)[0] > 0.95


@pytest.mark.slow
def test_cartpole_is_solved() -> None:
    done = run("cartpole_actors.py")
    assert done.returncode == 0, done.stderr
    assert numbers_after("average return of the last episodes", done.stdout)[0] >= 195


def numbers_after(what: str, text: str) -> list[float]:
    """All numbers of the line in which something stands, after it."""
    line = next(line for line in text.splitlines() if what in line)
    return [float(number) for number in re.findall(r"[0-9][0-9.e+-]*", line.partition(what)[2])]
