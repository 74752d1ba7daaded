"""Workers that come after the others, where that is allowed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import pytest

import backhaul as bh
from backhaul.rpc.node import Node, describe, start_node
from backhaul.rpc.peers import WorkerRecord
from backhaul.transport.base import EndpointFactory

from . import remote_functions as remote


def start(
    name: str, number: int, others: Iterable[Node], endpoints: EndpointFactory, *, open_to_others: bool = True
) -> Node:
    endpoint = endpoints()
    options = bh.Options()
    own: WorkerRecord = describe(name, number, endpoint, options, host="here")
    records = [other.peers.own.record for other in others]
    return start_node(own, [*records, own], endpoint, options, open_to_others=open_to_others)


@pytest.mark.parametrize("welcome", [True, False])
def test_a_newcomer_is_known_once_it_has_called_where_that_is_allowed(
    endpoints: EndpointFactory, welcome: bool
) -> None:
    with contextlib.ExitStack() as stack:
        first = start("first", 0, [], endpoints, open_to_others=welcome)
        stack.callback(first.shutdown, graceful=False, timeout=5)
        second = start("second", 1, [first], endpoints, open_to_others=welcome)
        stack.callback(second.shutdown, graceful=False, timeout=5)
        if not welcome:
            with second.worker, pytest.raises(bh.PeerLostError):
                bh.rpc_sync("first", remote.whoami)
            return
        with second.worker:
            assert bh.rpc_sync("first", remote.whoami) == "first"
        with first.worker:
            assert bh.rpc_sync("second", remote.whoami) == "second"
            first.peers.dismiss(1)
            with pytest.raises(bh.UnknownWorkerError):
                bh.rpc_sync("second", remote.whoami)


def test_a_newcomer_cannot_take_anothers_name_or_id(endpoints: EndpointFactory) -> None:
    with contextlib.ExitStack() as stack:
        first = start("first", 0, [], endpoints)
        stack.callback(first.shutdown, graceful=False, timeout=5)
        taken = first.peers.own.record
        assert first.peers.admit(taken) is None
        assert [peer.info.name for peer in first.peers] == ["first"]
