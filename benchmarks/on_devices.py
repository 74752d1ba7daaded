"""Tensors on a GPU, side by side with ``torch.distributed.rpc`` and its device maps: one run, alternating.

    make bench-cuda
    .venv/bin/python benchmarks/on_devices.py --quick

Two worker processes share one GPU. Every measurement ends when the device has done all of it
(``torch.cuda.synchronize``). The last line says what a step of the split model costs in one process.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from command import effort_of, read_options, wanted_by
from harness import OURS, THEIRS, Row, Suite, conduct, lead
from report import show, write
from systems import SYSTEMS, System, join, join_reference

WORKERS = ("worker0", "worker1")
WIDTH, LENGTH, BATCH, BLOCKS = 1024, 512, 8, 4  # of the transformer; so many blocks on each worker


def echo(x: torch.Tensor) -> torch.Tensor:
    """Nothing but the way there and back."""
    return x


@functools.cache
def blocks(seed: int) -> torch.nn.Module:
    """Half of the model, on the device."""
    torch.manual_seed(seed)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, dropout=0.0, batch_first=True, device="cuda")
    return torch.nn.TransformerEncoder(layer, BLOCKS, enable_nested_tensor=False)


def second_half(x: torch.Tensor) -> torch.Tensor:
    """Runs on the other worker."""
    made: torch.Tensor = blocks(2)(x)
    return made


def echo_of(system: System, x: torch.Tensor) -> None:
    """One call."""
    system.call("worker1", echo, args=(x,))
    torch.cuda.synchronize()


def smallest(system: System, _: None) -> None:
    """The smallest forward, backward and release."""
    x = torch.ones(16, device="cuda", requires_grad=True)
    with system.context() as ctx:
        loss = system.call("worker1", torch.mul, args=(x, 2.0)).sum()
        system.backward(ctx, [loss])
    torch.cuda.synchronize()


def split_step(system: System, x: torch.Tensor) -> None:
    """Forward and backward of a model whose halves are on two workers."""
    with system.context() as ctx:
        hidden = blocks(1)(x)
        loss = system.call("worker1", second_half, args=(hidden,)).square().mean()
        system.backward(ctx, [loss])
    torch.cuda.synchronize()


def whole_step(x: torch.Tensor) -> None:
    """The same in one process."""
    second_half(blocks(1)(x)).square().mean().backward()
    torch.cuda.synchronize()


def rows(name: str) -> list[Row]:
    """All rows of a system. Systems without contexts are left out."""
    system = SYSTEMS[name]

    def row(name: str, what: Callable[..., None], *shape: int, draw: Callable[..., Any] = torch.ones) -> Row:
        return Row(name, lambda: functools.partial(what, system, draw(shape, device="cuda") if shape else None))

    return [
        row("16-float echo", echo_of, 16),
        row("64 MiB echo", echo_of, 64 << 18),
        row("1 GiB echo", echo_of, 1024 << 18),
        row("smallest forward, backward and release", smallest),
        row("transformer split over two workers, step", split_step, BATCH, LENGTH, WIDTH, draw=torch.randn),
    ]


def join_on_device(system: str, name: str, rank: int, count: int, meet: str) -> Callable[[], None]:
    """Become a worker; the reference needs a map for each peer."""
    if system != THEIRS:
        return join("auto", 16, system, name, rank, count, meet)
    join_reference(name, rank, count, meet, devices={other: {0: 0} for other in WORKERS if other != name})
    return torch.distributed.rpc.shutdown


def main() -> None:
    """Measure and print."""
    options = read_options(__doc__)
    suites = [Suite(WORKERS, rows, join_on_device, devices=True)]
    if options.side is not None:
        lead(suites, options.side, options.at)
        return
    if not torch.cuda.is_available():
        print("skipped: needs a CUDA device")
        return
    numbers = conduct(suites, effort_of(options), wanted=wanted_by(options), systems=(OURS, THEIRS))
    batch = torch.randn(BATCH, LENGTH, WIDTH, device="cuda")
    times = []
    for _ in range(12):
        start = time.perf_counter()
        whole_step(batch)
        times.append(time.perf_counter() - start)
    sentences = [f"The transformer's step in one process: {show(statistics.median(times[2:]))}."]
    write(options.out, "cuda", "One GPU, two workers", numbers, sentences)


if __name__ == "__main__":
    main()
