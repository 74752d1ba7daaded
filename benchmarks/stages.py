"""Shows where the time of a small call goes: timestamps at each stage, on both sides.

    .venv/bin/python benchmarks/stages.py empty
    .venv/bin/python benchmarks/stages.py hop
    .venv/bin/python benchmarks/stages.py chain --hops 4 --one

Wraps methods of Backhaul to note when they begin (>) and end (<). That costs one or two microseconds each. The clocks
of processes on one host agree. Prints the medians of the most frequent sequence of stages. ``--one`` prints a single
run, the one of median length, with the thread of each stage.
"""

from __future__ import annotations

import argparse
import collections
import functools
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

import backhaul as bh
from backhaul._autograd.backward import context_release, engine, leaves, outbox, pass_ledger, ready_groups, receiver
from backhaul._rpc import futures
from backhaul._rpc.calls import client, pending_call, request_encoder, server
from backhaul._transport.sockets import channel, endpoint
from backhaul._worker import thread_pool

STAGES: list[tuple[type, str]] = [
    (client.CallClient, "call"),
    (request_encoder.RequestEncoder, "encode"),
    (pending_call.Pending, "read"),
    (pending_call.SyncCall, "settle"),
    (futures.Future, "wait"),
    (server.CallServer, "_run"),
    (server.CallServer, "_decode"),
    (server.CallServer, "_reply"),
    (channel.SocketChannel, "send"),
    (channel.SocketChannel, "flush"),
    (channel.SocketChannel, "_read"),
    (endpoint.SocketEndpoint, "wake"),
    (thread_pool.ThreadPool, "submit"),
    (engine.Engine, "backward"),
    (receiver.GradientReceiver, "_take_gradients"),
    (receiver.GradientReceiver, "local_pass_of"),
    (outbox.GradientOutbox, "put"),
    (pass_ledger.PassLedger, "account"),
    (context_release.ContextRelease, "release"),
    (ready_groups.ReadyGroups, "arrive"),
    (leaves.Leaves, "compute"),
]

Stamp = tuple[int, str, int]
"""The time of a stage, its name, and its thread."""

_stamps: list[Stamp] = []
weight = torch.full((16,), 0.99, requires_grad=True)


def mark(label: str) -> None:
    """Note that something happens now."""
    _stamps.append((time.perf_counter_ns(), label, threading.get_native_id()))


def watch(owner: type, name: str) -> None:
    """Note when a method begins and ends. A read that found nothing is left out."""
    method: Callable[..., Any] = getattr(owner, name)
    label = f"{owner.__name__}.{name}"

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        mark(label + " >")
        length = len(_stamps)
        found = method(*args, **kwargs)
        if found is None and name == "_read":
            del _stamps[length - 1]
        else:
            mark(label + " <")
        return found

    setattr(owner, name, staticmethod(wrapped) if isinstance(vars(owner)[name], staticmethod) else wrapped)


for _owner, _name in STAGES:
    watch(_owner, _name)


def take() -> list[Stamp]:
    """The stamps of this worker since the last call."""
    found = list(_stamps)
    _stamps.clear()
    return found


def multiply(x: torch.Tensor) -> torch.Tensor:
    """The smallest thing worth a gradient."""
    return x * weight


def hop(x: torch.Tensor, left: int, to: str, back: str) -> torch.Tensor:
    """One hop of a chain."""
    y = x * weight
    return y if left == 1 else bh.rpc_sync(to, hop, args=(y, left - 1, back, to))


def empty() -> None:
    """A call without anything."""
    bh.rpc_sync("worker1", time.time)


def echo() -> None:
    """A call with a small tensor."""
    bh.rpc_sync("worker1", torch.neg, args=(torch.ones(16),))


def one_hop() -> None:
    """Forward, backward and release."""
    x = torch.ones(16, requires_grad=True)
    with bh.context() as ctx:
        loss = bh.rpc_sync("worker1", multiply, args=(x,)).sum()
        mark("forward is over")
        bh.backward(ctx, [loss])


def chain(hops: int, backward: bool) -> None:
    """Back and forth between two workers."""
    x = torch.ones(16, requires_grad=True)
    with bh.context() as ctx:
        loss = bh.rpc_sync("worker1", hop, args=(x, hops, "worker2", "worker1")).sum()
        mark("forward is over")
        if backward:
            bh.backward(ctx, [loss])


def measure(case: Callable[[], None], repeat: int) -> list[list[tuple[int, str, str]]]:
    """The stamps of each run, in the order of time: nanoseconds from its start, what, and where."""
    others = [info.name for info in bh.get_worker_infos() if info.id]
    for _ in range(repeat // 2 + 1):
        case()
    for name in others:
        bh.rpc_sync(name, take)
    take()
    for _ in range(repeat):
        mark("START")
        case()
        mark("END")
    noted = {"worker0": take()} | {name: bh.rpc_sync(name, take) for name in others}
    everything = sorted(
        (when, what, f"{name}/{threads.setdefault(thread, len(threads) + 1)}")
        for name, stamps in noted.items()
        for threads in [dict[int, int]()]
        for when, what, thread in stamps
    )
    found: list[list[tuple[int, str, str]]] = []
    for when, what, where in everything:
        if what == "START":
            found.append([])
            start = when
        if found:
            found[-1].append((when - start, what, where))
    return found


def show(found: list[list[tuple[int, str, str]]], one: bool) -> None:
    """Print a timeline."""
    courses: dict[tuple[tuple[str, str], ...], list[list[int]]] = collections.defaultdict(list)
    for stamps in found:
        names = tuple((what, where if one else where.partition("/")[0]) for _, what, where in stamps)
        courses[names].append([when for when, _, _ in stamps])
    if one:
        names, times = sorted(((n, t) for n, several in courses.items() for t in several), key=lambda x: x[1][-1])[
            len(found) // 2
        ]
        print(f"one of {len(found)} runs, of median length")
        runs_shown = [times]
    else:
        names, runs_shown = max(courses.items(), key=lambda item: len(item[1]))
        print(f"medians of {len(runs_shown)} runs of {len(found)} that went the same way")
    before = [0] * len(runs_shown)
    for place, (what, where) in enumerate(names):
        at = statistics.median(times[place] for times in runs_shown) / 1000
        step = statistics.median(times[place] - b for times, b in zip(runs_shown, before, strict=True)) / 1000
        before = [times[place] for times in runs_shown]
        column = 12 * int(where.partition("/")[0].removeprefix("worker"))
        print(f"{at:9.0f} {step:+7.0f}  {' ' * column}{where}: {what}")


def main(case: str, hops: int, repeat: int) -> list[list[tuple[int, str, str]]]:
    """What every worker runs."""
    if bh.get_worker_info().id:
        return []
    cases: dict[str, Callable[[], None]] = {
        "empty": empty,
        "echo": echo,
        "hop": one_hop,
        "chain": functools.partial(chain, hops, True),
        "forward": functools.partial(chain, hops, False),
    }
    return measure(cases[case], repeat)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("case", choices=("empty", "echo", "hop", "chain", "forward"))
    parser.add_argument("--hops", type=int, default=4, help="of a chain")
    parser.add_argument("--repeat", type=int, default=400)
    parser.add_argument("--one", action="store_true", help="show one run, with threads")
    options = parser.parse_args()
    show(bh.launch(main, 3, args=(options.case, options.hops, options.repeat))[0], options.one)
