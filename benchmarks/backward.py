"""Backward passes over chains of calls and over many calls to one worker.

A chain of k hops is a call that calls on k times, back and forth between two workers, each hop multiplying by a
weight; n sends are n calls of the driver to one worker. Each measurement is a whole step: forward, backward and, in a
context, its release.
The reference gets 64 threads a worker: with its default of 16, chains of more than 32 hops never end.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed.rpc as reference
from harness import THEIRS, Row, Suite
from systems import SYSTEMS, System, join

import backhaul as bh

weight = torch.full((16,), 0.99, requires_grad=True)


def hop(x: torch.Tensor, left: int, to: str, back: str) -> torch.Tensor:
    """One hop of a chain, through Backhaul."""
    y = x * weight
    return y if left == 1 else bh.rpc_sync(to, hop, args=(y, left - 1, back, to))


def reference_hop(x: torch.Tensor, left: int, to: str, back: str) -> torch.Tensor:
    """The same through the reference."""
    y = x * weight
    return y if left == 1 else reference.rpc_sync(to, reference_hop, args=(y, left - 1, back, to))


def chain(system: System, hops: int, backward: bool) -> None:
    """A chain of hops and its gradients."""
    x = torch.ones(16, requires_grad=True)
    with system.context() as ctx:
        step = reference_hop if system.name == THEIRS else hop
        loss = system.call("worker1", step, args=(x, hops, "worker2", "worker1")).sum()
        if backward:
            system.backward(ctx, [loss])


def sends(system: System, count: int) -> None:
    """Many sends to one worker in one context."""
    x = torch.ones(16, requires_grad=True)
    with system.context() as ctx:
        calls = [system.start("worker1", torch.mul, args=(x, float(n))) for n in range(count)]
        system.backward(ctx, [torch.stack(list(system.wait(calls))).sum()])


def rows(name: str) -> list[Row]:
    """All rows of a system."""
    system = SYSTEMS[name]
    found = [
        Row(
            "1 hop, forward and backward" if hops == 1 else f"chain of {hops} hops, forward and backward",
            lambda hops=hops: functools.partial(chain, system, hops, True),
        )
        for hops in (1, 4, 16, 64)
    ]
    found.append(Row("chain of 16 hops, forward only", lambda: functools.partial(chain, system, 16, False)))
    found += [
        Row(f"{count:,} sends to one worker", lambda count=count: functools.partial(sends, system, count))
        for count in (10, 100, 1000)
    ]
    return found


def suite(transport: str) -> Suite:
    """All rows, on three workers."""
    return Suite(["worker0", "worker1", "worker2"], rows, functools.partial(join, transport, 64))
