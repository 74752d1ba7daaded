"""Whole steps over several workers.

100 parallel calls to 3 workers and one backward; activations of 64 MiB through 3 workers and back; a training step of
the model of ``make run``; 64 MiB to 3 workers at once; and how long 32 workers take to start and stop. The second and
third also in one process: less than that no system can take.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pathlib
import secrets
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.autograd as reference_autograd
import torch.distributed.rpc as reference
from harness import OURS, PLAIN, THEIRS, Cost, Numbers, Row, Suite, free_port
from report import show
from systems import SYSTEMS, System, join
from torch.distributed.rendezvous import rendezvous

import backhaul as bh

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
import train_transformer as model

WORKERS = ("worker1", "worker2", "worker3")
ACTIVATIONS = "64 MiB activations through 3 workers and back"
TRAINING = "training step of make run's model"
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


def take(x: torch.Tensor) -> float:
    """Reads a little of a large tensor."""
    return x[-1].item()


def broadcast(system: System, x: torch.Tensor) -> None:
    """One tensor to three workers; the reference has only calls for that."""
    if system.name == THEIRS:
        system.wait([system.start(name, take, args=(x,)) for name in WORKERS])
    else:
        bh.group(WORKERS).call(take, (x,))


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


def apply_plain(context: None) -> None:
    """``apply`` after ``loss.backward()``."""
    held["optimizer"].step()
    held["optimizer"].zero_grad()


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


def training(system: System) -> Callable[[], Any]:
    """Build the parts of the model on the workers."""
    corpus = model.Corpus(model.make_text(200))
    letters, batch = len(corpus.letters), corpus.batch(0)
    for seed, (worker, kind) in enumerate(zip(WORKERS, ("embedding", "body", "head"), strict=True)):
        system.call(worker, build, args=(kind, letters, seed))
    step = {OURS: apply_ours, PLAIN: apply_plain, THEIRS: apply_theirs}[system.name]
    return functools.partial(train, system, step, *batch)


def rows(name: str) -> list[Row]:
    """All rows of a system."""
    system = SYSTEMS[name]
    return [
        Row("fan: 100 parallel calls to 3 workers, one backward", lambda: functools.partial(fan, system)),
        Row(ACTIVATIONS, lambda: functools.partial(activations, system)),
        Row(TRAINING, functools.partial(training, system)),
        Row("64 MiB to 3 workers", lambda: functools.partial(broadcast, system, torch.ones(1 << 24))),
    ]


def suite(transport: str) -> Suite:
    """All rows, on four workers."""
    return Suite(["worker0", *WORKERS], rows, functools.partial(join, transport, 64))


def floors(numbers: Numbers) -> list[str]:
    """Sentences about the rows that were measured."""
    found = []
    if ACTIVATIONS in numbers:
        computing, copying = activations_alone()
        alone = f"computing {computing * 1e3:.0f} ms and {COPIES} copies {copying * 1e3:.0f} ms"
        shares = ", ".join(
            f"{system} {cost.wall / (computing + copying):.2f}" for system, cost in numbers[ACTIVATIONS].items()
        )
        found.append(f"The floor of the activations, {alone} in one process; times that: {shares}.")
    if TRAINING in numbers:
        found.append(f"The training step in one process: {show(in_one_process(40))}.")
    return found


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


# Start and stop, in processes that have imported everything. Both systems meet at the same kind of place: a file.
# Torch's TCP store asks the name server for both ends of every connection. Where answers get lost, as they may when 32
# ask at once, the resolver waits for 5 s, and that is all one sees; so what a TCP store makes of it is printed below
# the table, next to what the store takes alone.


def greet() -> None:
    """A call that says that a worker is there."""


def live_ours(rank: int, count: int, meet: str) -> None:
    """A worker's life: become a cluster with the others, greet the first, end it."""
    bh.init(f"worker{rank}", rank=rank, world_size=count, options=bh.Options(init_method=meet))
    bh.rpc_sync("worker0", greet)
    bh.shutdown()


def live_theirs(rank: int, count: int, meet: str) -> None:
    """The same in the reference."""
    warnings.filterwarnings("ignore", message="You are using a Backend")  # its own business
    how = reference.TensorPipeRpcBackendOptions(num_worker_threads=16, init_method=meet)
    reference.init_rpc(f"worker{rank}", rank=rank, world_size=count, rpc_backend_options=how)
    reference.rpc_sync("worker0", greet)
    reference.shutdown()


def live_nowhere(rank: int, count: int, meet: str) -> Any:
    """Only meet: what both begin with."""
    store, _, _ = next(rendezvous(meet, rank, count))
    store.set(f"worker{rank}", "here")
    store.wait([f"worker{other}" for other in range(count)])
    return store


LIVES = (live_ours, live_theirs, live_nowhere)


def live(life: Any, place: tuple[int, int, str], together: Any, times: Any) -> None:
    """Runs in each process."""
    together.wait()
    start = time.perf_counter()
    store = life(*place)
    times.put(time.perf_counter() - start)
    together.wait()  # rank 0 may have the store's server, which the reference needs to the end
    del store


def lives(count: int, rounds: int, meet: Callable[[], str]) -> list[Cost]:
    """How long the slowest of ``count`` workers takes to start, greet and stop, and the processor time of all: medians
    of ours, theirs, and only to meet.
    """
    walls: tuple[list[float], ...] = tuple([] for _ in LIVES)
    used: tuple[list[float], ...] = tuple([] for _ in LIVES)
    fork = multiprocessing.get_context("fork")  # nothing runs in this process yet
    for _ in range(rounds):
        for place, life in enumerate(LIVES):
            together, queue, where = fork.Barrier(count), fork.Queue(), meet()
            processes = [
                fork.Process(target=live, args=(life, (rank, count, where), together, queue)) for rank in range(count)
            ]
            before = children_seconds()
            for process in processes:
                process.start()
            walls[place].append(max(queue.get(timeout=120) for _ in processes))
            for process in processes:
                process.join()
            used[place].append(children_seconds() - before)
    return [Cost(*map(statistics.median, each)) for each in zip(walls, used, strict=True)]


def children_seconds() -> float:
    """Processor time of children that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def start_and_stop(quick: bool) -> str:
    """The name of the row."""
    return f"start and stop of {8 if quick else 32} workers"


def measure_lives(quick: bool) -> tuple[dict[str, Cost], list[str]]:
    """How long workers take to start and stop, with what the meeting takes alone."""
    count = 8 if quick else 32
    with tempfile.TemporaryDirectory() as folder:
        by_file = lives(count, 1 if quick else 5, lambda: f"file://{folder}/{secrets.token_hex(4)}")
    by_tcp = lives(count, 1 if quick else 3, lambda: f"tcp://127.0.0.1:{free_port()}")
    return dict(zip((OURS, THEIRS), by_file, strict=False)), [
        show_floor(f"Start and stop of {count} workers that meet at a file", *by_file),
        show_floor("The same at a TCP store", *by_tcp),
    ]


def show_floor(how: str, ours: Cost, theirs: Cost, floor: Cost) -> str:
    """What start and stop take beyond the meeting."""
    return (
        f"{how}: Backhaul {show(ours.wall)}, reference {show(theirs.wall)}; the store alone {show(floor.wall)}, "
        f"beyond that {show(max(ours.wall - floor.wall, 0.0))} and {show(max(theirs.wall - floor.wall, 0.0))}."
    )
