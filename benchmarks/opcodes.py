"""Counts the Python that a small call runs: opcodes and calls of each function, on both sides. Unlike times, the
counts do not depend on the load of the machine. So they show what a change of the hot path has gained.

    .venv/bin/python benchmarks/opcodes.py hop --top 40
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

import backhaul as bh
from backhaul._autograd.backward import receiver

Function = tuple[str, str]
"""A function: its file and its name."""

Counts = tuple[dict[Function, int], dict[Function, int]]
"""The calls and the opcodes of each function."""

_counting = False
_calls: collections.Counter[Function] = collections.Counter()
_opcodes: collections.Counter[Function] = collections.Counter()
weight = torch.full((16,), 0.99, requires_grad=True)


def _trace(frame: FrameType, event: str, argument: Any) -> Any:
    if not _counting:
        return None
    code = frame.f_code
    key = code.co_filename, code.co_name
    if event == "call":
        _calls[key] += 1
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
    elif event == "opcode":
        _opcodes[key] += 1
    return _trace


def begin() -> None:
    """Begin to count."""
    global _counting
    _counting = True


def end() -> Counts:
    """Stop counting; return the counts."""
    global _counting
    _counting = False
    found = dict(_calls), dict(_opcodes)
    _calls.clear()
    _opcodes.clear()
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


def forward(backward: bool = False) -> None:
    """One hop in a context of its own."""
    x = torch.ones(16, requires_grad=True)
    with bh.context() as ctx:
        loss = bh.rpc_sync("worker1", multiply, args=(x,)).sum()
        if backward:
            bh.backward(ctx, [loss])


def one_hop() -> None:
    """Forward, backward and release."""
    forward(True)


def chain() -> None:
    """Sixteen hops between the two workers and back."""
    x = torch.ones(16, requires_grad=True)
    with bh.context() as ctx:
        loss = bh.rpc_sync("worker1", hop, args=(x, 16, "worker0", "worker1")).sum()
        bh.backward(ctx, [loss])


def plain_hop() -> None:
    """One hop outside contexts, forward and backward."""
    x = torch.ones(16, requires_grad=True)
    bh.rpc_sync("worker1", multiply, args=(x,)).sum().backward()


def plain_chain() -> None:
    """As ``chain``, outside contexts."""
    x = torch.ones(16, requires_grad=True)
    bh.rpc_sync("worker1", hop, args=(x, 16, "worker0", "worker1")).sum().backward()


def plain_fan() -> None:
    """As ``fan``, outside contexts."""
    x = torch.ones(16, requires_grad=True)
    calls = [bh.rpc_async("worker1", torch.mul, args=(x, float(n))) for n in range(100)]
    torch.stack(bh.wait_all(calls)).sum().backward()


def burst() -> None:
    """A hundred calls at once, without gradients."""
    x = torch.ones(16)
    bh.wait_all([bh.rpc_async("worker1", torch.neg, args=(x,)) for _ in range(100)])


def fan() -> None:
    """A hundred calls at once, and one backward."""
    x = torch.ones(16, requires_grad=True)
    with bh.context() as ctx:
        calls = [bh.rpc_async("worker1", torch.mul, args=(x, float(n))) for n in range(100)]
        bh.backward(ctx, [torch.stack(bh.wait_all(calls)).sum()])


CASES: dict[str, Callable[[], None]] = {
    "empty": empty,
    "echo": echo,
    "forward": forward,
    "hop": one_hop,
    "chain": chain,
    "burst": burst,
    "fan": fan,
    "plain-hop": plain_hop,
    "plain-chain": plain_chain,
    "plain-fan": plain_fan,
}


def main(case: str, repeat: int) -> list[Counts]:
    """What both workers run."""
    if bh.get_worker_info().id:
        return []
    for _ in range(repeat // 4 + 1):
        CASES[case]()
    bh.rpc_sync("worker1", begin)
    begin()
    for _ in range(repeat):
        CASES[case]()
    return [end(), bh.rpc_sync("worker1", end)]


def show(found: list[Counts], repeat: int, top: int) -> None:
    """Print the functions with the most opcodes."""
    for worker, (calls, opcodes) in enumerate(found):
        print(f"worker{worker}: {sum(opcodes.values()) / repeat:.0f} opcodes, {sum(calls.values()) / repeat:.0f} calls")
        for (file, name), count in sorted(opcodes.items(), key=lambda item: -item[1])[:top]:
            where = os.sep.join(file.split(os.sep)[-2:])
            print(f"  {count / repeat:8.1f} opcodes {calls.get((file, name), 0) / repeat:6.2f} calls  {where}: {name}")


receiver.SHARE_OUT_SECONDS = 60.0  # counting makes everything slow; gradients stay on their thread nevertheless
threading.settrace(_trace)
sys.settrace(_trace)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("case", choices=tuple(CASES))
    parser.add_argument("--top", type=int, default=20, help="functions to show")
    parser.add_argument("--repeat", type=int, default=100)
    options = parser.parse_args()
    show(bh.launch(main, 2, args=(options.case, options.repeat))[0], options.repeat, options.top)
