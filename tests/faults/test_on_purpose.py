"""Faults on purpose."""

from __future__ import annotations

import pytest
import torch

import backhaul as bh
from backhaul._rpc.calls.pending_call import Pending
from backhaul._rpc.node import Node
from backhaul.testing.faults import Faults


def last_word(pending: Pending) -> list[str]:
    return [pending.label.rpartition(".")[2]]


def test_calls_are_lost_so_often_and_no_more() -> None:
    with bh.cluster(2):
        faults = Faults(last_word, lose=["add"], times=2)
        faults.install(bh.current_worker().part(Node).client)
        for _ in range(2):
            with pytest.raises(bh.PeerLostError):
                bh.rpc_sync("worker1", torch.add, args=(1, 2))
        assert bh.rpc_sync("worker1", torch.sub, args=(torch.ones(1), 1)) == 0
        assert bh.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1)) == 2


def test_a_late_call_times_out_if_it_may_not_take_so_long() -> None:
    with bh.cluster(2):
        faults = Faults(last_word, delay={"add": 0.2})
        faults.install(bh.current_worker().part(Node).client)
        with pytest.raises(bh.CallTimeoutError):
            bh.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1), timeout=0.05)
        assert bh.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1)) == 2


def test_a_reference_that_cannot_travel_is_blamed_itself() -> None:
    with bh.cluster(2):
        Faults(last_word, lose=["dict"]).install(bh.current_worker().part(Node).client)
        lost = bh.remote("worker1", dict)
        with pytest.raises(bh.PeerLostError, match="dict") as caught:
            bh.rpc_sync("worker1", len, args=(lost,))
        assert any("args[0]" in note for note in caught.value.__notes__)
