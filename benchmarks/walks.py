"""How many files a reader visits to follow one call and one backward pass.

The script starts two worker processes. It records which functions of the package Python calls, in which order, during
one warm ``bh.rpc_sync`` with a small tensor, and during one ``bh.backward`` over both workers.

    .venv/bin/python benchmarks/walks.py                    # the table
    .venv/bin/python benchmarks/walks.py --list call        # the table and one walk, indented

There are six walks:

- ``call``: the thread that calls ``bh.rpc_sync`` inside a ``bh.context``, until the call returns. The tensor requires
  a gradient, so both workers record the call for a backward pass.
- ``serve``: the threads of the other worker, from the request of that call until they wait again.
- ``backward``: the threads of the worker that calls ``bh.backward``.
- ``backward-there``: the threads of the other worker during that pass.
- ``plain-call``, ``plain-serve``: like ``call`` and ``serve``, but the tensor requires no gradient and there is no
  context.

Each walk has three counts:

- calls: how often Python entered a function of the package. A generator counts each time it is resumed.
  Comprehensions and generator expressions do not count: they are part of the function they stand in.
- files: how many files these functions stand in.
- hops: how many of the calls enter another file than the file of their caller. The caller is the Python frame directly
  below. A call from code outside the package (of the user, torch or the standard library) is a hop too.

Waits differ from one time to the next: a message may be there already, or it may come while the thread spins or sleeps.
So each walk is recorded many times. The table shows the walk that was seen most often, and how often that was.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import sys
import threading
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

import backhaul as bh

ROOT = os.path.dirname(bh.__file__) + os.sep
WALKS = ("call", "serve", "backward", "backward-there", "plain-call", "plain-serve")
_PAUSE_SECONDS = 0.0002  # after a call; the other worker waits for the next request then, and has not stopped to spin
_REST_SECONDS = 0.004  # before and after a pass; the threads of both workers sleep then
_WARM_UP = 50  # steps that are not recorded
_SKIPPED = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")

Step = tuple[str, str, int, bool]
"""One call of a walk: the callee's file and name, its depth on the stack, and whether it is a hop."""

Walk = tuple[Step, ...]

Event = tuple[float, int, Step]
"""A step with its time and its thread. The time is ``perf_counter``, which all processes share on Linux."""


@dataclass(frozen=True)
class Window:
    """When one recorded call or pass began, when it returned, and when both workers waited again."""

    begin: float
    returned: float
    end: float


Recorded = tuple[list[Window], list[Event], list[Event]]
"""The windows, and what this worker and the other one recorded."""

_recording = False
_events: list[Event] = []
_weight = torch.full((16,), 0.99, requires_grad=True)


def _profile(frame: FrameType, event: str, argument: Any) -> None:
    """Record a call of a function of the package."""
    if not _recording or event != "call":
        return
    code = frame.f_code
    if not code.co_filename.startswith(ROOT) or code.co_name in _SKIPPED:
        return
    now = time.perf_counter()
    caller = frame.f_back
    hop = caller is None or caller.f_code.co_filename != code.co_filename
    depth = 0
    while caller is not None:
        below = caller.f_code
        depth += below.co_filename.startswith(ROOT) and below.co_name not in _SKIPPED
        caller = caller.f_back
    _events.append((now, threading.get_ident(), (code.co_filename.removeprefix(ROOT), code.co_qualname, depth, hop)))


def begin() -> None:
    """Record from now on."""
    global _recording
    _events.clear()
    _recording = True


def end() -> list[Event]:
    """Stop recording; return what was recorded."""
    global _recording
    _recording = False
    return list(_events)


def multiply(x: torch.Tensor) -> torch.Tensor:
    """The smallest function with a gradient."""
    return x * _weight


