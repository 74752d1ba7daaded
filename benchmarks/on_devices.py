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
from harness import SYSTEMS, Row, System, conduct, options_of, play, report, show

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


def smallest(system: System) -> None:
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


def rows(quick: bool, name: str) -> list[Row]:
    """All rows."""
    scale, system = 4 if quick else 1, SYSTEMS[name]

    def row(name: str, what: Callable[..., None], *args: Any, calls: int) -> Row:
        return Row(name, functools.partial(what, system, *args), max(calls // scale, 2), 6)

    small = torch.ones(16, device="cuda")
    large = {size: torch.ones(size << 18, device="cuda") for size in (64, 1024)}
    batch = torch.randn(BATCH, LENGTH, WIDTH, device="cuda")
    return [
        row("16-float echo", echo_of, small, calls=60),
        row("64 MiB echo", echo_of, large[64], calls=20),
        row("1 GiB echo", echo_of, large[1024], calls=6),
        row("smallest forward, backward and release", smallest, calls=40),
        row("transformer split over two workers, step", split_step, batch, calls=8),
    ]


def main() -> None:
    """Measure and print."""
    options = options_of(__doc__)
    if not torch.cuda.is_available():
        print("skipped: needs a CUDA device")
        return
    if play(functools.partial(rows, options.quick), 2, options, devices={0: 0}):
        return
    numbers = conduct()
    report("One GPU, two workers", "cuda", numbers)
    batch = torch.randn(BATCH, LENGTH, WIDTH, device="cuda")
    times = []
    for _ in range(12):
        start = time.perf_counter()
        whole_step(batch)
        times.append(time.perf_counter() - start)
    print(f"The transformer's step in one process: {show(statistics.median(times[2:]))}")


if __name__ == "__main__":
    main()
