"""Backward passes, side by side with ``torch.distributed.autograd``: one run, the same processes, alternating.

    make bench
    .venv/bin/python benchmarks/backward.py --quick

A chain of k hops is a call that calls on k times, back and forth between two workers, each hop multiplying by a
weight; n sends are n calls of the driver to one worker. Each measurement is a whole context: forward, backward,
release.
The reference gets 64 threads a worker: with its default of 16, chains of more than 32 hops never end.
"""

from __future__ import annotations

import argparse
import functools

import torch
import torch.distributed.autograd as reference_autograd
import torch.distributed.rpc as reference
from harness import Row, free_port, report, side_by_side

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


def chain(hops: int, backward: bool = True) -> None:
    """A chain of hops and its gradients."""
    x = torch.ones(16, requires_grad=True)
    with bh.context() as ctx:
        loss = bh.rpc_sync("worker1", hop, args=(x, hops, "worker2", "worker1")).sum()
        if backward:
            bh.backward(ctx, [loss])


def reference_chain(hops: int, backward: bool = True) -> None:
    """The same through the reference."""
    x = torch.ones(16, requires_grad=True)
    with reference_autograd.context() as ctx:
        loss = reference.rpc_sync("worker1", reference_hop, args=(x, hops, "worker2", "worker1")).sum()
        if backward:
            reference_autograd.backward(ctx, [loss])


def fan(count: int) -> None:
    """Many sends to one worker in one context."""
    x = torch.ones(16, requires_grad=True)
    with bh.context() as ctx:
        calls = [bh.rpc_async("worker1", torch.mul, args=(x, float(n))) for n in range(count)]
        bh.backward(ctx, [torch.stack(bh.wait_all(calls)).sum()])


def reference_fan(count: int) -> None:
    """The same through the reference."""
    x = torch.ones(16, requires_grad=True)
    with reference_autograd.context() as ctx:
        calls = [reference.rpc_async("worker1", torch.mul, args=(x, float(n))) for n in range(count)]
        reference_autograd.backward(ctx, [torch.stack(torch.futures.wait_all(calls)).sum()])


def rows(quick: bool) -> list[Row]:
    """All rows."""
    scale = 4 if quick else 1

    def row(name: str, ours: object, theirs: object, size: int, calls: int) -> Row:
        return Row(name, functools.partial(ours, size), functools.partial(theirs, size), max(calls // scale, 2), 6)

    found = [row("1 hop, forward and backward", chain, reference_chain, 1, 60)]
    for hops, calls in ((4, 30), (16, 12), (64, 4)):
        found.append(row(f"chain of {hops} hops, forward and backward", chain, reference_chain, hops, calls))
    forward = functools.partial(chain, backward=False)
    found.append(
        row("chain of 16 hops, forward only", forward, functools.partial(reference_chain, backward=False), 16, 12)
    )
    for sends, calls in ((10, 20), (100, 6), (1000, 2)):
        found.append(row(f"{sends} sends to one worker", fan, reference_fan, sends, calls))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--transport", choices=("auto", "unix", "tcp"), default="auto")
    options = parser.parse_args()
    numbers = bh.launch(
        side_by_side,
        3,
        args=(functools.partial(rows, options.quick), free_port(), 64),
        options=bh.Options(transport=options.transport),
    )[0]
    report(f"Backward ({options.transport})", f"backward-{options.transport}", numbers)


if __name__ == "__main__":
    main()
