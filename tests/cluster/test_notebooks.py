"""Programs whose ``__main__`` has no file: cells of a notebook, what is typed in, ``python -c``."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

import backhaul as bh

from .processes import run_processes
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
    (line,) = output(way, code)
    assert line.startswith("loss ")
    assert line.endswith("weights ['0.weight', '1.weight', '1.bias', '3.weight', '3.bias']")


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


# Those of several processes do not: functions of cells travel by value, and what they would leave behind is an error.

HEAD = """
import torch, backhaul as bh
"""
TAIL = """
# %%
def main():
    if bh.get_worker_info().id == 0:
        return program()
# %%
for line in bh.launch(main, workers=2)[0]:
    print(line)
"""
STATE = """
counter = 0
def bump():
    global counter
    counter += 1
    return counter

table = torch.ones(3, requires_grad=True)
def embed(tokens):
    return table[tokens]
def gradient(ctx):
    return bh.get_gradients(ctx)[table].tolist()
"""
USE = """
def program():
    with bh.context() as ctx:
        bh.backward(ctx, [bh.rpc_sync("worker1", embed, args=(torch.tensor([1, 2, 2]),)).sum()])
        return [bh.rpc_sync("worker1", bump) for _ in range(3)], bh.rpc_sync("worker1", gradient, args=(ctx,))
"""
OTHER_STATE = """
seen, net = [], torch.nn.Linear(2, 2)
def note(x):
    seen.append(x)
def through():
    return bump()
def weight():
    return net.weight
def program():
    for call in (
        lambda: bh.rpc_sync("worker1", bump),
        lambda: bh.rpc_async("worker1", through).wait(),
        lambda: bh.rpc_sync("worker1", embed, args=(torch.tensor([1]),)),
        lambda: bh.rpc_sync("worker1", note, args=(1,)),
        lambda: bh.remote("worker1", weight).to_here(),
        lambda: bh.rpc_sync("worker1", len, args=([bump],)),
    ):
        try:
            call()
        except bh.errors.SerializationError as error:
            yield f"{error.path}: {error}"
        else:
            yield "state was lost"
"""
REFUSALS = [
    ("function", "bump assigns the global 'counter'"),
    ("function", "bump assigns the global 'counter'"),
    ("function", "embed uses the global 'table', a tensor"),
    ("function", "note changes the global 'seen'"),
    ("args[0]", "weight uses the global 'net', a module (Linear)"),
    ("args[0][0]", "bump assigns the global 'counter'"),
]


def test_state_of_cells_is_not_lost_without_a_word() -> None:
    lines = output(
        "cells", f"{HEAD}# %%{STATE}# %%{OTHER_STATE}{TAIL}".replace("return program()", "return [*program()]")
    )
    assert len(lines) == len(REFUSALS)
    for line, (path, text) in zip(lines, REFUSALS, strict=True):
        assert line.startswith(f"{path}: ")
        assert text in line
        assert "into a module that both workers can import" in line


def test_state_is_not_lost_however_the_program_is_given(way: str) -> None:
    done = run(way, f"{HEAD}{STATE}{USE}{TAIL}")
    assert done.returncode == 1
    assert done.stdout == ""
    *_, error = [line for line in done.stderr.splitlines() if line.startswith("backhaul.errors.SerializationError: ")]
    assert "embed uses the global 'table', a tensor" in error


def test_a_module_keeps_the_state(tmp_path: Path) -> None:
    """The first thing that the error tells to do."""
    (tmp_path / "kept.py").write_text(f"{HEAD}{STATE}")
    program = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{HEAD}from kept import *\n# %%{USE}{TAIL}"
    assert output("cells", program) == ["[1, 2, 3]", "[0.0, 1.0, 2.0]"]


FINE = """
import dataclasses, math
rate, names, sizes, dtype = 0.5, {"a": [1, 2]}, (2, 3), torch.float64
# %%
@dataclasses.dataclass
class Config:
    scale: float = 2.0
config = Config()
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full(sizes, rate, dtype=dtype))
    def forward(self, x):
        return half(x @ self.weight)
def half(x):
    return x * rate * config.scale / len(names["a"])
def make():
    return Layer()
def use(layer):
    return layer.local_value()(torch.ones(2, dtype=dtype)).tolist(), math.floor(config.scale)
# %%
table = torch.ones(3, requires_grad=True)
def embed(table, tokens):
    return table[tokens]
def gradient():
    with bh.context() as ctx:
        bh.backward(ctx, [bh.rpc_sync("worker1", embed, args=(table, torch.tensor([1, 2, 2]))).sum()])
        return bh.get_gradients(ctx)[table].tolist()
def program():
    layer = bh.remote("worker1", make)
    scaled = bh.rpc_sync("worker1", lambda: rate * table.sum())
    return bh.rpc_sync("worker1", use, args=(layer,)), scaled.item(), gradient()
"""


def test_constants_and_what_is_passed_work_as_ever() -> None:
    """The second thing that the error tells to do."""
    lines = ["([0.5, 0.5, 0.5], 2)", "1.5", "[0.0, 1.0, 2.0]"]
    assert output("cells", f"{HEAD}{FINE}{TAIL}") == lines


# What a framework brings along: functions of another program's ``__main__``, in a process that has one of its own.


def use_a_function_of_another_program(rank: int, port: int) -> Any:
    store = TCPStore("127.0.0.1", port, is_master=False)
    bh.init(f"w{rank}", rank=rank, world_size=2, store=store)
    found: list[Any] = []
    if rank == 0:
        brought = vars(types.ModuleType("__main__"))
        exec(f"import torch, backhaul as bh\nrate = 2\ndef double(x): return rate * x\n{STATE}", brought)
        found.append(bh.rpc_sync("w1", brought["double"], args=(3,)))
        for name in ("bump", "embed"):
            with pytest.raises(bh.errors.SerializationError) as caught:
                bh.rpc_sync("w1", brought[name], args=(torch.tensor([1]),) if name == "embed" else ())
            found.append(caught.value.path)
    bh.shutdown()
    return found


def test_functions_of_another_programs_main() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found, _ = run_processes(use_a_function_of_another_program, 2, store.port)
    assert found == [6, "function", "function"]
