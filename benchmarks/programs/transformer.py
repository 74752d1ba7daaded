"""A transformer over three workers: embedding, body and head are each a ``RemoteModule``.

The driver holds no weights. Activations come back to it between the parts. ``DistributedOptimizer`` runs AdamW on each
worker.
"""

from __future__ import annotations

import torch
from torch import nn

from programs.api import DistributedOptimizer, RemoteModule, autograd, seeded

WORKERS = ("driver", "embedding", "body", "head")
LETTERS, WIDTH, LENGTH, BATCH = 30, 32, 16, 4


class Embedding(nn.Module):
    """Letters and places to vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        seeded(self, 1)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        return self.letters(letters) + self.places.weight


class Body(nn.Module):
    """Attention and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        seeded(self, 2)
        self.register_buffer("later", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x, self.later, is_causal=True)


class Head(nn.Module):
    """Vectors to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, LETTERS)
        seeded(self, 3)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.out(x).flatten(0, 1), targets.flatten())


class Driver:
    """Calls the parts."""

    def __init__(self) -> None:
        self.parts = [RemoteModule("embedding", Embedding), RemoteModule("body", Body), RemoteModule("head", Head)]
        parameters = [rref for part in self.parts for rref in part.remote_parameters()]
        self.optimizer = DistributedOptimizer(torch.optim.AdamW, parameters, lr=1e-2)
        self.steps = 0

    def run(self, steps: int) -> list[float]:
        embedding, body, head = self.parts
        losses = []
        for _ in range(steps):
            draw = torch.Generator().manual_seed(self.steps)
            self.steps += 1
            text = (torch.randint(LETTERS, (BATCH, 1), generator=draw) + 2 * torch.arange(LENGTH + 1)) % LETTERS
            with autograd.context() as context:
                loss = head.forward(body.forward(embedding.forward(text[:, :-1])), text[:, 1:])
                autograd.backward(context, [loss])
                self.optimizer.step(context)
            losses.append(loss.item())
        return losses
