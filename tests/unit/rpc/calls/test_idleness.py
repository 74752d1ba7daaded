"""Callbacks that wait until a worker is idle."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import pytest

import backhaul as bh
from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.node import Node


@pytest.fixture
def client() -> Iterator[CallClient]:
    with bh.cluster(2) as workers:
        yield workers[0].part(Node).client


def test_all_who_wait_are_told(client: CallClient) -> None:
    """A shutdown and another wave of it, say: nothing happens later that would tell the second."""
    told: list[int] = []
    client.idleness.begin()
    client.idleness.when_idle(lambda: told.append(1))
    client.idleness.when_idle(lambda: told.append(2))
    assert not told
    client.idleness.end()
    assert told == [1, 2]


def test_one_who_makes_it_busy_keeps_the_others_waiting(client: CallClient) -> None:
    told: list[int] = []
    client.idleness.begin()
    client.idleness.when_idle(client.idleness.begin)
    client.idleness.when_idle(lambda: told.append(2))
    client.idleness.end()
    assert not told
    client.idleness.end()
    assert told == [2]
    assert bh.rpc_sync("worker1", operator.add, args=(1, 2)) == 3
