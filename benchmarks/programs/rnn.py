"""An LSTM on the driver, its embedding and its decoder on another worker.

A step makes two calls with an RRef as argument, a distributed backward pass, and a step of ``DistributedOptimizer``.
"""

from __future__ import annotations

import torch
from torch import nn

import backhaul as bh
from programs.api import DistributedOptimizer, autograd, call_method, parameter_rrefs, rpc, seeded

WORKERS = ("trainer", "tables")
WORDS, WIDTH, HIDDEN, LAYERS, LENGTH, BATCH = 40, 16, 32, 2, 6, 8


class Embedding(nn.Module):
    """Words to vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        seeded(self, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.table(words)


class Decoder(nn.Module):
    """Outputs of the LSTM to scores of words."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(HIDDEN, WORDS)
        seeded(self, 2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.out(hidden)


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Words that count upward from a random one, and the words that follow."""
    draw = torch.Generator().manual_seed(step)
    words = (torch.randint(WORDS, (1, BATCH), generator=draw) + torch.arange(LENGTH + 1)[:, None]) % WORDS
    return words[:-1], words[1:]


class Driver:
    """The trainer."""

    def __init__(self) -> None:
        self.embedding = rpc.remote("tables", Embedding)
        self.decoder = rpc.remote("tables", Decoder)
        self.lstm = nn.LSTM(WIDTH, HIDDEN, LAYERS)
        seeded(self.lstm, 3)
        parameters = parameter_rrefs(self.lstm)
        for part in (self.embedding, self.decoder):
            parameters += call_method(parameter_rrefs, part)
        self.optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.5)
        self.state = (torch.zeros(LAYERS, BATCH, HIDDEN), torch.zeros(LAYERS, BATCH, HIDDEN))
        self.steps = 0

    def run(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            words, targets = make_batch(self.steps)
            self.steps += 1
            with autograd.context() as context:
                vectors = call_method(Embedding.forward, self.embedding, words)
                hidden, state = self.lstm(vectors, self.state)
                scores = call_method(Decoder.forward, self.decoder, hidden)
                loss = nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
                autograd.backward(context, [loss])
                self.optimizer.step(context)
            self.state = (state[0].detach(), state[1].detach())
            losses.append(loss.item())
        return losses


class PlainDriver:
    """The same model as a program of Backhaul has it: remote modules, ``loss.backward()``, an optimizer of torch."""

    def __init__(self) -> None:
        self.embedding = bh.nn.RemoteModule("tables", Embedding)
        self.decoder = bh.nn.RemoteModule("tables", Decoder)
        self.lstm = nn.LSTM(WIDTH, HIDDEN, LAYERS)
        seeded(self.lstm, 3)
        parameters = [each for part in (self.lstm, self.embedding, self.decoder) for each in part.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.5)
        self.state = (torch.zeros(LAYERS, BATCH, HIDDEN), torch.zeros(LAYERS, BATCH, HIDDEN))
        self.steps = 0

    def run(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            words, targets = make_batch(self.steps)
            self.steps += 1
            self.optimizer.zero_grad()
            hidden, state = self.lstm(self.embedding(words), self.state)
            loss = nn.functional.cross_entropy(self.decoder(hidden).flatten(0, 1), targets.flatten())
            loss.backward()
            self.optimizer.step()
            self.state = (state[0].detach(), state[1].detach())
            losses.append(loss.item())
        return losses
