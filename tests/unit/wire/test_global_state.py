"""What counts as state of a function that is sent by value, and what does not."""

from __future__ import annotations

import sys
import textwrap
import types
from typing import Any

import pytest
import torch

import backhaul as bh
from backhaul._wire.bytecode import uses_of
from backhaul._wire.codec import encode
from backhaul._wire.global_state import refuse_state
from backhaul._wire.pickling import reducers
from backhaul.errors import SerializationError

from .trip import carry

PROGRAM = """
import collections, dataclasses, enum, functools, itertools, logging, math, os, random, types
import numpy
import torch
from torch import nn
import backhaul as bh

count, rate, name, flags, nothing = 0, 0.5, "x", (True, 1j), None
rows, names, table, queue = [[1], [2]], {"a"}, {"k": [0]}, collections.deque([1])
raw, array, counts = bytearray(3), numpy.zeros(3), collections.Counter()
device, dtype, size = torch.device("cpu"), torch.float32, torch.Size([2])
log = logging.getLogger("x")
root = types.SimpleNamespace(inner=types.SimpleNamespace(n=0))
weight = torch.ones(2, requires_grad=True)
mean = torch.zeros(2)
net = nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
numbers, dice, normal = itertools.count(), random.Random(1), numpy.random.default_rng(1)
both, nested = [weight, net], {"a": [({"w": weight},)]}
held = types.SimpleNamespace(inner=types.SimpleNamespace(w=mean))
bound, part = net.forward, functools.partial(torch.add, weight)

class Total:
    sum = 0
    log = []

class Color(enum.Enum):
    RED = 1

@dataclasses.dataclass
class Config:
    rate: float = 0.1
    names: list = dataclasses.field(default_factory=list)

config = Config()

class Stats:
    def __init__(self):
        self.n, self.seen = 0, []
    def inc(self):
        self.n += 1
        return self.n
    def note(self, x):
        self.seen.append(x)
    def through(self):
        return self.inc()
    def read(self):
        return self.n + len(self.seen)

stats = Stats()
criterion, act = nn.CrossEntropyLoss(), nn.ReLU()

def helper(x):
    return x + rate

def cached(x):
    return x
cached.calls = 0
"""


@pytest.fixture(scope="module")
def space() -> dict[str, Any]:
    """The globals of a program that no other worker has."""
    found: dict[str, Any] = vars(types.ModuleType("__main__"))
    exec(PROGRAM, found)
    return found


def function_of(space: dict[str, Any], body: str, head: str = "def function(x=None):") -> Any:
    exec(f"{head}\n{textwrap.indent(body, '    ')}", space)
    return space["function"]


def refusal(function: Any) -> str | None:
    try:
        encode([function], names=["the function"])
    except SerializationError as error:
        return str(error)
    return None


CONSTANTS = [
    "return stats.read()",
    "return criterion(act(x), x)",
    "log.propagate = False",
    "return x",
    "return count + rate, name, flags, nothing",
    "return [row[0] for row in rows], 'a' in names, table['k'], queue[0], raw[0], array.sum(), counts['x']",
    "return sorted(rows), dict(table), table.get('k'), list(table.items()), names | {'b'}",
    "mine = dict(table); mine['k'] = 1; return mine",
    "mine = rows[:]; mine.append(x); return mine",
    "mine = table.copy(); mine.update(x); return mine",
    "mine = []; mine.append(rows[0]); return mine",
    "x.append(rows); x['k'] = table; x.table = table; return x",
    "return helper(x) + math.pi",
    "return torch.zeros(size, dtype=dtype, device=device), nn.Linear(1, 1)",
    "log.info('x'); return os.environ.get(name)",
    "return Config(rate), config.rate, config.names, Color.RED, Total().sum",
    "made = Config(); made.rate = 1; made.names.append(2); return made",
    "local = 0\ndef inner():\n    nonlocal local\n    local += 1\n    return rate + local\nreturn inner()",
    "os.environ['X'] = 'y'; bh.testing = 1; torch.flag = 2; numpy.flags.append(1)",  # the callee's own modules
    "return bh.rpc_sync('worker1', helper, args=(x,))",
    "for row in list(rows):\n    x.append(row)\nreturn x",
    "return random.random(), torch.rand(2), numpy.random.rand()",
    "try:\n    return rows[x]\nexcept IndexError as error:\n    x.error = error\n    return table[x]",
    "with log.lock:\n    return [cell for row in rows for cell in row if cell]",
    "x[rows[0] if x else table] = 1; return x",
    "rows\nx.append(1)",
    "return x.pop(rows), x.add_(rate)",
    "global rate\nreturn rate",
]


