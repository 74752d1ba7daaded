"""Calls: the smallest ones, large tensors, and calls as programs make them.

A *hop* is a call, a backward pass through it and the release of its context. A *cold* call comes after about a
millisecond of other work in the caller, an LSTM and some Python, which is not counted. In a loop of calls the code of
the calls stays in the caches of the processor; in a program it does not.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import OURS, PLAIN, Numbers, Row, Suite
from report import show
from systems import SYSTEMS, System, join

CALLEE = "worker1"
LARGE_ECHO = "64 MiB echo"
BESIDE, ALONE = "16-float echo beside 64 MiB echoes", "16-float echo every millisecond"


def nothing() -> None:
    """The empty call."""


def echo(value: Any) -> Any:
    """Send it back."""
    return value


class Scale(torch.nn.Module):
    """The smallest module worth a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((16,), 0.99))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def run_module(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Runs on the owner of the RRef that it gets."""
    return module.local_value()(x)


def first_of(values: Any) -> torch.Tensor:
    """Takes tensors in a tuple or a dict."""
    x, y = values.values() if isinstance(values, dict) else values
    return x * y


# How programs make calls. Each takes a system, a remote module and a tensor, and returns the result of the call.


def with_rref(system: System, module: Any, x: torch.Tensor) -> torch.Tensor:
    return system.call(CALLEE, run_module, args=(module.get_module_rref(), x))


def through_proxy(system: System, module: Any, x: torch.Tensor) -> torch.Tensor:
    return module.get_module_rref().rpc_sync().forward(x)


def through_remote_proxy(system: System, module: Any, x: torch.Tensor) -> torch.Tensor:
    return module.get_module_rref().remote().forward(x).to_here()


def through_module(system: System, module: Any, x: torch.Tensor) -> torch.Tensor:
    return module.forward(x)


def with_tuple(system: System, module: Any, x: torch.Tensor) -> torch.Tensor:
    return system.call(CALLEE, first_of, args=((x, x),))


def with_dict(system: System, module: Any, x: torch.Tensor) -> torch.Tensor:
    return system.call(CALLEE, first_of, args=({"x": x, "y": x},))


def started(system: System, module: Any, x: torch.Tensor) -> torch.Tensor:
    return system.start(CALLEE, echo, args=(x,)).wait()


Way = Callable[[System, Any, torch.Tensor], torch.Tensor]

WAYS: dict[str, Way] = {
    "RRef argument": with_rref,
    "rref.rpc_sync().method": through_proxy,
    "rref.remote().method, to_here()": through_remote_proxy,
    "RemoteModule forward": through_module,
    "tuple of tensors": with_tuple,
    "dict of tensors": with_dict,
    "rpc_async().wait()": started,
}
STEPPED = ("RRef argument", "RemoteModule forward")


def call_once(system: System, way: Way) -> Callable[[], Any]:
    """A call without gradients."""
    module, x = system.remote_module(CALLEE, Scale), torch.ones(16)
    return functools.partial(no_gradients, way, system, module, x)


def no_gradients(way: Way, system: System, module: Any, x: torch.Tensor) -> torch.Tensor:
    """Systems that record calls outside contexts do not record this one."""
    with torch.no_grad():
        return way(system, module, x)


def hop(system: System, way: Way, stepped: bool) -> Callable[[], Any]:
    """A call, its gradients, and perhaps a step of an optimizer."""
    module, x = system.remote_module(CALLEE, Scale), torch.ones(16, requires_grad=True)
    optimizer = system.optimizer(module) if stepped else None

    def step() -> None:
        with system.context() as context:
            loss = way(system, module, x).sum()
            system.backward(context, [loss])
            if optimizer is not None:
                optimizer.step(context)

    return step


# What comes before a cold call.

_lstm, _sentence = torch.nn.LSTM(32, 64, 2), torch.ones(12, 4, 32)


def other_work() -> None:
    """About a millisecond of what a program does between calls: torch, and Python."""
    with torch.no_grad():
        _lstm(_sentence)
    json.dumps({number: str(number) for number in range(400)})


# A large transfer beside small calls.


@contextlib.contextmanager
def large_echoes(system: System) -> Iterator[None]:
    """Another thread echoes 64 MiB to the same worker all the time."""
    value, over = torch.ones(1 << 24), threading.Event()

    def keep_busy() -> None:
        while not over.is_set():
            system.call(CALLEE, echo, args=(value,))

    thread = threading.Thread(target=keep_busy)
    thread.start()
    yield
    over.set()
    thread.join()


def rows(name: str) -> list[Row]:
    """All rows of a system."""
    system = SYSTEMS[name]

    def sized(elements: int) -> Callable[[], Callable[[], Any]]:
        return lambda: functools.partial(system.call, CALLEE, echo, args=(torch.ones(elements),))

    def many(count: int) -> None:
        value = torch.ones(16)
        system.wait([system.start(CALLEE, echo, args=(value,)) for _ in range(count)])

    found = []
    if name != PLAIN:
        found += [
            Row("empty call", lambda: functools.partial(system.call, CALLEE, nothing)),
            Row("16-float echo", sized(16)),
            Row("16-float echo, cold", sized(16), before=other_work),
            Row("64 KiB echo", sized(1 << 14)),
            Row("1 MiB echo", sized(1 << 18)),
            Row("16 MiB echo", sized(1 << 22)),
            Row(LARGE_ECHO, sized(1 << 24)),
            Row("2,000 async 16-float calls, per call", lambda: functools.partial(many, 2000), per=2000),
            Row(ALONE, sized(16), before=lambda: time.sleep(0.001), tail=True),
            Row(
                BESIDE,
                sized(16),
                before=lambda: time.sleep(0.001),
                around=functools.partial(large_echoes, system),
                tail=True,
            ),
        ]
        for what, way in WAYS.items():
            make = functools.partial(call_once, system, way)
            found += [Row(what, make), Row(f"{what}, cold", make, before=other_work)]
    for stepped in (False, True):
        for what in STEPPED if stepped else WAYS:
            make = functools.partial(hop, system, WAYS[what], stepped)
            title = f"hop and optimizer step: {what}" if stepped else f"hop: {what}"
            found += [Row(title, make), Row(f"{title}, cold", make, before=other_work)]
    return found


def suite(transport: str) -> Suite:
    """All rows, on two workers."""
    return Suite(["worker0", CALLEE], rows, functools.partial(join, transport, 16))


# What there is to win at most.


def raw_echo(count: int = 2000) -> float:
    """Seconds that a byte needs to another process and back, over a Unix socket, from Python."""
    here, there = socket.socketpair()
    child = os.fork()
    if child == 0:
        while data := there.recv(1):
            there.send(data)
            if data == b"e":
                os._exit(0)
    times = []
    for _ in range(count):
        start = time.perf_counter()
        here.send(b"x")
        here.recv(1)
        times.append(time.perf_counter() - start)
    here.send(b"e")
    os.waitpid(child, 0)
    return statistics.median(times)


def copy_speed(count: int = 20) -> float:
    """Bytes per second that this machine copies, 64 MiB at a time."""
    source, target = torch.ones(1 << 24), torch.ones(1 << 24)
    times = []
    for _ in range(count):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return source.nbytes / statistics.median(times)


def floors(numbers: Numbers) -> list[str]:
    """Sentences about the rows that were measured."""
    found = []
    if "empty call" in numbers:
        found.append(f"A byte over a bare Unix socket and back: {show(raw_echo())}.")
    if LARGE_ECHO in numbers:
        speed, large = copy_speed(), 2 * (64 << 20) / numbers[LARGE_ECHO][OURS].wall
        share = f"{large / 2**30:.1f} GiB/s, {large / speed:.0%} of that"
        found.append(f"memcpy: {speed / 2**30:.1f} GiB/s; Backhaul's 64 MiB echo: {share}.")
    for name in (ALONE, BESIDE):
        for system, cost in numbers.get(name, {}).items():
            times = sorted(cost.all_wall)
            tail = f"99 % within {show(times[int(len(times) * 0.99)])}, worst {show(times[-1])}"
            found.append(f"{name}, {system}: median {show(cost.wall)}, {tail}; {len(times)} calls.")
    return found
