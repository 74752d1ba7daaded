"""Whole steps over several workers, side by side with ``torch.distributed.autograd``: one run, alternating.

    make bench
    .venv/bin/python benchmarks/steps.py --quick

100 parallel calls to 3 workers and one backward; activations of 64 MiB through 3 workers and back; a training step
of the model of ``make run``; and how long 32 workers take to start and stop. The second and third also in one process:
less than that no system can take.
"""

from __future__ import annotations

import functools
import multiprocessing
import pathlib
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed.autograd as reference_autograd
import torch.distributed.rpc as reference
from harness import OURS, SYSTEMS, Row, System, conduct, free_port, join_reference, options_of, play, report

import backhaul as bh

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
import train_transformer as model

WORKERS = ("worker1", "worker2", "worker3")
ACTIVATIONS = "64 MiB activations through 3 workers and back"
COPIES = 4 * len(WORKERS)  # of the activations: there and back, forward and backward
held: dict[str, Any] = {}


def fan(system: System) -> None:
    """100 calls at once to three workers, one backward."""
    x = torch.ones(16, requires_grad=True)
    with system.context() as ctx:
        calls = [system.start(WORKERS[n % 3], torch.mul, args=(x, float(n))) for n in range(100)]
        system.backward(ctx, [torch.stack(list(system.wait(calls))).sum()])


def pass_on(x: torch.Tensor) -> torch.Tensor:
    """Barely any work on a large activation."""
    return x * 1.5


def activations(system: System) -> None:
    """64 MiB through three workers, and gradients of that size back."""
    x = torch.ones(1 << 24, requires_grad=True)
    with system.context() as ctx:
        y = x
        for name in WORKERS:
            y = system.call(name, pass_on, args=(y,))
        system.backward(ctx, [(y * y).sum()])


def build(kind: str, letters: int, seed: int) -> None:
    """This worker's part of the model."""
    held["part"] = model.make_part(kind, letters, seed)
    held["optimizer"] = torch.optim.AdamW(held["part"].parameters(), lr=1e-4)


def forward(*args: torch.Tensor) -> torch.Tensor:
    """Run it."""
    return held["part"](*args)


def apply(gradients: Any, context: int) -> None:
    """Step its optimizer."""
    found = gradients(context)
    for parameter in held["part"].parameters():
        parameter.grad = found.get(parameter)
    held["optimizer"].step()


def apply_ours(context: int) -> None:
    """``apply`` for Backhaul."""
    apply(bh.get_gradients, context)


def apply_theirs(context: int) -> None:
    """``apply`` for the reference."""
    apply(reference_autograd.get_gradients, context)


def train(system: System, step: Any, tokens: torch.Tensor, targets: torch.Tensor) -> None:
    """One training step of the model over three workers."""
    with system.context() as ctx:
        x = tokens
        for name in WORKERS[:-1]:
            x = system.call(name, forward, args=(x,))
        loss = system.call(WORKERS[-1], forward, args=(x, targets))
        system.backward(ctx, [loss])
        number = ctx.id if isinstance(ctx, bh.ContextHandle) else ctx
        system.wait([system.start(name, step, args=(number,)) for name in WORKERS])


def rows(quick: bool, name: str) -> list[Row]:
    """All rows."""
    scale, system = 4 if quick else 1, SYSTEMS[name]
    corpus = model.Corpus(model.make_text(200))
    letters, batch = len(corpus.letters), corpus.batch(0)
    for seed, (worker, kind) in enumerate(zip(WORKERS, ("embedding", "body", "head"), strict=True)):
        system.call(worker, build, args=(kind, letters, seed))
    step = apply_ours if name == OURS else apply_theirs

    def row(name: str, function: Any, calls: int, *args: Any) -> Row:
        return Row(name, functools.partial(function, system, *args), max(calls // scale, 2), 6)

    return [
        row("100 parallel calls to 3 workers, one backward", fan, 8),
        row(ACTIVATIONS, activations, 2),
        row("training step of make run's model", train, 20, step, *batch),
    ]


def in_one_process(steps: int) -> float:
    """A training step of the same model without workers, in seconds."""
    corpus = model.Corpus(model.make_text(200))
    tokens, targets = corpus.batch(0)
    parts = [model.make_part(kind, len(corpus.letters), n) for n, kind in enumerate(("embedding", "body", "head"))]
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-4)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        x = tokens
        for part in parts[:-1]:
            x = part(x)
        parts[-1](x, targets).backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[steps // 4 :])


def activations_alone(steps: int = 8) -> tuple[float, float]:
    """The computation of ``activations`` without workers, and the copies without which no tensor gets from one process
    to another, into memory that is in use; in seconds.
    """
    target, computing, copying = torch.ones(1 << 24), [], []
    for _ in range(steps):
        start = time.perf_counter()
        y = x = torch.ones(1 << 24, requires_grad=True)
        for _ in WORKERS:
            y = pass_on(y)
        (y * y).sum().backward()
        computed = time.perf_counter()
        for _ in range(COPIES):
            target.copy_(x.detach())
        computing.append(computed - start)
        copying.append(time.perf_counter() - computed)
    return statistics.median(computing), statistics.median(copying)


# Start and stop, in processes that have imported everything.


def greet() -> None:
    """A call that says that a worker is there."""


def live(system: str, place: tuple[int, int, int], together: Any, times: Any) -> None:
    """One worker's life: become a cluster with the others, greet the first, end it."""
    rank, count, port = place
    together.wait()
    start = time.perf_counter()
    if system == "ours":
        store = torch.distributed.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
        bh.init(f"worker{rank}", rank=rank, world_size=count, store=store)
        bh.rpc_sync("worker0", greet)
        bh.shutdown()
    else:
        join_reference(f"worker{rank}", rank, count, port)
        reference.rpc_sync("worker0", greet)
        reference.shutdown()
    times.put(time.perf_counter() - start)


def lives(count: int, rounds: int) -> tuple[float, float]:
    """How long the slowest of ``count`` workers takes to start, greet and stop: medians of ours and theirs."""
    found: dict[str, list[float]] = {"ours": [], "theirs": []}
    fork = multiprocessing.get_context("fork")  # nothing runs in this process yet
    for _ in range(rounds):
        for system, times in found.items():
            together, queue, port = fork.Barrier(count), fork.Queue(), free_port()
            processes = [
                fork.Process(target=live, args=(system, (rank, count, port), together, queue)) for rank in range(count)
            ]
            for process in processes:
                process.start()
            times.append(max(queue.get(timeout=120) for _ in processes))
            for process in processes:
                process.join()
    return statistics.median(found["ours"]), statistics.median(found["theirs"])


def main() -> None:
    """Measure and print."""
    options = options_of(__doc__)
    if play(functools.partial(rows, options.quick), 4, options, threads=64):
        return
    count = 8 if options.quick else 32
    started = lives(count, 1 if options.quick else 3)
    numbers = conduct()
    numbers[f"start and stop of {count} workers"] = started
    report(f"Steps ({options.transport})", f"steps-{options.transport}", numbers)
    computing, copying = activations_alone()
    shares = [(computing + copying) / time_ for time_ in numbers[ACTIVATIONS]]
    print(f"The activations in one process: {computing * 1e3:.0f} ms, {COPIES} copies of them: {copying * 1e3:.0f} ms")
    print(f"Together {shares[0]:.0%} of what Backhaul took, {shares[1]:.0%} of what the reference did")
    alone = in_one_process(40)
    print(f"The training step in one process: {alone * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