@pytest.mark.parametrize("body", CONSTANTS)
def test_constants_go_along(space: dict[str, Any], body: str) -> None:
    assert refusal(function_of(space, body)) is None


STATE = {
    "return stats.inc()": "stats",
    "stats.note(x)": "stats",
    "return stats.through()": "stats",
    "global count\ncount += 1": "count",
    "global fresh\nfresh = x": "fresh",
    "global count\ndel count": "count",
    "def inner():\n    global count\n    count = x\ninner()": "count",
    "return [rows.append(n) for n in x]": "rows",
    "rows.append(x)": "rows",
    "names.add(x)": "names",
    "queue.popleft()": "queue",
    "counts.update(x)": "counts",
    "table['k'] = x": "table",
    "table['k'] += 1": "table",
    "table['k'][0] = x": "table",
    "table['k'].append(x)": "table",
    "rows[0][0] += x": "rows",
    "rows[:] = x": "rows",
    "rows[1:2] = x": "rows",
    "del rows[0]": "rows",
    "raw[0] = 1": "raw",
    "array[0] = 1": "array",
    "array[1:] += 1": "array",
    "config.rate = x": "config",
    "config.rate += x": "config",
    "config.names.append(x)": "config",
    "config.names[0] = x": "config",
    "del config.rate": "config",
    "root.inner.n += 1": "root",
    "Total.sum += 1": "Total",
    "Total.log.append(x)": "Total",
    "cached.calls += 1": "cached",
    "mine = table\nmine['k'] = x": "table",
    "mine = table['k']\nmine.append(x)": "table",
    "for row in rows:\n    row.append(x)": "rows",
    "rows[0 if x else 1] = x": "rows",
    "if x:\n    return 1\ntable['k'] = x": "table",
    "try:\n    x()\nexcept ValueError:\n    raise\nrows.append(x)": "rows",
    "while x:\n    table[x.pop()] = 1": "table",
    "keep = rows.append\nkeep(x)": "rows",
    "return weight * x": "weight",
    "return mean": "mean",
    "return net(x)": "net",
    "optimizer.step()": "optimizer",
    "scheduler.step()": "scheduler",
    "return next(numbers)": "numbers",
    "return dice.random()": "dice",
    "return normal.normal()": "normal",
    "return both[0]": "both",
    "return nested['a']": "nested",
    "return held.inner": "held",
    "return bound(x)": "bound",
    "return part(x)": "part",
    "def inner():\n    return net(x)\nreturn inner()": "net",
    "return (lambda: weight)()": "weight",
    "return bh.get_gradients(x)[weight]": "weight",
}


@pytest.mark.parametrize("body", STATE)
def test_state_is_refused_and_named(space: dict[str, Any], body: str) -> None:
    text = refusal(function_of(dict(space), body))
    assert text is not None
    assert f"the global '{STATE[body]}'" in text
    assert f"Put function and '{STATE[body]}' into a module" in text
    assert f"pass '{STATE[body]}' as an argument" in text


COPIED = ["weight * x", "mean", "net(x)", "both[0]", "nested['a']", "bound(x)", "part(x)"]


@pytest.mark.parametrize("expression", COPIED)
def test_a_lambda_takes_tensors_along_everywhere(space: dict[str, Any], expression: str) -> None:
    """Gradients come back to the original, as from a tensor in a closure."""
    assert refusal(eval(f"lambda x: {expression}", space)) is None
    exec(f"def make():\n    def function(x): return {expression}\n    return function", space)
    assert refusal(space["make"]()) is None


