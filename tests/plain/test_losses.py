"""Passes outside contexts through graphs that are gone: the error says whether a pass or a loss is the reason."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

import backhaul as bh
from backhaul._autograd.backward.engine import Engine
from backhaul._autograd.backward.record_lifetimes import missing_of
from backhaul._autograd.forward.functions import PlainRecv, claim
from tests.autograd.worlds import expect_no_records, vector


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def pass_on(to: str, x: torch.Tensor) -> torch.Tensor:
    return bh.rpc_sync(to, double, args=(x,)) * 3  # type: ignore[no-any-return]


def lose(worker: bh.Worker, lost: bh.Worker) -> None:
    """One worker takes another for lost, which knows nothing of that: a link is cut and heals. See ``PlainGraph``."""
    worker.part(Engine).container.plain.orphan(lost.info.id, lost.name, "silent for 10 s")


@pytest.mark.parametrize(
    ("call", "lost", "named"),
    [
        (lambda x: bh.rpc_sync("worker2", double, args=(x,)), 0, "worker2"),  # the other end of the driver
        (lambda x: bh.rpc_sync("worker1", pass_on, args=("worker2", x)), 1, "worker1"),
    ],
    ids=["the driver", "another"],
)
def test_a_graph_that_is_gone_with_a_lost_worker(
    call: Callable[[torch.Tensor], torch.Tensor], lost: int, named: str
) -> None:
    x = torch.ones(2, requires_grad=True)
    with bh.cluster(3) as workers:
        y = call(x)
        lose(workers[2], workers[lost])
        lose(workers[2], workers[lost])  # once more, with nothing to drop
        with pytest.raises(bh.PeerLostError) as caught:
            y.sum().backward()
        assert (caught.value.worker, caught.value.reason) == (named, "silent for 10 s")
        assert caught.value.message
        call(x).sum().backward()  # the next step goes well
        assert x.grad is not None


@pytest.mark.parametrize("allow_unused", [False, True])
@pytest.mark.parametrize(("loser", "lost"), [(2, 1), (1, 0)], ids=["the last", "in between"])
def test_gradients_of_inputs_behind_a_graph_that_is_gone(loser: int, lost: int, allow_unused: bool) -> None:
    """Nobody knows what lies behind it, so a pass for some inputs must not count them as unused."""
    x = torch.ones(2, requires_grad=True)
    with bh.cluster(3) as workers:
        y = bh.rpc_sync("worker1", pass_on, args=("worker2", x * 2))
        lose(workers[loser], workers[lost])
        with pytest.raises(bh.PeerLostError) as caught:
            torch.autograd.grad(y.sum(), [x], allow_unused=allow_unused)
        assert caught.value.reason == "silent for 10 s"
        y = bh.rpc_sync("worker1", pass_on, args=("worker2", x * 2))
        assert torch.autograd.grad(y.sum(), [x])[0].tolist() == [12, 12]


kept: torch.Tensor


def keep(x: torch.Tensor) -> torch.Tensor:
    global kept
    kept = x + 1
    return kept * 2


def use_kept() -> torch.Tensor:
    return kept * 3


@pytest.mark.parametrize("restricted", [False, True])
def test_inputs_behind_a_message_that_a_pass_has_freed(restricted: bool) -> None:
    """Two results depend on one message. The pass of the first frees it. As in one process, where that is noticed, the
    second pass raises; it must not leave the input without a gradient.
    """
    x = torch.ones(2, requires_grad=True)
    with bh.cluster(2):
        first = bh.rpc_sync("worker1", keep, args=(x * x,))
        second = bh.rpc_sync("worker1", use_kept)
        first.sum().backward()
        with pytest.raises(bh.errors.GraphFreedError):
            second.sum().backward(inputs=[x] if restricted else None)
    assert x.grad is not None
    assert x.grad.tolist() == [4, 4]


def test_a_graph_that_a_pass_has_freed() -> None:
    x = torch.ones(2, requires_grad=True)
    with bh.cluster(2) as workers:
        y = bh.rpc_sync("worker1", double, args=(x,))
        z = y.sum()
        z.backward()
        lose(workers[1], workers[0])  # later: it is not the reason
        with pytest.raises(bh.errors.GraphFreedError) as caught:
            (y * 2).sum().backward()
        assert caught.value.worker == "worker1"
        assert caught.value.message


def test_a_message_that_a_failed_pass_has_spent() -> None:
    """A pass spends a message, fails, and nobody hears of that: a channel is lost. The sender asks what is still there,
    and keeps its record. Later the message dies.
    """
    with bh.cluster(2) as workers:
        y = bh.rpc_sync(1, torch.sin, args=(vector(1.0),))
        (message,) = workers[1].part(Engine).container.plain.sends
        (end,) = (each for each in gc.get_objects() if type(each) is PlainRecv and each.message == message)
        assert missing_of([message]) == []
        claim([end], False, [])
        del y, end
        expect_no_records(workers)
        assert missing_of([message]) == [message]
