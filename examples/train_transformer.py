"""Trains a small transformer language model split over workers, then checks its gradients against one process.

The driver holds no weights. The embedding, each block of the body and the head live on separate workers. Every step is
one context: tokens travel through the workers, ``backward`` runs back through all of them, and each worker steps its
own optimizer.

    make run
    make run ARGS="--workers 4 --steps 100"
    make run ARGS="--steps 20 --profile profile"    # and see profile/report.html
    make run ARGS="--device cuda"                   # all parts on the GPU, each in its own process
"""

from __future__ import annotations

import argparse
import pathlib
import time
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

import backhaul as bh

CONTEXT, WIDTH, BATCH = 64, 64, 16


# The text: sentences of a small grammar, which the model can learn.


def make_text(sentences: int, seed: int = 0) -> str:
    """Make sentences in which the verb depends on the subject and the object on the verb."""
    draw = torch.Generator().manual_seed(seed)

    def pick(options: list[str]) -> str:
        return options[int(torch.randint(len(options), (), generator=draw))]

    scenes = {
        "the sailor": {"mends": ["the net", "the sail"], "counts": ["the stars", "the waves"]},
        "a gardener": {"waters": ["the roses", "the beans"], "plants": ["an oak", "the seeds"]},
        "the clerk": {"writes": ["a letter", "the ledger"], "closes": ["the door", "the book"]},
    }
    said = []
    for _ in range(sentences):
        subject = pick(sorted(scenes))
        verb = pick(sorted(scenes[subject]))
        said.append(f"{subject} {verb} {pick(scenes[subject][verb])}. ")
    return "".join(said)


class Corpus:
    """A text as numbers, cut into batches."""

    def __init__(self, text: str, device: str) -> None:
        self.letters = sorted(set(text))
        numbers = {letter: number for number, letter in enumerate(self.letters)}
        self.data = torch.tensor([numbers[letter] for letter in text], device=device)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets."""
        draw = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.data) - CONTEXT - 1, (BATCH,), generator=draw)
        windows = torch.stack([self.data[s : s + CONTEXT + 1] for s in starts.tolist()])
        return windows[:, :-1], windows[:, 1:]


# The model, in parts. Each worker builds its own part. The seed of a part does not depend on the worker.


class Embedding(nn.Module):
    """Turns letters and positions into vectors."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.letters(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))


class Block(nn.Module):
    """Attention and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hide = torch.full((x.shape[1], x.shape[1]), float("-inf"), device=x.device).triu(1)
        y = self.before(x)
        x = x + self.attention(y, y, y, attn_mask=hide, need_weights=False)[0]
        return x + self.layers(self.between(x))


class Head(nn.Module):
    """Turns vectors into the loss."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, letters)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.out(self.norm(x)).flatten(0, 1), targets.flatten())


def make_part(kind: str, letters: int, seed: int, device: str) -> nn.Module:
    """Build a part. The same seed gives the same weights."""
    torch.manual_seed(seed)
    if kind == "embedding":
        return Embedding(letters).to(device)
    return (Head(letters) if kind == "head" else Block()).to(device)


# On the workers that hold a part.

held: dict[str, Any] = {}


def hold(kind: str, letters: int, seed: int, device: str) -> int:
    """Build this worker's part and its optimizer. Returns the number of weights."""
    held["part"] = make_part(kind, letters, seed, device)
    held["optimizer"] = torch.optim.AdamW(held["part"].parameters(), lr=3e-3)
    return sum(p.numel() for p in held["part"].parameters())


def forward(*args: torch.Tensor) -> torch.Tensor:
    """Run this worker's part."""
    return held["part"](*args)


def step(context: int) -> None:
    """Apply the gradients that the context holds for this worker's part."""
    grads = bh.get_gradients(context)
    for parameter in held["part"].parameters():
        parameter.grad = grads.get(parameter)
    held["optimizer"].step()


def gradients(context: int) -> list[torch.Tensor | None]:
    """Return the gradients of this worker's part."""
    grads = bh.get_gradients(context)
    return [grads.get(parameter) for parameter in held["part"].parameters()]


# On the driver.


