"""What the workers of these tests run. All of it is importable by every worker, so it goes by name."""

from __future__ import annotations

import asyncio
import collections
import contextvars
import dataclasses
import enum
import threading
import warnings
from typing import Any

import torch

import backhaul as bh

PATIENCE = 60.0  # seconds after which something that must come is taken not to come

# Gates: a handler waits at one until another call, or the test itself, opens it.

_gates: dict[str, threading.Event] = {}


def gate(name: str) -> threading.Event:
    return _gates.setdefault(name, threading.Event())


def open_gate(name: str) -> None:
    gate(name).set()


def open_gates(prefix: str) -> None:
    for name in list(_gates):
        if name.startswith(prefix):
            open_gate(name)


def wait_at(name: str, value: Any = None) -> Any:
    """Say that we are there, wait for the gate, and return ``value``."""
    gate(f"{name} reached").set()
    if not gate(name).wait(PATIENCE):
        raise AssertionError(f"nobody opened the gate {name!r}")
    return value


# Plain functions.


def identity(value: Any) -> Any:
    return value


def combine(first: Any, second: Any = 10, *more: Any, scale: int = 1, **named: Any) -> Any:
    return first, second, more, scale, named


def whoami() -> str:
    return bh.get_worker_info().name


def raise_it(error: BaseException) -> None:
    raise error


variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


def grad_mode_and_variable() -> tuple[bool, str]:
    """What a handler finds on its thread, and leaves changed behind."""
    found = torch.is_grad_enabled(), variable.get()
    torch.set_grad_enabled(False)
    variable.set("changed by a handler")
    return found


def storages(value: Any) -> list[int]:
    """Which storage each tensor of a list uses."""
    return [tensor.untyped_storage().data_ptr() for tensor in value]


# Objects.


class Counter:
    """Has every kind of method."""

    started = 100

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counter) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, step: int) -> int:
        return self.value - step

    def add(self, step: int) -> int:
        self.value += step
        return self.value

    @classmethod
    def start(cls, step: int) -> int:
        return cls.started + step

    @staticmethod
    def double(step: int) -> int:
        return 2 * step

    @bh.async_execution
    def add_later(self, step: int) -> bh.Future[int]:
        return bh.rpc_async(bh.get_worker_info(), combine, args=(self.value, step)).then(
            lambda done: sum(done.value()[:2])
        )

    @staticmethod
    @bh.async_execution
    def double_later(step: int) -> bh.Future[int]:
        return bh.rpc_async(bh.get_worker_info(), Counter.double, args=(step,))

    @classmethod
    @bh.async_execution
    def start_later(cls, step: int) -> bh.Future[int]:
        return bh.rpc_async(bh.get_worker_info(), cls.start, args=(step,))

    async def add_async(self, step: int) -> int:
        await asyncio.sleep(0)
        return self.value + step


class LaterCounter(Counter):
    started = 200


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: Any
    y: Any = None


Pair = collections.namedtuple("Pair", "left right")


class Network(torch.nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))

    def tied(self) -> bool:
        return self.first.weight is self.second.weight


def double_often(x: torch.Tensor, times: int) -> torch.Tensor:
    for _ in range(times):
        x = x * 2
    return x


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TorchScript is deprecated upstream
    scripted = torch.jit.script(double_often)
    scripted_module = torch.jit.script(torch.nn.Linear(3, 1))


# Errors.


class PlainError(Exception):
    """As most are: the arguments are the constructor's."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text, code)
        self.code = code


class AwkwardError(Exception):
    """Cannot be rebuilt from its ``args``."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(f"{text} ({code})")


