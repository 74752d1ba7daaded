"""Trains an LSTM language model split in two: embedding and decoder on one worker, the LSTM on the driver.

Embedding and decoder are ``bh.nn.RemoteModule``, so the model and the loop read like local ones. The state of the LSTM
goes from step to step. Memory does not grow over time: ``backward`` frees what the step has left on both workers.

    python examples/rnn_split.py
    python examples/rnn_split.py --steps 10000
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

import backhaul as bh

WIDTH, HIDDEN, LENGTH, BATCH = 32, 64, 16, 16


# The text.


def make_text(words: int, seed: int = 0) -> list[str]:
    """Make nursery rhymes of a small grammar. Each word follows from the two words before it."""
    draw = torch.Generator().manual_seed(seed)
    animals = {"cow": "moo", "duck": "quack", "sheep": "baa", "pig": "oink", "cat": "miaow"}
    said: list[str] = []
    while len(said) < words:
        name = sorted(animals)[int(torch.randint(len(animals), (), generator=draw))]
        said += f"the {name} says {animals[name]} and {animals[name]} says the {name} .".split()
    return said[:words]


def batch(data: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets. The first dimension is time."""
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=draw)
    windows = torch.stack([data[s : s + LENGTH + 1] for s in starts.tolist()], dim=1)
    return windows[:-1], windows[1:]


# The model.


class Decoder(nn.Module):
    """Computes the loss of the next words from the outputs of the LSTM."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.out = nn.Linear(HIDDEN, words)

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.out(hidden).flatten(0, 1), targets.flatten())


class Model(nn.Module):
    """Tokens go to the worker with the tables and come back as vectors. Outputs go there and come back as the loss."""

    def __init__(self, tables: str, words: int) -> None:
        super().__init__()
        self.embedding = bh.nn.RemoteModule(tables, nn.Embedding, (words, WIDTH))
        self.lstm = nn.LSTM(WIDTH, HIDDEN)
        self.decoder = bh.nn.RemoteModule(tables, Decoder, (words,))

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor, state: Any
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        hidden, state = self.lstm(self.embedding(tokens), state)
        return self.decoder(hidden, targets), tuple(part.detach() for part in state)


# The run.


def memory() -> float:
    """Return the resident memory of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def memory_everywhere() -> dict[str, float]:
    """Return the resident memory of each worker, in MiB."""
    return {info.name: bh.rpc_sync(info, memory) for info in bh.get_worker_infos()}


def train(steps: int) -> dict[str, Any] | None:
    """Runs on every worker. The driver trains, the other worker serves."""
    torch.set_num_threads(1)
    if bh.get_worker_info().name != "driver":
        return None
    text = make_text(5000)
    numbers = {word: number for number, word in enumerate(sorted(set(text)))}
    data = torch.tensor([numbers[word] for word in text])
    torch.manual_seed(0)
    model = Model("tables", len(numbers))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    warm = min(2000, steps // 5)  # steps after which a process has allocated the memory that it needs
    state = None
    losses: list[float] = []
    before: dict[str, float] = {}
    start = time.perf_counter()
    for number in track(range(steps), "training", console=Console()):
        if number == warm:
            before = memory_everywhere()
        tokens, targets = batch(data, number)
        optimizer.zero_grad()
        loss, state = model(tokens, targets, state)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    seconds = time.perf_counter() - start
    return {"losses": losses, "before": before, "after": memory_everywhere(), "seconds": seconds, "warm": warm}


def main() -> None:
    """Start both workers, train, and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="training steps (default 300)")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("at least 1 step")
    result = bh.launch(train, ["driver", "tables"], args=(options.steps,))[0]
    losses = result["losses"]
    table = Table(title=f"An LSTM and its tables on two workers, {options.steps} steps")
    table.add_column("what")
    table.add_column("first", justify="right")
    table.add_column("last", justify="right")
    table.add_row("loss", f"{losses[0]:.3f}", f"{losses[-1]:.3f}")
    for worker, before in result["before"].items():
        table.add_row(f"memory of {worker}, MiB", f"{before:.1f}", f"{result['after'][worker]:.1f}")
    Console().print(table)
    print(
        f"{result['seconds'] / len(losses) * 1e3:.2f} ms a step; memory is first measured after {result['warm']} steps"
    )


if __name__ == "__main__":
    main()
