"""Those who wait until a worker is idle."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import pytest

import backhaul as bh
from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.node import Node


@pytest.fixture
def agent() -> Iterator[CallClient]:
    with bh.cluster(2) as workers:
        yield workers[0].part(Node).client


def test_all_who_wait_are_told(agent: CallClient) -> None:
    """A shutdown and another wave of it, say: nothing happens later that would tell the second."""
    told: list[int] = []
    agent.idleness.begin()
    agent.idleness.when_idle(lambda: told.append(1))
    agent.idleness.when_idle(lambda: told.append(2))
    assert not told
    agent.idleness.end()
    assert told == [1, 2]


def test_one_who_makes_it_busy_keeps_the_others_waiting(agent: CallClient) -> None:
    told: list[int] = []
    agent.idleness.begin()
    agent.idleness.when_idle(agent.idleness.begin)
    agent.idleness.when_idle(lambda: told.append(2))
    agent.idleness.end()
    assert not told
    agent.idleness.end()
    assert told == [2]
    assert bh.rpc_sync("worker1", operator.add, args=(1, 2)) == 3
