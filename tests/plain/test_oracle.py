"""Random programs with ``torch.autograd.backward`` over workers: a part of ``make oracle``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backhaul._autograd.backward import leaves, ready_groups
from backhaul._autograd.forward import functions
from backhaul._autograd.torch_engine.hooks import node_hooks
from tools.oracle import OracleSetting, main, run

pytestmark = pytest.mark.filterwarnings("ignore:Using backward:UserWarning")  # plain autograd, with create_graph


@pytest.mark.parametrize(("order", "programs"), [(1, 45), (2, 12), (3, 6)])
@pytest.mark.parametrize("threads", [1, 3])
def test_random_programs(order: int, programs: int, threads: int) -> None:
    setting = OracleSetting(programs=programs, order=order, first=10_000 * order + 1000 * threads, threads=threads)
    verdict = run(setting)
    assert verdict.differences == {}
    assert verdict.left == {}
    assert verdict.compared == programs
    assert verdict.reached > programs // 4


def test_processes() -> None:
    verdict = run(OracleSetting(programs=30, order=2, first=50_000, workers=(3,), processes=True))
    assert (verdict.compared, verdict.differences, verdict.left) == (30, {}, {})


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("seed", [761, 1178])
def test_programs_that_once_differed(monkeypatch: pytest.MonkeyPatch, seed: int, hooks: bool) -> None:
    """A leaf and a tensor of another worker had one gradient. It changed in place when the leaf got another."""
    monkeypatch.setattr(node_hooks, "possible", hooks)
    verdict = run(OracleSetting(programs=1, first=seed, workers=(4,)))
    assert (verdict.compared, verdict.differences) == (1, {})


# It can fail.


def test_a_slightly_wrong_gradient_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add_to_grad = leaves.add_to_grad

    def bend(leaf: torch.Tensor, grad: torch.Tensor, **options: Any) -> None:
        add_to_grad(leaf, grad * (1 + 1e-6), **options)

    monkeypatch.setattr(leaves, "add_to_grad", bend)
    assert main(["--programs", "20", "--workers", "3"]) == 1
    assert "again: --programs 1 --order 1 --workers 3 --first" in capsys.readouterr().out


def test_a_lost_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fourth message arrives, but without its gradients."""
    arrive, calls = ready_groups.ReadyGroups.arrive, iter(range(1 << 30))

    def lose(self: ready_groups.ReadyGroups, source: Any, grads: Any, *rest: Any) -> Any:
        keep = source == functions.ROOTS or next(calls) % 4
        return arrive(self, source, grads if keep else [None] * len(grads), *rest)

    monkeypatch.setattr(ready_groups.ReadyGroups, "arrive", lose)
    assert len(run(OracleSetting(programs=24, workers=(3,))).differences) > 4
