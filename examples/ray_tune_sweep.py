"""Tries learning rates with Ray Tune. Each trial is a cluster of its own: a driver, and a worker with half a model.

Ray Tune reserves a placement group for each trial. The trial starts its worker in that group, trains, and reports. So
Ray runs as many trials at a time as it has room for. ``--check`` trains once more in one process, and compares.

    python examples/ray_tune_sweep.py
    python examples/ray_tune_sweep.py --rates 0.003 0.03 --steps 20 --check
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import ray
import torch
from ray import tune
from torch import nn

import backhaul as bh

WORKERS = 1
PLACES = {"0": "worker1"}
SHARE = {"CPU": 0.3}  # what each process of a trial asks for: little, so that trials fit on a small machine


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points, and how far they are from the origin."""
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(64, 4, generator=draw)
    return x, x.norm(dim=1, keepdim=True)


def train(rate: float, steps: int, places: dict[str, str] | None) -> float:
    """Train a model. Returns the loss of the last step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    if places is not None:
        model = bh.nn.split(model, places)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    loss = torch.zeros(())
    for step in range(steps):
        x, y = make_batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


def trial(config: dict[str, Any]) -> None:
    """Runs in a process of its own, which is the driver of the trial's cluster."""
    with bh.ray.start(WORKERS, resources=SHARE, placement=ray.util.get_current_placement_group()):
        loss = train(config["rate"], config["steps"], PLACES)
    alone = train(config["rate"], config["steps"], None) if config["check"] else loss
    tune.report({"loss": loss, "difference": abs(loss - alone)})


def main() -> None:
    """Run the trials and print what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.001, 0.003, 0.01, 0.03], help="learning rates")
    parser.add_argument("--steps", type=int, default=100, help="training steps of a trial (default 100)")
    parser.add_argument("--check", action="store_true", help="compare the losses with those of one process")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("at least 1 step")
    space = {"rate": tune.grid_search(options.rates), "steps": options.steps, "check": options.check}
    group = tune.PlacementGroupFactory([SHARE] * (1 + WORKERS))  # the trial itself runs in the first bundle
    with tempfile.TemporaryDirectory() as folder:
        tuner = tune.Tuner(
            tune.with_resources(trial, group),
            param_space=space,
            tune_config=tune.TuneConfig(metric="loss", mode="min"),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        )
        results = tuner.fit()
    for result in results:
        if result.error is not None:
            raise result.error
        print(f"rate {result.config['rate']:g}: loss {result.metrics['loss']:.4f}")
    print(f"best rate {results.get_best_result().config['rate']:g}")
    if options.check:
        worst = max(result.metrics["difference"] for result in results)
        print(f"largest difference of a loss to one process: {worst:.1e}")


if __name__ == "__main__":
    main()
