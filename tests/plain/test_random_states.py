"""Random numbers on other workers when the program restores its random state, as ``torch.utils.checkpoint`` does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import backhaul as bh
from backhaul._rpc.node import Node
from backhaul._rpc.random_marks import NONE, PeerStates, RandomNote, marks
from backhaul._worker.worker import current_worker
from tests.autograd.worlds import DEADLINE_SECONDS

Drop = Callable[[torch.Tensor], torch.Tensor]


class Layer:
    """The parameter of this worker."""

    weight = torch.ones(64, requires_grad=True)


def drop(x: torch.Tensor) -> torch.Tensor:
    """Dropout, behind a parameter of this worker."""
    return torch.dropout(x * Layer.weight, 0.5, True)


def drop_further(x: torch.Tensor) -> torch.Tensor:
    """Dropout on the next worker, then here."""
    return drop(bh.rpc_sync(2, drop, args=(x,)))


def take_grad() -> torch.Tensor | None:
    """The gradient of the parameter of this worker."""
    grad, Layer.weight.grad = Layer.weight.grad, None
    return grad


def seed(number: int) -> None:
    torch.manual_seed(number)


def checkpointed(worker: int, function: Drop, reentrant: bool | None) -> list[torch.Tensor | None]:
    """Output and gradients of two layers; ``reentrant``: of which kind their checkpoints are, None: there are none."""
    for number in range(3):
        bh.rpc_sync(number, seed, args=(number,))
    x = torch.linspace(1.0, 2.0, 64).requires_grad_()

    def layer(h: torch.Tensor) -> torch.Tensor:
        h = torch.sin(torch.dropout(h, 0.5, True))
        return torch.cos(bh.rpc_sync(worker, function, args=(h,))).exp() + bh.rpc_sync(worker, function, args=(h,))

    h = x
    for _ in range(2):
        h = layer(h) if reentrant is None else checkpoint(layer, h, use_reentrant=reentrant)
        h = h + bh.rpc_sync(worker, function, args=(h,))  # draws between the checkpoints
    h.sum().backward()
    after = bh.rpc_sync(worker, torch.rand, args=(3,))  # as if nothing had been repeated
    return [h.detach(), after, x.grad, *[bh.rpc_sync(number, take_grad) for number in range(3)]]


def compare(function: Drop, reentrant: bool) -> None:
    wanted = checkpointed(1, function, None)
    found = checkpointed(1, function, reentrant)
    torch.testing.assert_close(found, wanted)


def run(compared: tuple[Drop, bool]) -> None:
    if bh.get_worker_info().id == 0:
        compare(*compared)


@pytest.mark.parametrize("function", [drop, drop_further])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_over_processes(function: Drop, reentrant: bool) -> None:
    bh.launch(run, 3, args=((function, reentrant),), timeout=3 * DEADLINE_SECONDS, start_method="forkserver")


def test_workers_of_one_process_share_its_state() -> None:
    with bh.cluster(3):
        state = torch.get_rng_state()
        first = bh.rpc_sync(1, drop, args=(torch.ones(64),))
        torch.set_rng_state(state)
        assert torch.equal(bh.rpc_sync(2, drop, args=(torch.ones(64),)), first)


def lose_a_call() -> None:
    """The call that was to keep the state has failed: nobody can go back to it."""
    if bh.get_worker_info().id == 0:
        state, worker = torch.get_rng_state(), current_worker()
        peer = worker.part(Node).peers.find(1)
        note = marks.call(worker.incarnation, peer.record.incarnation)
        assert note is not None
        assert note.keep != NONE
        torch.set_rng_state(state)
        with pytest.raises(bh.BackhaulError, match="random state"):
            bh.rpc_sync(1, torch.rand, args=(3,))
        del state
        bh.rpc_sync(1, torch.rand, args=(3,))


def test_a_state_that_is_not_there() -> None:
    bh.launch(lose_a_call, 2, timeout=3 * DEADLINE_SECONDS, start_method="forkserver")


def test_what_torch_calls() -> None:
    """Checkpoints look the functions up by name each time. They are replaced while a worker runs only."""
    source = inspect.getsource(torch.utils.checkpoint) + inspect.getsource(torch.random.fork_rng)
    assert source.count("torch.get_rng_state()") == 3
    assert source.count("torch.set_rng_state(") == 3
    modules: tuple[Any, ...] = (torch, torch.random)
    names = ("get_rng_state", "set_rng_state")
    before = [getattr(module, name) for module in modules for name in names]
    with bh.cluster(1):
        assert not any(getattr(module, name) in before for module in modules for name in names)
    assert before == [getattr(module, name) for module in modules for name in names]


# What one worker is told.


def test_nothing_to_say() -> None:
    states = PeerStates([])
    assert states.idle
    assert states.call() is None


def test_a_state_is_kept_once_and_dropped() -> None:
    states = PeerStates([1])
    states.take(2)
    assert states.call() == RandomNote(keep=0)
    assert states.call() is None  # the marks are of an earlier state
    states.drop(1)
    assert states.call() is None
    states.drop(2)
    assert not states.idle
    assert states.call() == RandomNote(drop=(0,))
    assert states.idle


def test_back_and_forth() -> None:
    """As a checkpoint: a mark, a call, a mark around the repetition, back, the call again, and forth."""
    states = PeerStates([1])
    assert states.call() == RandomNote(keep=0)
    states.take(2)
    states.restore(1)
    assert states.call() == RandomNote(keep=1, restore=0)
    states.restore(2)
    states.drop(1)
    states.drop(2)
    assert states.call() == RandomNote(restore=1, drop=(0,))
    assert states.call() == RandomNote(drop=(1,))
    assert states.idle


def test_back_and_forth_without_a_call() -> None:
    states = PeerStates([1])
    states.take(2)
    states.restore(1)
    states.restore(2)
    states.drop(1)
    states.drop(2)
    assert states.idle


def test_a_mark_of_a_state_that_is_to_be_restored() -> None:
    states = PeerStates([1])
    states.call()
    states.restore(1)
    states.take(2)
    states.drop(1)
    assert states.call() == RandomNote(restore=0)
    states.restore(2)
    assert states.call() == RandomNote(restore=0)
