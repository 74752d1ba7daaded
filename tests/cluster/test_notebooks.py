"""Programs whose ``__main__`` has no file: cells of a notebook, what is typed in, ``python -c``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .remote_functions import PATIENCE

PROGRAMS = Path(__file__).parent / "programs"
README = Path(__file__).parent.parent.parent / "README.md"
WAYS = {"cells": [str(PROGRAMS / "notebook.py")], "stdin": ["-"], "-c": ["-c"]}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def run(way: str, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program, whose cells are separated by ``# %%``."""
    command = [sys.executable, *WAYS[way], *([program] if way == "-c" else [])]
    text = None if way == "-c" else program
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=PATIENCE, check=False)


def output(way: str, program: str) -> list[str]:
    """What a program that does not fail prints."""
    done = run(way, program)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# Workers of one process share their ``__main__``.


def test_the_twenty_lines_of_the_readme(way: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    shown = "torch.set_printoptions(profile='full')\n"
    lines = output(way, f"import torch\n{shown}torch.manual_seed(1)\n{code}")
    assert lines[0].startswith("tensor([")
    assert len(lines) == 11, "the gradient of a table with ten rows"


SHARED = """
import torch, backhaul as bh
count, seen, net = 0, [], torch.nn.Linear(2, 1)
pair = bh.cluster(2).start()
# %%
def bump():
    global count
    count += 1
    seen.append(bh.get_worker_info().name)
    return count
# %%
def forward(x):
    return net(x)
# %%
def gradient(ctx):
    return bh.get_gradients(ctx)[net.weight]
# %%
print([bh.rpc_sync("worker1", bump) for _ in range(3)], count, seen)
# %%
with bh.context() as ctx:
    bh.backward(ctx, [bh.rpc_sync("worker1", forward, args=(torch.tensor([1.0, 2.0]),)).sum()])
    print(bh.rpc_sync("worker1", gradient, args=(ctx,)).tolist())
"""


def test_the_state_of_cells_is_that_of_all_workers_of_the_process(way: str) -> None:
    assert output(way, SHARED) == ["[1, 2, 3] 3 ['worker1', 'worker1', 'worker1']", "[[1.0, 2.0]]"]


def test_a_program_that_is_typed_in_may_launch_others() -> None:
    """It says that its file is ``<stdin>``."""
    program = "import backhaul as bh\ndef main(): return bh.get_worker_info().name\nprint(bh.launch(main, workers=2))"
    assert output("stdin", program) == ["['worker0', 'worker1']"]
