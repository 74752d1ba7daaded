"""Models and data of the tests, and how a test runs a program: in the first of three processes that are workers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import backhaul as bh

Weights = dict[str, torch.Tensor]

PLACES = {"encoder": "w1", "blocks.0": "w1", "blocks.1": "w2"}


def needs(package: str) -> pytest.MarkDecorator:
    """Skip the tests of a module where the package is not installed. Importing it here would take seconds."""
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed; it is in the extra 'frameworks'")


class Network(nn.Module):
    """A classifier with layers of which optimizers and checkpoints must treat each in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.GELU())
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(12, 3)
        self.encoder[0].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def make_model(places: dict[str, str] | None, kind: Callable[[], nn.Module] = Network) -> Any:
    """A model that is always the same, split if there are places."""
    torch.manual_seed(3)
    model = kind()
    return model if places is None else bh.nn.split(model, places)


def make_data(batches: int, seed: int = 0) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(8 * batches, 6, generator=draw)
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long()), 8)


def run(program: Callable[..., Any], *args: Any) -> Any:
    """What ``program`` returns in the first worker. The others only serve it."""
    return bh.launch(
        _run, ["trainer", "w1", "w2"], args=(program, args), start_method="forkserver", torchrun_variables=False
    )[0]


def _run(program: Callable[..., Any], args: Any) -> Any:
    return program(*args) if bh.get_worker_info().name == "trainer" else None


def assert_same(found: Any, wanted: Any) -> None:
    """Weights that are the same to the last bit, under the same names in the same order."""
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def assert_all_same(results: list[Weights]) -> None:
    """As ``assert_same``, for several; the last are those of one process."""
    for found in results[:-1]:
        assert_same(found, results[-1])
