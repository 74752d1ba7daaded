"""Backward passes, side by side with ``torch.distributed.autograd``: one run, alternating.

    make bench
    .venv/bin/python benchmarks/backward.py --quick

A chain of k hops is a call that calls on k times, back and forth between two workers, each hop multiplying by a
weight; n sends are n calls of the driver to one worker. Each measurement is a whole step: forward, backward and, in a
context, its release.
The reference gets 64 threads a worker: with its default of 16, chains of more than 32 hops never end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.rpc as reference
from harness import OURS, PLAIN, SYSTEMS, THEIRS, Row, System, conduct, options_of, play, report

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


def chain(system: System, hops: int, backward: bool = True) -> None:
    """A chain of hops and its gradients."""
    x = torch.ones(16, requires_grad=True)
    with system.context() as ctx:
        step = reference_hop if system.name == THEIRS else hop
        loss = system.call("worker1", step, args=(x, hops, "worker2", "worker1")).sum()
        if backward:
            system.backward(ctx, [loss])


def fan(system: System, count: int) -> None:
    """Many sends to one worker in one context."""
    x = torch.ones(16, requires_grad=True)
    with system.context() as ctx:
        calls = [system.start("worker1", torch.mul, args=(x, float(n))) for n in range(count)]
        system.backward(ctx, [torch.stack(list(system.wait(calls))).sum()])


def rows(quick: bool, name: str) -> list[Row]:
    """All rows."""
    scale, system = 4 if quick else 1, SYSTEMS[name]

    def row(name: str, what: Callable[..., None], size: int, calls: int, **options: Any) -> Row:
        return Row(name, functools.partial(what, system, size, **options), max(calls // scale, 2), 6)

    found = [row("1 hop, forward and backward", chain, 1, 60)]
    for hops, calls in ((4, 30), (16, 12), (64, 4)):
        found.append(row(f"chain of {hops} hops, forward and backward", chain, hops, calls))
    found.append(row("chain of 16 hops, forward only", chain, 16, 12, backward=False))
    for sends, calls in ((10, 20), (100, 6), (1000, 2)):
        found.append(row(f"{sends} sends to one worker", fan, sends, calls))
    return found


def main() -> None:
    """Measure and print."""
    options = options_of(__doc__)
    if not play(functools.partial(rows, options.quick), 3, options, threads=64):
        report(f"Backward ({options.transport})", f"backward-{options.transport}", conduct(PLAIN, OURS, THEIRS))


if __name__ == "__main__":
    main()
