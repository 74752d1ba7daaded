"""Random training runs whose steps are made with ``retry_step``, and the same runs in one process.

Nothing here knows who loses workers, or when. The results of both runs must be equal to the last bit.
"""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import backhaul as bh

OPTIMIZERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("Adam", {"lr": 0.05, "amsgrad": True}),
    ("AdamW", {"lr": 0.05}),
    ("RMSprop", {"lr": 0.02, "foreach": True}),
    ("Adagrad", {"lr": 0.1}),
)
_WIDTH = 6
_ROWS = 5


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """One training run.

    Attributes:
        seed: Determines the weights and the data.
        places: The worker of each block of the model but the last, which is on the worker that trains.
        steps: How many steps there are.
        optimizer: The index of the optimizer.
        distributed: Whether a ``DistributedOptimizer`` makes the updates.
        context: For that optimizer: whether gradients are in a context.
        accumulate: How many steps there are for each update.
        clip: Whether gradients are clipped.
        scale: Whether losses are scaled.
        schedule: Whether the learning rate changes.
        snapshot_every: See ``retry_step``.
    """

    seed: int
    places: tuple[str, ...]
    steps: int = 6
    optimizer: int = 0
    distributed: bool = False
    context: bool = False
    accumulate: int = 1
    clip: bool = False
    scale: bool = False
    schedule: bool = True
    snapshot_every: int = 1


def draw_plan(draw: random.Random, workers: Sequence[str], steps: int) -> TrainingPlan:
    """Draw a run."""
    distributed = draw.random() < 0.3
    return TrainingPlan(
        draw.randrange(1 << 30),
        tuple(draw.choices(workers, k=draw.randint(2, 4))),
        steps,
        draw.randrange(len(OPTIMIZERS)),
        distributed,
        distributed and draw.random() < 0.5,
        1 if distributed else draw.choice((1, 1, 2)),
        draw.random() < 0.4,
        not distributed and draw.random() < 0.3,
        draw.random() < 0.6,
        draw.choice((1, 1, 1, 3)),
    )


class ResidualLayer(nn.Module):
    """A layer with parameters, running statistics and a number that counts its calls."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)
        self.norm: nn.Module = nn.BatchNorm1d(_WIDTH) if normed else nn.LayerNorm(_WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As any layer."""
        self.calls += 1
        return x + torch.tanh(self.norm(self.linear(x))) * (1.0 + 0.01 * self.calls)

    def rrefs(self) -> list[bh.RRef[Any]]:
        """References to the parameters."""
        return [bh.RRef(parameter) for parameter in self.parameters()]


@dataclasses.dataclass
class TrainingResult:
    """What a run has made. ``losses`` has one number for each step."""

    losses: list[float] = dataclasses.field(default_factory=list)
    weights: list[torch.Tensor] = dataclasses.field(default_factory=list)
    state: Any = None

    def differences(self, other: TrainingResult) -> list[str]:
        """What is not equal, as text."""
        found = [
            f"loss of step {n}"
            for n, pair in enumerate(zip(self.losses, other.losses, strict=True))
            if len(set(pair)) > 1
        ]
        pairs = zip(self.weights, other.weights, strict=True)
        found += [f"tensor {n}" for n, (one, two) in enumerate(pairs) if not torch.equal(one, two)]
        if not _are_equal(self.state, other.state):
            found.append("the state of the optimizer")
        return found


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


class _Training:
    """The objects of one run. ``places``: whether the blocks are on workers."""

    def __init__(self, plan: TrainingPlan, *, places: bool) -> None:
        self.plan = plan
        self._draw = torch.Generator().manual_seed(plan.seed)
        blocks = [self._block(index) for index in range(len(plan.places) + 1)]
        self.remote: list[Any] = []
        self.model: Any = nn.Sequential(*blocks)
        kind, options = OPTIMIZERS[plan.optimizer]
        make: Any = getattr(torch.optim, kind)
        self.optimizer: Any
        if places and plan.distributed:
            self.remote = [bh.remote(to, _same, args=(block,)) for to, block in zip(plan.places, blocks, strict=False)]
            self.model = blocks[-1]
            params = [rref for each in self.remote for rref in each.rpc_sync().rrefs()]
            self.optimizer = bh.optim.DistributedOptimizer(make, [*params, *self.model.rrefs()], **options)
        else:
            if places:
                self.model = bh.nn.split(self.model, {str(n): to for n, to in enumerate(plan.places)})
            self.optimizer = make(self.model.parameters(), **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=plan.scale)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.7) if plan.schedule else None
        self.data = [torch.randn(_ROWS, _WIDTH, generator=self._draw) for _ in range(plan.steps)]

    @property
    def state(self) -> list[Any]:
        """What steps change."""
        found = [*self.remote, self.model, self.optimizer, self.scaler]
        return found if self.scheduler is None else [*found, self.scheduler]

    def _block(self, index: int) -> ResidualLayer:
        made = ResidualLayer(normed=bool(index % 2))
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.5, generator=self._draw)
        return made

    def step(self, batch: torch.Tensor, last: bool) -> float:
        """A step. ``last``: whether it is followed by an update."""
        if not (self.plan.distributed and self.plan.context):
            return self._step(batch, last, None)
        with bh.context() as ctx:
            return self._step(batch, last, ctx)

    def plain_step(self, batch: torch.Tensor, last: bool) -> float:
        """The same in one process."""
        return self._step(batch, last, None)

    def _step(self, batch: torch.Tensor, last: bool, ctx: bh.ContextHandle | None) -> float:
        x = batch
        for each in self.remote:
            x = each.rpc_sync().forward(x)
        loss: torch.Tensor = self.model(x).square().mean()
        if ctx is not None:
            ctx.backward(loss)
        else:
            self.scaler.scale(loss).backward()
        if not last:
            return loss.item()
        if self.plan.clip:
            self._clip(ctx)
        if self.remote:
            self.optimizer.step(ctx)
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()
        if ctx is None:
            self.optimizer.zero_grad()
        return loss.item()

    def _clip(self, ctx: bh.ContextHandle | None) -> None:
        if self.remote:
            bh.optim.clip_grad_norm_(ctx, self.optimizer, max_norm=0.5)
        else:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=0.5)

    def result(self, losses: list[float]) -> TrainingResult:
        """What the run has made."""
        states = [each.rpc_sync().state_dict() for each in self.remote]
        weights = [value for each in (*states, self.model.state_dict()) for value in each.values()]
        return TrainingResult(losses, weights, self.optimizer.state_dict()["state"])


def _same(block: ResidualLayer) -> ResidualLayer:
    return block


def _is_last(plan: TrainingPlan, number: int) -> bool:
    return number % plan.accumulate == plan.accumulate - 1


def train_plainly(plan: TrainingPlan) -> TrainingResult:
    """Run it in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = _Training(plan, places=False)
        losses = [training.plain_step(batch, _is_last(plan, n)) for n, batch in enumerate(training.data)]
        return training.result(losses)


def train(
    plan: TrainingPlan,
    *,
    wait: float = 30.0,
    attempts: int = 6,
    before: Callable[[int], object] = lambda number: None,
) -> TrainingResult:
    """Run it over workers. ``before`` is called before each step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training, losses = _Training(plan, places=True), []
        for number, batch in enumerate(training.data):
            before(number)
            given = batch, _is_last(plan, number)
            losses.append(
                bh.retry_step(
                    training.step,
                    training.state,
                    given,
                    attempts=attempts,
                    wait=wait,
                    snapshot_every=plan.snapshot_every,
                )
            )
        return bh.retry_step(training.result, training.state, (losses,), attempts=attempts, wait=wait)
