"""Runs many steps outside contexts over worker processes, and shows that their memory stays flat.

``python -m tools.lifetimes --count 20000`` runs forwards without backward, then whole steps, and prints for each worker
its resident memory and its send records.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch

from backhaul._options import Options
from backhaul._rpc.api import rpc_sync
from backhaul._worker.worker import current_worker
from tools.fleet import Fleet

_SETTLE_SECONDS = 10.0
_ELEMENTS = 1000


class Weights:
    """The parameter of a worker process."""

    tensor: torch.Tensor | None = None


def apply(x: torch.Tensor) -> torch.Tensor:
    """Apply this worker's weight."""
    if Weights.tensor is None:
        Weights.tensor = torch.full((_ELEMENTS,), 0.5, requires_grad=True)
    return torch.tanh(x * Weights.tensor)


def pass_on(x: torch.Tensor, to: str) -> torch.Tensor:
    """A nested call."""
    return rpc_sync(to, apply, args=(x * 1.0,)) + apply(x)


def tracked() -> int:
    """How many messages are part of a graph of this process."""
    from backhaul._autograd.forward import functions

    return len(functions.live)


def forward(x: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
    """A call that makes another call."""
    return rpc_sync(names[0], pass_on, args=(x, names[1])).sum()


def table_sizes() -> dict[str, int]:
    """What this worker keeps of graphs outside contexts."""
    from backhaul._autograd.backward.engine import Engine

    worker = current_worker()
    graph = worker.part(Engine).container.plain
    return {
        "records": worker.counters["num_plain_records"](),
        "receiving ends": tracked(),
        "indexed": len(graph.sources),
        "passes": len(graph.runs),
        "aborted": len(graph.aborted),
    }


def measure(fleet: Fleet) -> dict[str, tuple[int, dict[str, int]]]:
    """The resident memory and table sizes of each worker, once what is dropped has been told."""
    names = fleet.names
    end = time.monotonic() + _SETTLE_SECONDS
    while True:
        sizes = {"driver": table_sizes(), **{name: rpc_sync(name, table_sizes) for name in names}}
        if not any(each["records"] for each in sizes.values()) or time.monotonic() > end:
            exams = fleet.exams(thorough=True)
            return {name: (exams[name].rss, each) for name, each in sizes.items()}
        time.sleep(0.01)


def run(fleet: Fleet, count: int, every: int, report: Callable[[str], object]) -> None:
    """Run ``count`` forwards without backward, then ``count`` steps."""
    x = torch.ones(_ELEMENTS, requires_grad=True)
    with fleet.worker:
        for kind in ("forwards", "steps"):
            for done in range(1, count + 1):
                loss = forward(x, fleet.names)
                if kind == "steps":
                    loss.backward()
                    x.grad = None
                del loss
                if not done % every:
                    for name, (rss, sizes) in measure(fleet).items():
                        report(f"{kind} {done:>6}  {name:<8} {rss / 2**20:8.1f} MiB  {sizes}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tools.lifetimes", description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=2_000)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with Fleet(2, Options()) as fleet:
        run(fleet, given.count, given.every, lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