def calls(grad: bool, repeat: int) -> list[Window]:
    """Make calls, one after the other, in one context if there are gradients."""
    x, windows = torch.ones(16, requires_grad=grad), []
    with bh.context() if grad else contextlib.nullcontext():
        for _ in range(repeat):
            start = time.perf_counter()
            bh.rpc_sync("worker1", torch.neg, args=(x,))
            returned = time.perf_counter()
            time.sleep(_PAUSE_SECONDS)
            windows.append(Window(start, returned, time.perf_counter()))
    return windows


def passes(repeat: int) -> list[Window]:
    """Run passes, each in its own context; the windows leave the forward part out."""
    x, windows = torch.ones(16, requires_grad=True), []
    for _ in range(repeat):
        with bh.context() as context:
            loss = bh.rpc_sync("worker1", multiply, args=(x,)).sum()
            time.sleep(_REST_SECONDS)
            start = time.perf_counter()
            bh.backward(context, [loss])
            returned = time.perf_counter()
            time.sleep(_REST_SECONDS)
            windows.append(Window(start, returned, time.perf_counter()))
    return windows


def record(walk: str, repeat: int) -> Recorded:
    """Record on both workers what belongs to one of the walks."""
    for count in (_WARM_UP, repeat):
        bh.rpc_sync("worker1", begin)
        begin()
        windows = passes(count) if walk == "backward" else calls(walk == "call", count)
        here = end()
        there = bh.rpc_sync("worker1", end)
    return windows, here, there


def cut(events: list[Event], start: float, until: float, thread: int | None = None) -> Walk:
    """The walk between two times: one thread after the other, in the order in which they began."""
    threads: dict[int, list[Step]] = {}
    for at, ident, step in events:
        if start <= at < until and thread in (None, ident):
            threads.setdefault(ident, []).append(step)
    walk: list[Step] = []
    for steps in threads.values():
        least = min(step[2] for step in steps)
        walk += [(file, name, depth - least, hop) for file, name, depth, hop in steps]
    return tuple(walk)


def main(repeat: int) -> dict[str, list[Walk]]:
    """What both workers run; worker 0 returns every walk, as often as it was recorded."""
    if bh.get_worker_info().id:
        return {}
    found: dict[str, list[Walk]] = {}
    for prefix in ("", "plain-"):
        windows, here, there = record(prefix + "call", repeat)
        found[prefix + "call"] = [cut(here, w.begin, w.returned, threading.get_ident()) for w in windows]
        found[prefix + "serve"] = [cut(there, w.begin, w.end) for w in windows]
    windows, here, there = record("backward", repeat)
    found["backward"] = [cut(here, w.begin, w.end) for w in windows]
    found["backward-there"] = [cut(there, w.begin, w.end) for w in windows]
    return found


def typical(walks: list[Walk]) -> tuple[Walk, int]:
    """The walk that was seen most often, the shortest of several such, and how often it was seen."""
    counts = collections.Counter(walks)
    often = max(counts.values())
    return min((walk for walk, count in counts.items() if count == often), key=len), often


def show(found: dict[str, list[Walk]], listed: list[str]) -> None:
    """Print the table, and the walks that were asked for."""
    print(f"{'walk':16}{'calls':>7}{'files':>7}{'hops':>7}   seen")
    for name in WALKS:
        walk, often = typical(found[name])
        files, hops = len({step[0] for step in walk}), sum(step[3] for step in walk)
        print(f"{name:16}{len(walk):7}{files:7}{hops:7}   {often} of {len(found[name])}")
    for name in listed:
        print(f"\n{name}: one line for each call, * for a hop")
        for file, function, depth, hop in typical(found[name])[0]:
            print(f"{'*' if hop else ' '} {'  ' * depth}{file}: {function}")


# Workers import this file before they start their threads.
threading.setprofile(_profile)
sys.setprofile(_profile)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="append", choices=WALKS, default=[], help="also print this walk")
    parser.add_argument("--repeat", type=int, default=100, help="how often to record each walk")
    options = parser.parse_args()
    show(bh.launch(main, 2, args=(options.repeat,))[0], options.list)