def through(parts: list[str], tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compute the loss along the chain of workers."""
    x = tokens
    for name in parts[:-1]:
        x = bh.rpc_sync(name, forward, args=(x,))
    return bh.rpc_sync(parts[-1], forward, args=(x, targets))


def bytes_sent() -> int:
    """Return the number of bytes that this worker has sent so far."""
    return bh.get_debug_info()["bytes_sent"]


def bytes_moved(workers: list[str]) -> int:
    """Return the number of bytes that all workers have sent so far."""
    return sum(bh.wait_all([bh.rpc_async(name, bytes_sent) for name in workers]))


def train_on(names: list[str], tokens: torch.Tensor, targets: torch.Tensor) -> float:
    """Make one step: forward through all workers, backward, and the optimizer of every part. Returns the loss."""
    with bh.context() as ctx:
        loss = through(names, tokens, targets)
        ctx.backward(loss)
        bh.wait_all([bh.rpc_async(name, step, args=(ctx.id,)) for name in names])
    return loss.item()


def write_profile(names: list[str], corpus: Corpus, folder: pathlib.Path) -> str:
    """Profile three steps on all workers. Writes a report and a trace, and returns a table."""
    folder.mkdir(parents=True, exist_ok=True)
    with bh.profile() as prof:
        for number in range(3):
            train_on(names, *corpus.batch(number))
    prof.report(folder / "report.html", title="Three steps of a transformer")
    prof.export(folder / "trace.json")
    return prof.table()


def train(steps: int, folder: str | None, device: str) -> dict[str, Any] | None:
    """Runs on every worker. The first worker trains, the others hold one part each."""
    infos = bh.get_worker_infos()
    if bh.get_worker_info().id != 0:
        return None
    corpus = Corpus(make_text(2000), device)
    letters = len(corpus.letters)
    names = [info.name for info in infos if info.id != 0] or [infos[0].name]
    weights = sum(
        bh.rpc_sync(name, hold, args=(name.partition("-")[0], letters, seed, device)) for seed, name in enumerate(names)
    )
    console = Console()
    console.print(f"{weights:,} weights on {', '.join(names)}; {len(corpus.data):,} letters of text")
    difference = check(corpus, names)
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TextColumn("{task.fields[moved]:.2f} MiB/step"),
        TimeElapsedColumn(),
    )
    everyone = [info.name for info in infos]
    before = bytes_moved(everyone)
    losses = []
    start = time.perf_counter()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("train", total=steps, loss=float("nan"), speed=0.0, moved=0.0)
        for number in range(steps):
            losses.append(train_on(names, *corpus.batch(number)))
            speed = (number + 1) * BATCH * CONTEXT / (time.perf_counter() - start)
            progress.update(bar, advance=1, loss=losses[-1], speed=speed)
            if number % 10 == 0:
                moved = (bytes_moved(everyone) - before) / (number + 1)
                progress.update(bar, moved=moved / 2**20)
    return {
        "losses": losses,
        "difference": difference,
        "seconds": time.perf_counter() - start,
        "moved": (bytes_moved(everyone) - before) / steps,
        "profile": write_profile(names, corpus, pathlib.Path(folder)) if folder is not None else None,
    }


def check(corpus: Corpus, names: list[str]) -> float:
    """Return the largest difference between a gradient over the workers and the same gradient in this process."""
    tokens, targets = corpus.batch(10_000)
    parts = [
        make_part(name.partition("-")[0], len(corpus.letters), seed, tokens.device.type)
        for seed, name in enumerate(names)
    ]
    x = tokens
    for part in parts[:-1]:
        x = part(x)
    parts[-1](x, targets).backward()
    largest = 0.0
    with bh.context() as ctx:
        ctx.backward(through(names, tokens, targets))
        for name, part in zip(names, parts, strict=True):
            found = bh.rpc_sync(name, gradients, args=(ctx.id,))
            for parameter, grad in zip(part.parameters(), found, strict=True):
                if parameter.grad is None or grad is None:
                    raise AssertionError(f"a gradient of {name} is missing")
                largest = max(largest, float((parameter.grad - grad).abs().max()))
    return largest


def main() -> None:
    """Start the workers, train, and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=3, help="workers that hold a part of the model (default 3)")
    parser.add_argument("--steps", type=int, default=200, help="training steps (default 200)")
    parser.add_argument("--profile", metavar="FOLDER", help="profile three steps and write report.html and trace.json")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the parts (default cpu)")
    options = parser.parse_args()
    if options.workers < 2 or options.steps < 1:
        parser.error("at least 2 workers (embedding and head) and 1 step")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    blocks = [f"body-{number}" for number in range(1, options.workers - 1)]
    names = ["driver", "embedding", *blocks, "head"]
    result = bh.launch(train, names, args=(options.steps, options.profile, options.device))[0]
    losses = result["losses"]
    table = Table(title=f"A transformer over {options.workers} workers and a driver")
    table.add_column("what")
    table.add_column("result", justify="right")
    table.add_row("loss of the first step", f"{losses[0]:.3f}")
    table.add_row("loss of the last step", f"{losses[-1]:.3f}")
    table.add_row("time per step", f"{result['seconds'] / len(losses) * 1e3:.1f} ms")
    table.add_row("bytes moved per step", f"{result['moved'] / 2**20:.2f} MiB")
    table.add_row("largest difference of a gradient to one process", f"{result['difference']:.1e}")
    Console().print(table)
    if result["profile"] is not None:
        print(
            f"\n{result['profile']}\n\nSee {options.profile}/report.html; Perfetto opens {options.profile}/trace.json."
        )


if __name__ == "__main__":
    main()
