"""What every pod of the manifests in this folder runs: rank 0 trains a model whose layers live on the other workers.

Build an image with torch, backhaul and this file as /app/train.py. To try it here: ``torchrun --nproc-per-node 2
examples/kubernetes/train.py``.
"""

from __future__ import annotations

import torch
from torch import nn

import backhaul as bh


def train(names: list[str], steps: int = 20) -> float:
    torch.manual_seed(0)
    layers = [layer for _ in names for layer in (nn.Linear(16, 16), nn.Tanh())]
    places = {str(2 * index): name for index, name in enumerate(names)}
    model = bh.nn.split(nn.Sequential(*layers, nn.Linear(16, 1)), places)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss = torch.zeros(())
    for _ in range(steps):
        x = torch.randn(64, 16)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def main() -> None:
    me = bh.init()
    if me.info.id == 0:
        others = [info.name for info in bh.get_worker_infos() if info.id != 0]
        print(f"loss {train(others):.3f} with {len(others)} other workers", flush=True)
        bh.shutdown()
    else:
        bh.serve()  # the pod succeeds only if the work was finished


if __name__ == "__main__":
    main()
