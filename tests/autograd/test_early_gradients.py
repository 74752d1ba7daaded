"""Gradients that a large graph sends while the engine still runs: a burst of them leaves in few writes."""

from __future__ import annotations

import pytest
import torch

import backhaul as bh
from backhaul._autograd.messages import AutogradKind
from backhaul._rpc.calls import send_pacing
from backhaul._transport.sockets.channel import SocketChannel
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._wire.frames import Frame

CALLS = 100


def sent_at_once(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many gradient messages of a fan of calls were written on their own."""
    alone, send = [], SocketChannel.send

    def noting(channel: SocketChannel, frame: Frame, *, timeout: float | None = None) -> None:
        if frame.kind == AutogradKind.GRADIENT:
            alone.append(frame)
        send(channel, frame, timeout=timeout)

    monkeypatch.setattr(SocketChannel, "send", noting)
    weight = torch.ones(3, requires_grad=True)
    with bh.cluster(2, endpoints=lambda: SocketEndpoint(secret=b"of this test")), bh.context() as context:
        futures = [bh.rpc_async("worker1", torch.mul, args=(weight, 2)) for _ in range(CALLS)]
        loss = torch.stack([y.sum() for y in bh.wait_all(futures)]).sum()
        bh.backward(context, [loss])
        assert bh.get_gradients(context)[weight].tolist() == [2.0 * CALLS] * 3
    return len(alone)


def test_a_burst_goes_out_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_pacing, "CLOSE_SECONDS", 60.0)  # however slow this machine is
    assert sent_at_once(monkeypatch) < CALLS // 2