CHANGED = {
    "rows.append(x)": "rows",
    "table.update(x)": "table",
    "optimizer.step()": "optimizer",
    "scheduler.step()": "scheduler",
    "next(numbers)": "numbers",
    "weight.add_(x)": "weight",
    "weight.data.zero_()": None,
    "net.weight.zero_()": None,
    "weight.add(x)": None,
    "[rows.append(n) for n in x]": "rows",
}


@pytest.mark.parametrize("expression", CHANGED)
def test_what_a_lambda_changes_is_refused(space: dict[str, Any], expression: str) -> None:
    text = refusal(eval(f"lambda x: {expression}", space))
    name = CHANGED[expression]
    assert (text is None) if name is None else (text is not None and f"the global '{name}'" in text)


def test_functions_that_are_called_are_looked_at_too(space: dict[str, Any]) -> None:
    space = dict(space)
    exec("def bump():\n    global count\n    count += 1\ndef through():\n    return bump()", space)
    text = refusal(function_of(space, "return [through() for _ in x]"))
    assert text is not None
    assert "bump assigns the global 'count'" in text


def test_methods_of_classes_that_go_by_value_are_looked_at(space: dict[str, Any]) -> None:
    space = dict(space)
    exec("class Layer(nn.Module):\n    def forward(self, x):\n        return net(x)", space)
    for value in (space["Layer"], space["Layer"]()):
        text = refusal(value)
        assert text is not None
        assert "Layer.forward uses the global 'net', a module (Linear)" in text
    exec("class Layer(nn.Module):\n    def forward(self, x):\n        self.seen = x\n        return x * rate", space)
    assert refusal(space["Layer"]()) is None


def test_wrappers_of_decorators_use_the_globals_of_another_module(space: dict[str, Any]) -> None:
    exec("@torch.no_grad()\ndef function(x):\n    return x * rate", space)
    assert carry(space["function"])(torch.ones(1)).item() == 0.5
    exec("@torch.no_grad()\ndef function(x):\n    return x * weight", space)
    text = refusal(space["function"])
    assert text is not None
    assert "the global 'weight', a tensor" in text


def test_values_count_when_a_function_is_sent(space: dict[str, Any]) -> None:
    space = dict(space)
    function = function_of(space, "return rate")
    assert refusal(function) is None
    space["rate"] = torch.ones(1)
    assert "'rate', a tensor" in (refusal(function) or "")
    space["rate"] = 0.5
    assert refusal(function) is None


def test_modules_and_what_can_be_imported_go_by_name(space: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("kept")
    exec("import torch\ntable = torch.ones(2)\nclass Kept:\n    table = torch.ones(2)\n    count = 0", vars(module))
    monkeypatch.setitem(sys.modules, "kept", module)
    space = {**space, "kept": module, "Kept": module.Kept}
    body = "kept.table.add_(1); kept.count = 1; Kept.count += 1; return kept.table, Kept.table, torch, bh"
    assert refusal(function_of(space, body)) is None


def test_a_class_that_goes_by_value_takes_its_tensors_along(space: dict[str, Any]) -> None:
    space = dict(space)
    exec("class Table:\n    rows = [torch.ones(2)]", space)
    assert "the global 'Table', a type that holds a tensor" in (refusal(function_of(space, "return Table.rows")) or "")


def test_code_is_looked_at_once_for_a_function(space: dict[str, Any]) -> None:
    function = function_of(dict(space), "return rate")
    assert uses_of(function) is uses_of(function)
    function.__code__ = function_of(dict(space), "global rate\nrate = 1").__code__
    assert uses_of(function).assigns == {"rate"}


def test_references_are_no_state(space: dict[str, Any]) -> None:
    with bh.cluster(2):
        rref = bh.remote("worker1", torch.ones, args=(2,))
        there = bh.nn.RemoteModule("worker1", torch.nn.Linear, args=(2, 2))
        function = function_of({**space, "rref": rref, "there": [there]}, "return there[0](rref.to_here())")
        refuse_state(function, by_value=lambda _: True, references=reducers)
        with pytest.raises(SerializationError):
            refuse_state(function, by_value=lambda _: True, references=())


def test_functions_that_go_by_name_are_not_looked_at() -> None:
    assert carry(assigns) is assigns


def assigns() -> None:
    global _value
    _value = 1


_value = 0
