"""A step outside contexts sends no more frames than the same step in a context."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator

import pytest
import torch

import backhaul as bh
from backhaul._autograd.messages import AutogradKind
from backhaul._sim.channel import SimChannel
from backhaul._sim.cluster import SimCluster
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Kind

Sent = collections.Counter[str]
COUNTED = {int(kind): kind.name for kind in (*AutogradKind, Kind.REQUEST, Kind.REPLY)}


def cube(x: torch.Tensor) -> torch.Tensor:
    return x.pow(3)


def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2, x * 3


weight = torch.ones(2, requires_grad=True)
weight.register_hook(lambda grad: grad * 2)


def weigh(x: torch.Tensor) -> torch.Tensor:
    return x * weight


def pass_on(x: torch.Tensor, path: list[int]) -> torch.Tensor:
    return bh.rpc_sync(path[0], pass_on, args=(x * 2, path[1:])) * 2 if path else x.sin()


def one_call(x: torch.Tensor) -> torch.Tensor:
    return bh.rpc_sync(1, cube, args=(x,))


def chain_of_four(x: torch.Tensor) -> torch.Tensor:
    for worker in (1, 2, 3, 4):
        x = bh.rpc_sync(worker, cube, args=(x,))
    return x


def fan_of_eight(x: torch.Tensor) -> torch.Tensor:
    futures = [bh.rpc_async(1 + number % 4, cube, args=(x * number,)) for number in range(8)]
    return torch.stack([future.wait() for future in futures])


def nested_calls(x: torch.Tensor) -> torch.Tensor:
    return bh.rpc_sync(1, pass_on, args=(x, [2, 3, 1]))


def result_of_two(x: torch.Tensor) -> torch.Tensor:
    return bh.rpc_sync(1, both, args=(x,))[0]


def shared_leaf(x: torch.Tensor) -> torch.Tensor:
    return bh.rpc_sync(1, weigh, args=(x,)) * bh.rpc_sync(1, weigh, args=(x * 2,)) + bh.rpc_sync(2, cube, args=(x,))


def unused_call(x: torch.Tensor) -> torch.Tensor:
    bh.rpc_sync(2, cube, args=(x,))
    return bh.rpc_sync(1, cube, args=(x,))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sent]:
    """Counts frames of all workers by kind."""
    found: Sent = collections.Counter()
    send = SimChannel.send

    def count(channel: SimChannel, frame: Frame, *, timeout: float | None = None) -> None:
        if frame.kind in COUNTED:
            found[COUNTED[frame.kind]] += 1
        send(channel, frame, timeout=timeout)

    monkeypatch.setattr(SimChannel, "send", count)
    yield found
    weight.grad = None


def in_context(forward: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    x = torch.ones(2, requires_grad=True)
    with bh.context() as ctx:
        ctx.backward(forward(x).sum())
        return ctx.grads[x].tolist()


def outside(forward: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    x = torch.ones(2, requires_grad=True)
    forward(x).sum().backward()
    assert x.grad is not None
    return x.grad.tolist()


def frames(
    sent: Sent, step: Callable[[Callable[[torch.Tensor], torch.Tensor]], list[float]], forward: Callable[..., object]
) -> tuple[Sent, object]:
    """The frames of one step after another, and its gradient."""
    with SimCluster(5, seed=1) as cluster:
        for _ in range(2):
            cluster.sleep(5.0)
            sent.clear()
            gradient = cluster.run("worker0", lambda: step(forward)).result()  # type: ignore[arg-type]
            cluster.sleep(5.0)
        assert not cluster.leftovers()
        return sent.copy(), gradient


@pytest.mark.parametrize(
    "forward",
    [one_call, chain_of_four, fan_of_eight, nested_calls, result_of_two, shared_leaf],
    ids=lambda f: f.__name__,
)
def test_a_step_that_uses_all_messages(sent: Sent, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
    inside, expected = frames(sent, in_context, forward)
    plain, gradient = frames(sent, outside, forward)
    assert gradient == expected
    assert not plain["DROP"]
    assert plain <= inside


def test_a_call_whose_result_is_not_used(sent: Sent) -> None:
    """Its worker hears that nobody uses the result. In a context it would hear of the release instead."""
    inside, expected = frames(sent, in_context, unused_call)
    plain, gradient = frames(sent, outside, unused_call)
    assert gradient == expected
    assert plain.pop("DROP") <= inside.pop("RELEASE")
    assert plain <= inside
