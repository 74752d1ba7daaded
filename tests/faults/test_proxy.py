"""Connections that are cut, delayed, corrupted and half-closed on their way."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest
import torch

import backhaul as bh
from backhaul._rpc.node import Node, describe, shutdown_together, start_node
from backhaul._transport.sockets.addresses import parse
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul.testing.proxy import Proxy, flip

SECRET = b"of the tests of the proxy"


@dataclass
class Pair:
    """Two workers; the first, which is current, reaches the second through the proxy only."""

    proxy: Proxy
    near: Node
    far: Node


@contextlib.contextmanager
def through_proxy(timeout: float = 20.0) -> Iterator[Pair]:
    options = bh.Options(timeout=timeout, transport="tcp", shutdown_timeout=5, connect_timeout=5)
    ends = [SocketEndpoint(secret=SECRET, unix=False, bind="127.0.0.1") for _ in range(2)]
    near, far = (describe(name, n, ends[n], options, host=name) for n, name in enumerate(("near", "far")))
    _, where = parse(ends[1].addresses[0])
    assert isinstance(where, tuple)
    with Proxy(where) as proxy, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen: the second worker cannot go round the proxy
        near = msgspec.structs.replace(near, addresses=(f"tcp:127.0.0.1:{nobody.getsockname()[1]}",))
        seen = msgspec.structs.replace(far, addresses=(f"tcp:127.0.0.1:{proxy.port}",))
        nodes = [start_node(near, [near, seen], ends[0], options), start_node(far, [near, far], ends[1], options)]
        try:
            with nodes[0].worker:
                yield Pair(proxy, *nodes)
        finally:
            shutdown_together(nodes, graceful=False, timeout=5)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with through_proxy() as made:
        assert bh.rpc_sync("far", torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]
        yield made


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def wait(seconds: float) -> str:
    time.sleep(seconds)
    return "waited"


def works() -> bool:
    """Whether calls are right again; the first may still meet a connection that is just being closed."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return bh.rpc_sync("far", torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]
        except bh.PeerLostError:
            if time.monotonic() > deadline:
                raise


def test_a_delay_only_delays(pair: Pair) -> None:
    pair.proxy.delay = 0.05
    x = torch.randn(100_000, requires_grad=True)
    with bh.context() as ctx:
        bh.backward(ctx, [bh.rpc_sync("far", double, args=(x,)).sum()])
        assert torch.equal(bh.get_gradients(ctx)[x], torch.full_like(x, 2))


def test_a_cut_is_named_and_the_next_call_connects_again(pair: Pair) -> None:
    under_way = bh.rpc_async("far", wait, args=(0.3,))
    pair.proxy.cut()
    with pytest.raises(bh.PeerLostError) as caught:
        under_way.wait()
    assert caught.value.worker == "far"
    assert works()


def test_a_cut_that_lasts_is_named_and_heals(pair: Pair) -> None:
    pair.proxy.cut(refuse=True)
    for _ in range(3):
        with pytest.raises(bh.PeerLostError) as caught:
            bh.rpc_sync("far", wait, args=(0,))
        assert caught.value.worker == "far"
    pair.proxy.heal()
    assert works()


def test_a_cut_in_backward_is_named(pair: Pair) -> None:
    x = torch.randn(3, requires_grad=True)
    with bh.context() as ctx:
        loss = bh.rpc_sync("far", double, args=(x,)).sum()
        pair.proxy.cut(refuse=True)
        with pytest.raises(bh.PeerLostError):
            bh.backward(ctx, [loss])
    pair.proxy.heal()
    assert works()


def test_a_half_closed_connection_is_lost_and_named(pair: Pair) -> None:
    under_way = bh.rpc_async("far", wait, args=(0.3,))
    pair.proxy.half_close()
    with pytest.raises(bh.PeerLostError):
        under_way.wait()
    assert works()


@pytest.mark.parametrize("way", ["out", "back"])
@pytest.mark.parametrize("place", [0, 4, 6, 8, 14, 25], ids=["magic", "version", "flags", "count", "body", "payload"])
def test_a_corrupted_header_closes_the_channel_at_both_ends(
    pair: Pair, way: str, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A length that became too long may also just never be filled: then it is the timeout that tells."""
    pair.proxy.change[way] = _at_next(pair, way, place)  # type: ignore[index]
    with caplog.at_level(logging.WARNING, "backhaul"), pytest.raises((bh.PeerLostError, bh.CallTimeoutError)) as caught:
        bh.rpc_sync("far", torch.add, args=(torch.ones(2), 1), timeout=1.0)
    assert caught.value.worker == "far"
    pair.proxy.heal()
    if isinstance(caught.value, bh.CallTimeoutError):
        pair.proxy.cut()
        with contextlib.suppress(bh.PeerLostError):
            works()
    else:
        assert any("closing the channel" in record.getMessage() for record in caplog.records)
    assert works()


def _at_next(pair: Pair, way: str, place: int) -> object:
    """Flip the byte at ``place`` of what comes next in that direction."""
    done: list[int] = []

    def change(data: bytes, before: int) -> bytes:
        if done:
            return data
        done.append(before)
        return flip(before + place)(data, before)

    return change


def test_any_corrupted_byte_of_a_call_is_an_error_or_data_but_never_a_crash(pair: Pair) -> None:
    """Plain TCP has no integrity of its own: bytes of a tensor that change on their way change its values."""
    x = torch.arange(64.0)
    ended: dict[str, int] = {}
    for place in [*range(0, 160, 9), 200, 300]:
        pair.proxy.change["out"] = _at_next(pair, "out", place)  # type: ignore[assignment]
        try:
            found = bh.rpc_sync("far", double, args=(x,), timeout=1.0)
            how = "right" if torch.equal(found, x * 2) else "other values"
        except Exception as error:  # a name that became another's is an error of any kind
            how = type(error).__name__
        ended[how] = ended.get(how, 0) + 1
        pair.proxy.heal()
        if how not in ("right", "other values"):
            pair.proxy.cut()
            with contextlib.suppress(bh.PeerLostError):
                works()
        assert works()
    assert "other values" in ended
    assert set(ended) - {"right", "other values"}
