"""Loops of Hugging Face accelerate, with a split model and with the same model in one process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from .runs import PLACES, Weights, assert_all_same, make_data, make_model, needs, run

pytestmark = needs("accelerate")


def train(places: dict[str, str] | None, folder: Path, first: int, last: int) -> Weights:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = make_model(places)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, make_data(12), scheduler)
    if first:
        accelerator.load_state(folder)
        data = accelerator.skip_first_batches(data, first)
    for number, (x, wanted) in enumerate(data, first):
        if number == last:
            break
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(x), wanted))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.save_state(folder)
    return dict(accelerator.unwrap_model(model).state_dict())


def train_in_halves(folder: Path) -> list[Weights]:
    train(PLACES, folder / "split", 0, 6)
    train(None, folder / "plain", 0, 6)
    return [
        train(PLACES, folder / "split", 6, 12),
        train(PLACES, folder / "plain", 6, 12),
        train(PLACES, folder / "whole", 0, 12),
        train(None, folder / "whole", 0, 12),
    ]


def test_save_state_and_load_state(tmp_path: Path) -> None:
    assert_all_same(run(train_in_halves, tmp_path))
