"""Trains a model whose parts are on three workers with a loop of Lightning Fabric.

The loop is that of one process: only the line with ``bh.nn.split`` is new. ``--check`` trains once more without that
line, and compares the weights. It needs the extra: ``pip install backhaul[frameworks]``.

    python examples/lightning_fabric.py
    python examples/lightning_fabric.py --steps 20 --check
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import backhaul as bh

FEATURES, WIDTH, CLASSES, BATCH = 16, 64, 4, 32
PLACES = {"encoder": "w1", "blocks.0": "w1", "blocks.1": "w2"}


class Classifier(nn.Module):
    """Learns which of some directions a vector has."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU())
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def make_data(batches: int) -> DataLoader[Any]:
    """Vectors, each with the number of the direction that it has."""
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(batches * BATCH, FEATURES, generator=draw)
    directions = torch.randn(FEATURES, CLASSES, generator=draw)
    return DataLoader(TensorDataset(x, (x @ directions).argmax(1)), BATCH)


def train(steps: int, places: dict[str, str] | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train a model. Returns the losses, and the weights of a checkpoint."""
    seed_everything(0, verbose=False)
    model = Classifier()
    if places is not None:
        model = bh.nn.split(model, places)
    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    losses = []
    for x, wanted in fabric.setup_dataloaders(make_data(steps)):
        loss = nn.functional.cross_entropy(model(x), wanted)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    with tempfile.TemporaryDirectory() as folder:
        fabric.save(Path(folder) / "last.pt", {"model": model, "optimizer": optimizer})
        checkpoint = torch.load(Path(folder) / "last.pt", weights_only=True)
    return losses, checkpoint["model"]


def run(steps: int, check: bool) -> dict[str, Any] | None:
    """Runs on every worker. The trainer trains; the others serve it."""
    if bh.get_worker_info().name != "trainer":
        return None
    losses, weights = train(steps, PLACES)
    difference = None
    if check:
        _, wanted = train(steps, None)
        difference = max(float((weights[name] - value).abs().max()) for name, value in wanted.items())
    return {"losses": losses, "difference": difference}


def main() -> None:
    """Start the workers, train, and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="training steps (default 100)")
    parser.add_argument("--check", action="store_true", help="compare the weights with those of one process")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("at least 1 step")
    workers = ["trainer", "w1", "w2"]
    arguments = options.steps, options.check
    result = bh.launch(run, workers, args=arguments, start_method="forkserver", torchrun_variables=False)[0]
    print(f"loss of the first step {result['losses'][0]:.3f}, of the last {result['losses'][-1]:.3f}")
    if result["difference"] is not None:
        print(f"largest difference of a weight to one process: {result['difference']:.1e}")


if __name__ == "__main__":
    main()
