"""Trains a small transformer language model split over workers, then checks its gradients against one process.

The model and the loop are those of one process. Only the line with ``bh.nn.split`` is new: it puts the embedding, each
block and the head on separate workers. The driver holds no weights. Tokens travel through the workers,
``loss.backward()`` runs back through all of them, and each worker steps its own weights.

    make run
    make run ARGS="--workers 4 --steps 100"
    make run ARGS="--steps 20 --profile profile"    # and see profile/report.html
    make run ARGS="--device cuda"                   # all parts on the GPU, each in its own process
    make run ARGS="--on ray"                        # the workers are Ray actors
"""

from __future__ import annotations

import argparse
import copy
import pathlib
import statistics
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

    def __init__(self, text: str, device: str = "cpu") -> None:
        self.letters = sorted(set(text))
        numbers = {letter: number for number, letter in enumerate(self.letters)}
        self.data = torch.tensor([numbers[letter] for letter in text], device=device)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets."""
        draw = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.data) - CONTEXT - 1, (BATCH,), generator=draw)
        windows = torch.stack([self.data[s : s + CONTEXT + 1] for s in starts.tolist()])
        return windows[:, :-1], windows[:, 1:]


# The model.


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


def make_part(kind: str, letters: int, seed: int) -> nn.Module:
    """Build a part of the model. The same seed gives the same weights."""
    torch.manual_seed(seed)
    if kind == "embedding":
        return Embedding(letters)
    return Head(letters) if kind == "head" else Block()


class Transformer(nn.Module):
    """A language model: an embedding, blocks, and a head."""

    def __init__(self, letters: int, blocks: int) -> None:
        super().__init__()
        self.embedding = make_part("embedding", letters, seed=0)
        self.blocks = nn.ModuleList(make_part("block", letters, seed=number) for number in range(1, blocks + 1))
        self.head = make_part("head", letters, seed=blocks + 1)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x, targets)


# The training.


def train_on(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Make one step. Returns the loss."""
    optimizer.zero_grad()
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    return loss.item()


def train(steps: int, folder: str | None, device: str) -> dict[str, Any] | None:
    """Runs on every worker. The driver trains. The others hold one part of the model each."""
    names = [info.name for info in bh.get_worker_infos()]
    if bh.get_worker_info().name != "driver":
        return None
    corpus = Corpus(make_text(2000), device)
    blocks = len(names) - 3
    model = Transformer(len(corpus.letters), blocks)
    alone = copy.deepcopy(model).to(device)  # stays here; the gradients are compared with those of this copy
    parts = ["embedding", *(f"blocks.{number}" for number in range(blocks)), "head"]
    model = bh.nn.split(model, {part: f"{name}/{device}" for part, name in zip(parts, names[1:], strict=True)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    console = Console()
    weights = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"{weights:,} weights on {', '.join(names[1:])}; {len(corpus.data):,} letters of text")
    difference = check(model, alone, corpus)
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TextColumn("{task.fields[moved]:.2f} MiB/step"),
        TimeElapsedColumn(),
    )
    before = bytes_moved(names)
    losses, times = [], []
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("train", total=steps, loss=float("nan"), speed=0.0, moved=0.0)
        for number in range(steps):
            start = time.perf_counter()
            losses.append(train_on(model, optimizer, corpus.batch(number)))
            times.append(time.perf_counter() - start)
            speed = BATCH * CONTEXT / statistics.median(times)
            progress.update(bar, advance=1, loss=losses[-1], speed=speed)
            if number % 10 == 0:
                moved = (bytes_moved(names) - before) / (number + 1)
                progress.update(bar, moved=moved / 2**20)
    return {
        "losses": losses,
        "difference": difference,
        "seconds": statistics.median(times),
        "moved": (bytes_moved(names) - before) / steps,
        "profile": write_profile(model, optimizer, corpus, pathlib.Path(folder)) if folder is not None else None,
    }


def check(model: nn.Module, alone: nn.Module, corpus: Corpus) -> float:
    """Return the largest difference between a gradient over the workers and the same gradient in this process."""
    for each in (model, alone):
        each(*corpus.batch(10_000)).backward()
    found = [parameter.grad.to_here() for parameter in model.parameters()]  # they are on the workers
    wanted = [parameter.grad for parameter in alone.parameters()]
    return max((a.cpu() - b.cpu()).abs().max().item() for a, b in zip(found, wanted, strict=True))


def bytes_moved(workers: list[str]) -> int:
    """Return the number of bytes that the workers have sent so far."""
    return sum(info["bytes_sent"] for info in bh.wait_all([bh.rpc_async(name, bh.get_debug_info) for name in workers]))


def write_profile(model: nn.Module, optimizer: torch.optim.Optimizer, corpus: Corpus, folder: pathlib.Path) -> str:
    """Profile three steps on all workers. Writes a report and a trace, and returns a table."""
    folder.mkdir(parents=True, exist_ok=True)
    with bh.profile() as prof:
        for number in range(3):
            train_on(model, optimizer, corpus.batch(number))
    prof.report(folder / "report.html", title="Three steps of a transformer")
    prof.export(folder / "trace.json")
    return prof.table()


def train_on_processes(names: list[str], *args: Any) -> dict[str, Any]:
    """Start processes of this machine. All of them run ``train``."""
    return bh.launch(train, names, args=args)[0]


def train_on_ray(names: list[str], *args: Any) -> dict[str, Any]:
    """Start Ray actors; this process is the driver. An actor asks for little, so that all fit on a small machine."""
    with bh.ray.start(names[1:], driver=names[0], resources={"CPU": 0.1}):
        return train(*args)


def main() -> None:
    """Start the workers, train, and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=3, help="workers that hold a part of the model (default 3)")
    parser.add_argument("--steps", type=int, default=200, help="training steps (default 200)")
    parser.add_argument("--profile", metavar="FOLDER", help="profile three steps and write report.html and trace.json")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the parts (default cpu)")
    parser.add_argument("--on", choices=("processes", "ray"), default="processes", help="what starts the workers")
    options = parser.parse_args()
    if options.workers < 2 or options.steps < 1:
        parser.error("at least 2 workers (embedding and head) and 1 step")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    if options.device == "cuda" and options.on == "ray":
        parser.error("on Ray this example runs on the CPU")
    blocks = [f"body-{number}" for number in range(1, options.workers - 1)]
    names = ["driver", "embedding", *blocks, "head"]
    device = "cuda:0" if options.device == "cuda" else "cpu"
    result = (train_on_ray if options.on == "ray" else train_on_processes)(
        names, options.steps, options.profile, device
    )
    losses = result["losses"]
    table = Table(title=f"A transformer over {options.workers} workers and a driver")
    table.add_column("what")
    table.add_column("result", justify="right")
    table.add_row("loss of the first step", f"{losses[0]:.3f}")
    table.add_row("loss of the last step", f"{losses[-1]:.3f}")
    table.add_row("time per step, median", f"{result['seconds'] * 1e3:.1f} ms")
    table.add_row("bytes moved per step", f"{result['moved'] / 2**20:.2f} MiB")
    table.add_row("largest difference of a gradient to one process", f"{result['difference']:.1e}")
    Console().print(table)
    if result["profile"] is not None:
        print(
            f"\n{result['profile']}\n\nSee {options.profile}/report.html; Perfetto opens {options.profile}/trace.json."
        )


if __name__ == "__main__":
    main()
