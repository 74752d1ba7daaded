"""Trains a transformer whose parts are on three workers with a plain PyTorch loop.

The loop is that of one process: only the line with ``bh.nn.split`` is new. ``--check`` trains once more without that
line, and compares the weights.

    python examples/plain_torch.py
    python examples/plain_torch.py --steps 20 --check
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import backhaul as bh

TOKENS, WIDTH, BATCH, LENGTH = 64, 64, 16, 32
PLACES = {"layers.0": "w1", "layers.1": "w1", "layers.2": "w2", "head": "w2"}


class Model(nn.Module):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def make_batch(number: int) -> torch.Tensor:
    """Sequences that count in steps of their own."""
    draw = torch.Generator().manual_seed(number)
    start, step = torch.randint(TOKENS, (2, BATCH, 1), generator=draw)
    return (start + step * torch.arange(LENGTH + 1)) % TOKENS


def train(steps: int, places: dict[str, str] | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train a model. Returns the losses and the weights."""
    torch.manual_seed(0)
    model = Model()
    if places is not None:
        model = bh.nn.split(model, places)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for half in make_batch(step).chunk(2):  # the gradients of two halves are accumulated
            loss = nn.functional.cross_entropy(model(half[:, :-1]).transpose(1, 2), half[:, 1:]) / 2
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(2 * loss.item())
    return losses, model.state_dict()


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
    arguments = options.steps, options.check
    result = bh.launch(run, ["trainer", "w1", "w2"], args=arguments, start_method="forkserver")[0]
    print(f"loss of the first step {result['losses'][0]:.3f}, of the last {result['losses'][-1]:.3f}")
    if result["difference"] is not None:
        print(f"largest difference of a weight to one process: {result['difference']:.1e}")


if __name__ == "__main__":
    main()
