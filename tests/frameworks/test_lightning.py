"""The Trainer of Lightning and Fabric, with a split model and with the same model in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from .runs import PLACES, Network, Weights, assert_all_same, make_data, make_model, needs, run

pytestmark = needs("lightning")


def fit(
    places: dict[str, str] | None, folder: Path, epochs: int, resume: Path | None
) -> tuple[Weights, dict[str, Any]]:
    """Train with checkpoints and averaged weights. Returns the weights, and the last checkpoint."""
    import lightning
    from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = Network()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", nn.functional.cross_entropy(self.network(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]

    model = make_model(places and {f"network.{name}": place for name, place in places.items()}, Module)
    saved = ModelCheckpoint(folder, monitor="val_loss", save_last=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[saved, EMAWeightAveraging(decay=0.9)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=True,
    )
    trainer.fit(model, make_data(6), make_data(2, 1), ckpt_path=resume, weights_only=False)
    return dict(model.state_dict()), torch.load(saved.last_model_path, weights_only=False)


def fit_in_halves(folder: Path) -> tuple[list[Weights], list[Weights]]:
    halves = {name: fit(places, folder / name, 2, None)[1] for name, places in (("split", PLACES), ("plain", None))}
    results = [
        fit(PLACES, folder / "a", 4, folder / "split" / "last.ckpt"),
        fit(PLACES, folder / "b", 4, folder / "plain" / "last.ckpt"),
        fit(PLACES, folder / "c", 4, None),
        fit(None, folder / "d", 4, None),
    ]
    assert (
        halves["split"]["optimizer_states"][0]["state"].keys() == halves["plain"]["optimizer_states"][0]["state"].keys()
    )
    return [weights for weights, _ in results], [checkpoint["state_dict"] for _, checkpoint in results]


def test_trainer(tmp_path: Path) -> None:
    weights, checkpoints = run(fit_in_halves, tmp_path)
    assert_all_same(weights)
    assert_all_same(checkpoints)


def train_with_fabric(places: dict[str, str] | None, path: Path, first: int, last: int) -> Weights:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model = make_model(places)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if first:
        fabric.load(path, state)
        assert state["step"] == first
    for number, (x, wanted) in enumerate(fabric.setup_dataloaders(make_data(12))):
        if first <= number < last:
            with fabric.no_backward_sync(model, enabled=number % 2 == 0):
                fabric.backward(nn.functional.cross_entropy(model(x), wanted) / 2)
            if number % 2:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
    fabric.save(path, {**state, "step": last})
    return dict(model.state_dict())


def train_with_fabric_in_halves(folder: Path) -> list[Weights]:
    train_with_fabric(PLACES, folder / "half.pt", 0, 6)
    resumed = train_with_fabric(PLACES, folder / "half.pt", 6, 12)
    return [
        resumed,
        train_with_fabric(PLACES, folder / "whole.pt", 0, 12),
        train_with_fabric(None, folder / "whole.pt", 0, 12),
    ]


def test_fabric(tmp_path: Path) -> None:
    assert_all_same(run(train_with_fabric_in_halves, tmp_path))
