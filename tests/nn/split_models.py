"""Models to split, with inputs; and functions that other workers run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import backhaul as bh


class Encoder(nn.Module):
    """A module with data, methods, a property, and buffers of both kinds."""

    version = 3

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.d_model = width
        self.calls = 0
        self.inner = nn.Linear(width, width)
        self.register_buffer("kept", torch.full((width,), 0.5))
        self.register_buffer("dropped", torch.full((width,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        found = self.encode(x)
        self.auxiliary = found.pow(2).sum()
        return found * scale * self.dropped

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)) + self.kept

    @property
    def shape(self) -> tuple[int, int]:
        return self.d_model, self.d_model


class EncoderModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x, scale=0.5) + self.encoder.encode(x) / self.encoder.d_model)


class Transformer(nn.Module):
    """Nested lists of layers; the output is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=bool(n))
                for n in range(2)
            )
            for _ in range(2)
        )
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            for layer in block:
                x = layer(x, src_mask=mask, is_causal=True)
        return self.out(x)


class SharedLayers(nn.Module):
    """One layer under two names, and one used twice inside a part."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(8, 8)
        self.first = nn.Sequential(shared, nn.ReLU(), shared)
        self.second = nn.Linear(8, 8)
        self.again = nn.ModuleDict({"second": self.second, "norm": nn.LayerNorm(8)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again["norm"](self.again["second"](self.second(self.first(x))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 6, num_layers=2, batch_first=True)
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, (hidden, _) = self.rnn(x.unsqueeze(1))
        return self.out(found.squeeze(1) + hidden[-1])


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 4)),
        nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.0)),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def frozen_and_mixed() -> nn.Module:
    """Parts that are frozen, half of them, or in another mode or type."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 2))
    model[0].weight.requires_grad_(False)
    model[1].eval()
    model[2].eval()
    return model


def vectors(seed: int) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(seed))


Case = tuple[Callable[[], nn.Module], dict[str, str], Callable[[int], torch.Tensor]]

CASES: dict[str, Case] = {
    "one part": (EncoderModel, {"encoder": "worker1"}, vectors),
    "all parts": (EncoderModel, {"encoder": "worker1", "head": "rank:2/cpu"}, vectors),
    "an inner part": (EncoderModel, {"encoder.inner": "worker2"}, vectors),
    "own worker": (EncoderModel, {"encoder": "worker0"}, vectors),
    "the model": (EncoderModel, {"": "worker1"}, vectors),
    "elements": (Transformer, {"blocks.0.0": "worker1", "blocks.1.1": "worker1", "blocks.0.1": "worker2"}, tokens),
    "tied parts": (Transformer, {"embed": "worker2", "out": "worker2", "blocks.1.0": "worker1"}, tokens),
    "shared inside": (SharedLayers, {"first": "worker1"}, vectors),
    "two names": (SharedLayers, {"second": "worker1"}, vectors),
    "two names, both given": (SharedLayers, {"again.second": "worker2", "second": "worker2"}, vectors),
    "recurrent": (Recurrent, {"rnn": "worker1", "out": "worker1"}, vectors),
    "convolutions": (convolutions, {"1": "worker1", "3": "worker2"}, vectors),
    "batch norm alone": (convolutions, {"1.1": "worker1"}, vectors),
    "frozen and mixed": (frozen_and_mixed, {"0": "worker1", "1": "worker2", "2": "worker2", "3": "worker1"}, vectors),
}


def make(case: str) -> tuple[nn.Module, dict[str, str], Callable[[int], torch.Tensor]]:
    """A model with weights of its own, where it goes, and what makes its inputs."""
    made, places, inputs = CASES[case]
    torch.manual_seed(5)
    return made(), places, inputs


class Opaque(nn.Linear):
    """A module that cannot be sent."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.lock = threading.Lock()


# Run on other workers.


def add_one(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """A hook."""
    return output + 1


def double(grad: torch.Tensor) -> torch.Tensor:
    """A hook of a parameter."""
    return 2 * grad


def note_worker(module: nn.Module, inputs: Any, output: Any) -> None:
    """A hook that notes where it runs."""
    module.ran_on = bh.get_worker_info().name


def memory_of(part: bh.RRef[nn.Module]) -> list[int]:
    """The addresses of a module's memory."""
    return [tensor.untyped_storage().data_ptr() for tensor in part.local_value().state_dict().values()]


def grads_there(part: bh.RRef[nn.Module]) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in part.local_value().parameters()]


def memory_lent() -> int:
    return bh.get_debug_info()["shm_lent"]
