"""Trains a model whose parts are on three workers with the Trainer of Lightning.

The LightningModule and the Trainer are those of one process: only the line with ``bh.nn.split`` is new. ``--check``
trains once more without that line, and compares the weights. It needs the extra: ``pip install backhaul[frameworks]``.

    python examples/lightning_trainer.py
    python examples/lightning_trainer.py --steps 20 --check
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import backhaul as bh

FEATURES, WIDTH, CLASSES, BATCH = 16, 64, 4, 32
PLACES = {"encoder": "w1", "blocks.0": "w1", "blocks.1": "w2"}


class Classifier(lightning.LightningModule):
    """Learns which of some directions a vector has."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU())
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, CLASSES)
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, wanted = batch
        loss = nn.functional.cross_entropy(self(x), wanted)
        self.log("train_loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        x, wanted = batch
        self.log("accuracy", (self(x).argmax(1) == wanted).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def make_data(batches: int, seed: int) -> DataLoader[Any]:
    """Vectors, each with the number of the direction that it has."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(batches * BATCH, FEATURES, generator=draw)
    directions = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, (x @ directions).argmax(1)), BATCH)


def train(steps: int, places: dict[str, str] | None) -> tuple[Classifier, dict[str, torch.Tensor]]:
    """Train a model. Returns it, and the weights of its last checkpoint."""
    lightning.seed_everything(0, verbose=False)
    model = Classifier()
    if places is not None:
        model = bh.nn.split(model, places)
    with tempfile.TemporaryDirectory() as folder:
        saved = ModelCheckpoint(folder, monitor="accuracy", mode="max", save_last=True)
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=2,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            callbacks=[saved],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, make_data(steps // 2, 2), make_data(4, 3))
        checkpoint = torch.load(saved.last_model_path, weights_only=True)
    return model, checkpoint["state_dict"]


def run(steps: int, check: bool) -> dict[str, Any] | None:
    """Runs on every worker. The trainer trains; the others serve it."""
    if bh.get_worker_info().name != "trainer":
        return None
    model, weights = train(steps, PLACES)
    difference = None
    if check:
        _, wanted = train(steps, None)
        difference = max(float((weights[name] - value).abs().max()) for name, value in wanted.items())
    return {"losses": model.losses, "difference": difference}


def main() -> None:
    """Start the workers, train, and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="training steps, in two epochs (default 100)")
    parser.add_argument("--check", action="store_true", help="compare the weights with those of one process")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("at least 2 steps")
    workers = ["trainer", "w1", "w2"]
    arguments = options.steps, options.check
    result = bh.launch(run, workers, args=arguments, start_method="forkserver", torchrun_variables=False)[0]
    print(f"loss of the first step {result['losses'][0]:.3f}, of the last {result['losses'][-1]:.3f}")
    if result["difference"] is not None:
        print(f"largest difference of a weight to one process: {result['difference']:.1e}")


if __name__ == "__main__":
    main()