class HoldsLockError(Exception):
    """Cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def fail_plainly() -> None:
    raise PlainError("plain", 7)


def fail_awkwardly() -> None:
    raise AwkwardError("awkward", 8)


def fail_with_lock() -> None:
    raise HoldsLockError("holds a lock")


def fail_with_tensor() -> None:
    raise PlainError("tensor", torch.ones(3))  # type: ignore[arg-type]


def fail_from_another() -> None:
    try:
        {}["absent"]
    except KeyError as error:
        raise ValueError("because of another") from error


def fail_far_away(to: str) -> None:
    bh.rpc_sync(to, fail_plainly)


def exit_the_program() -> None:
    raise SystemExit("no")


async def exit_the_program_in_coroutine() -> None:
    raise SystemExit("no")


def return_lock() -> Any:
    return {"fine": 1, "bad": [threading.Lock()]}


@bh.async_execution
def return_lock_later() -> bh.Future[Any]:
    return bh.rpc_async(bh.get_worker_info(), whoami).then(lambda _: return_lock())


async def return_lock_from_coroutine() -> Any:
    return return_lock()


# Calls that lead to others.


def bounce(names: list[str], depth: int) -> list[str]:
    """Call from one worker to the other and back, ``depth`` calls deep; who ran, outermost first."""
    here = bh.get_worker_info().name
    if depth == 0:
        return [here]
    there = names[(names.index(here) + 1) % len(names)]
    return [here, *bh.rpc_sync(there, bounce, args=(names, depth - 1))]


def bounce_by_future(names: list[str], depth: int) -> int:
    """The same with futures waited for."""
    here = bh.get_worker_info().name
    if depth == 0:
        return 0
    there = names[(names.index(here) + 1) % len(names)]
    return 1 + bh.rpc_async(there, bounce_by_future, args=(names, depth - 1)).wait()


@bh.async_execution
def bounce_by_callback(names: list[str], depth: int) -> bh.Future[int]:
    """The same with nobody waiting."""
    if depth == 0:
        done: bh.Future[int] = bh.Future()
        done.set_result(0)
        return done
    here = bh.get_worker_info().name
    there = names[(names.index(here) + 1) % len(names)]
    return bh.rpc_async(there, bounce_by_callback, args=(names, depth - 1)).then(lambda below: below.value() + 1)


async def bounce_by_await(names: list[str], depth: int) -> int:
    """The same with coroutines."""
    if depth == 0:
        return 0
    here = bh.get_worker_info().name
    there = names[(names.index(here) + 1) % len(names)]
    return 1 + await bh.rpc_async(there, bounce_by_await, args=(names, depth - 1))


@bh.async_execution
def add_through(to: str, x: Any, y: Any) -> bh.Future[Any]:
    return bh.rpc_async(to, torch.add, args=(x, y)).then(lambda done: done.value() + 1)


@bh.async_execution
def torch_future(value: Any) -> torch.futures.Future[Any]:
    """Any future of torch's will do."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


@bh.async_execution
def fail_through(to: str) -> bh.Future[Any]:
    return bh.rpc_async(to, fail_plainly)


@bh.async_execution
def fail_in_then(to: str) -> bh.Future[Any]:
    return bh.rpc_async(to, whoami).then(lambda done: raise_it(PlainError("in then", 9)))


@bh.async_execution
def no_future() -> int:
    return 1


@bh.async_execution
def raise_instead_of_future() -> bh.Future[Any]:
    raise PlainError("no future", 10)


async def gather(to: str, count: int) -> list[Any]:
    """Several calls at once from a coroutine."""
    return await asyncio.gather(*(bh.rpc_async(to, identity, args=(n,)) for n in range(count)))


async def fail_in_coroutine(to: str) -> None:
    await asyncio.sleep(0)
    await bh.rpc_async(to, fail_plainly)


async def rendezvous_of_coroutines(name: str, count: int) -> int:
    """Returns only when ``count`` coroutines of this worker are here at once."""
    here = _here.setdefault((bh.get_worker_info().name, name), [])
    mine = asyncio.get_running_loop().create_future()
    here.append(mine)
    if len(here) == count:
        for other in here:
            other.set_result(count)
    return await asyncio.wait_for(mine, PATIENCE)


_here: dict[tuple[str, str], list[asyncio.Future[int]]] = {}
_barriers: dict[str, threading.Barrier] = {}


def meet(name: str, count: int) -> int:
    """Returns only when ``count`` handlers are here at once."""
    _barriers.setdefault(name, threading.Barrier(count)).wait(PATIENCE)
    return count
