"""A plain loop with a split model: a checkpoint in the middle, taken up by a split model and by a plain one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from .runs import PLACES, Weights, assert_all_same, make_data, make_model, run


def train(places: dict[str, str] | None, path: Path, first: int, last: int) -> Weights:
    """Train with some of the batches; the others come before, from a checkpoint, or later."""
    model = make_model(places)
    decayed = [p for m in model.modules() for p in m.parameters(recurse=False) if not isinstance(m, nn.LayerNorm)]
    known = set(map(id, decayed))
    others = [p for p in model.parameters() if id(p) not in known]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=8)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if first:
        saved = torch.load(path, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    for number, (x, wanted) in enumerate(make_data(16)):
        if not first <= number < last:
            continue
        loss = nn.functional.cross_entropy(model(x), wanted) / 2
        loss.backward()
        if number % 2:  # gradients of two batches
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    torch.save({name: part.state_dict() for name, part in parts.items()}, path)
    return dict(model.state_dict())


def train_in_halves(folder: Path) -> list[Weights]:
    train(PLACES, folder / "split.pt", 0, 8)
    train(None, folder / "plain.pt", 0, 8)
    found = [train(places, folder / f"{name}.pt", 8, 16) for name, places in (("plain", PLACES), ("split", PLACES))]
    found.append(train(PLACES, folder / "whole.pt", 0, 16))
    found.append(train(None, folder / "whole.pt", 0, 16))
    return found


def test_a_checkpoint_in_the_middle(tmp_path: Path) -> None:
    assert_all_same(run(train_in_halves, tmp_path))
