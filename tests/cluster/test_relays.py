"""Workers that do not listen, as processes of this host over TCP: how others find them, what a relay that lies can do,
and the limits of relays. Behind NAT: ``test_nat``.
"""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

import backhaul as bh
from backhaul._rpc.cluster.peers import Peer
from backhaul._rpc.cluster.relay_choice import ANCHORS, anchors_of
from backhaul._rpc.cluster.relaying import RELAYED, Help, Relaying, take_leg
from backhaul._rpc.node import Node
from backhaul._transport.sockets.certificates import issue
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._transport.sockets.tls import Credentials
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Hello, Kind, pack

from .hosts import wait_for
from .processes import run_processes

SECRET = "the secret of the relays"
SECONDS = 60.0


def start(rank: int, size: int, folder: pathlib.Path, listen: bool, **given: Any) -> bh.Worker:
    security = bh.Security(secret=SECRET, **given.pop("security", {}))
    rest = {"rendezvous_timeout": 30.0, "shutdown_timeout": 20.0, "init_method": f"file://{folder}/store"}
    options = bh.Options(transport="tcp", listen=listen, security=security, **rest, **given)
    return bh.init(rank=rank, world_size=size, options=options)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def gradient_over(*names: str) -> list[float]:
    x = y = torch.ones(2, requires_grad=True)
    for name in names:
        y = bh.rpc_sync(name, triple, args=(y,))
    y.sum().backward()
    assert x.grad is not None
    found: list[float] = x.grad.tolist()
    return found


# Members that have no channel to such a worker.

PUBLIC = 4


def find_the_hidden_worker(rank: int, folder: pathlib.Path) -> Any:
    worker = start(rank, PUBLIC + 1, folder, rank < PUBLIC)
    node = worker.part(Node)
    found = None
    hidden = node.peers.find(f"worker{PUBLIC}")
    anchors = [record.id for record in anchors_of(hidden.record, node.peers.records)][:ANCHORS]
    if rank == PUBLIC:
        until(lambda: all(node.peers.with_id(anchor).channel for anchor in anchors), "no channels to its anchors")
        (folder / "anchored").touch()
    else:
        wait_for(folder / "anchored")
        if rank in anchors:  # the other side of a channel knows of it a moment before
            until(lambda: hidden.channel, "no channel from the hidden worker")
        found = rank in anchors, hidden.channel is not None, gradient_over(hidden.info.name)
        found += (hidden.channel is hidden.incoming, bool(hidden.channel and hidden.channel.relayed))
        (folder / f"called{rank}").touch()
    for number in range(PUBLIC):  # who shuts down opens channels
        wait_for(folder / f"called{number}")
    bh.shutdown()
    return found


def test_a_member_without_a_channel_has_itself_dialed(tmp_path: pathlib.Path) -> None:
    *public, _ = run_processes(find_the_hidden_worker, PUBLIC + 1, tmp_path)
    assert sorted(public) == [(False, False, [3, 3], True, False)] * 2 + [(True, True, [3, 3], True, False)] * 2


# A relay that lies. It knows the secret, so it can make a certificate of any name.


def lie(rank: int, folder: pathlib.Path) -> Any:
    worker = start(rank, 3, folder, rank == 0, connect_timeout=5.0)
    found: Any = None
    if rank == 0:
        (folder / "pretends").write_text(pretend(worker))
        take_the_place_of(worker, "worker2")
        (folder / "lies").touch()
    if rank == 1:
        wait_for(folder / "lies")
        with pytest.raises(bh.errors.AuthenticationError) as caught:
            bh.rpc_sync("worker2", triple, args=(torch.ones(1),))
        found = caught.value.worker
        (folder / "done").touch()
    if rank == 2:
        wait_for(folder / "done")
        found = wait_for(folder / "pretends"), worker.part(Node).peers.find("worker1").channel
    wait_for(folder / "done")
    bh.shutdown(graceful=False)
    return found


def pretend(worker: bh.Worker) -> str:
    """The relay opens the leg of worker1 itself, and says that it is worker1. Returns how that ends."""
    relaying, peers = worker.part(Relaying), worker.part(Node).peers
    endpoint, meant, name = worker.endpoint, peers.find("worker2"), "worker1"
    assert isinstance(endpoint, SocketEndpoint)
    until(lambda: meant.channel is not None, "worker2 has no channel to its anchor")
    legs = endpoint.relay.offer()
    assert legs is not None
    assert relaying._tell(meant, take_leg, (pack(legs[1]),))
    endpoint.use_relays(Credentials(issue(SECRET.encode(), name)))
    channel: Any = endpoint.connect_through(endpoint.addresses[0], legs[0], timeout=SECONDS)
    hello = Hello(meant.record.name, meant.record.incarnation, pack(peers.find(name).record))
    channel.send(Frame(Kind.HELLO, 0, pack(hello)))
    until(lambda: channel._connection.ended, "it was not refused")
    ended: str = channel._connection.ended
    return ended


def take_the_place_of(worker: bh.Worker, name: str) -> None:
    """From now on the relay is the other end of all connections that it is asked to relay."""
    endpoint = worker.endpoint
    assert isinstance(endpoint, SocketEndpoint)
    endpoint.use_relays(Credentials(issue(SECRET.encode(), name)))

    def help_itself(relaying: Relaying, asker: Peer, incarnation: str) -> Help:
        legs = endpoint.relay.offer()
        assert legs is not None
        relaying._begin(lambda: endpoint.accept_through(endpoint.addresses[0], legs[1], timeout=SECONDS))
        return Help(RELAYED, legs[0])

    Relaying.help = help_itself  # type: ignore[method-assign]


def test_a_relay_cannot_speak_for_either_end(tmp_path: pathlib.Path) -> None:
    _, refused, (pretended, channel) = run_processes(lie, 3, tmp_path)
    assert refused == "worker2"
    assert pretended.startswith("refused: ")
    assert "worker1" in pretended
    assert channel is None


# Without trust, and limits.


@bh.expose
def exposed(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def without_trust(rank: int, folder: pathlib.Path) -> Any:
    # Each end would like lanes, which a relay has not: the tensor is large enough for them.
    worker = start(rank, 4, folder, rank < 2, security={"trusted": False, "tls": "auto"}, lanes=4)
    found = None
    if rank == 3:
        x = torch.ones(1 << 21, requires_grad=True)
        y = bh.rpc_sync("worker0", exposed, args=(bh.rpc_sync("worker2", exposed, args=(x,)),))
        y.sum().backward()
        channel = worker.part(Node).peers.find("worker2").channel
        assert x.grad is not None
        assert channel is not None
        found = x.grad.unique().tolist(), channel.relayed
    bh.shutdown()
    return found


def test_members_that_do_not_trust_each_other(tmp_path: pathlib.Path) -> None:
    assert run_processes(without_trust, 4, tmp_path)[3] == ([9], True)


def come_again(rank: int, folder: pathlib.Path) -> Any:
    security = {"trusted": False, "tls": "auto"}
    if rank == 4:
        process = int(wait_for(folder / "died"))
        until(lambda: not psutil.pid_exists(process), "the worker does not die")  # until then it is a member
        given = bh.Security(secret=SECRET, **security)
        options = bh.Options(transport="tcp", listen=False, security=given, rendezvous_timeout=SECONDS)
        bh.init("worker2", join=wait_for(folder / "address"), options=options)
        wait_for(folder / "done")
        bh.shutdown(graceful=False)
        return None
    worker = start(rank, 4, folder, rank < 2, security=security)
    found: list[Any] = []
    if rank == 0:
        (folder / "part").write_text(bh.get_address())
        (folder / "part").rename(folder / "address")
    if rank == 2:
        wait_for(folder / "called")
        (folder / "dies").write_text(str(os.getpid()))
        (folder / "dies").rename(folder / "died")
        os._exit(0)
    if rank == 3:
        seen: set[str] = set()
        deadline = time.monotonic() + SECONDS
        while len(seen) < 2:
            assert time.monotonic() < deadline
            try:
                assert bh.rpc_sync("worker2", exposed, args=(torch.ones(1),)).item() == 3
            except (bh.PeerLostError, bh.errors.UnknownWorkerError):
                continue
            peer = worker.part(Node).peers.find("worker2")
            seen.add(peer.record.incarnation)
            (folder / "called").touch()
        found = [bool(peer.channel and peer.channel.relayed), len(seen)]
        (folder / "done").touch()
    wait_for(folder / "done")
    bh.shutdown(graceful=False)
    return found


def test_a_worker_that_comes_again_without_trust(tmp_path: pathlib.Path) -> None:
    assert run_processes(come_again, 5, tmp_path)[3] == [True, 2]


def nothing_is_relayed(rank: int, folder: pathlib.Path) -> Any:
    start(rank, 3, folder, rank == 0, limits=bh.Limits(relayed=0), connect_timeout=1.0)
    found = None
    if rank == 2:
        assert gradient_over("worker0") == [3, 3]
        with pytest.raises(bh.PeerLostError) as caught:
            gradient_over("worker1")
        found = caught.value.worker, "limits.relayed" in str(caught.value)
        (pathlib.Path(folder) / "done").touch()
    wait_for(folder / "done")
    bh.shutdown(graceful=False)
    return found


def test_a_member_that_relays_nothing(tmp_path: pathlib.Path) -> None:
    assert run_processes(nothing_is_relayed, 3, tmp_path)[2] == ("worker1", True)


# A relay that leaves.


def lose_relays(rank: int, folder: pathlib.Path) -> Any:
    worker = start(rank, 5, folder, rank < 3)
    node, found = worker.part(Node), []
    if rank == 4:
        for number in range(3):
            deadline = time.monotonic() + SECONDS
            while True:
                try:
                    assert gradient_over("worker3", "worker3") == [9, 9]
                    break
                except (bh.PeerLostError, bh.errors.GraphFreedError):  # the relay has left during the call
                    assert time.monotonic() < deadline
            channel = node.peers.find("worker3").channel
            assert channel is not None
            found.append(channel.peer)
            address = channel.peer.removeprefix("relayed by ")
            if number < 2:
                leaver = next(peer.record.id for peer in node.peers if address in peer.record.addresses)
                (folder / f"leave{leaver}").touch()
                until(lambda channel=channel: channel._connection.ended, "its relay does not leave")
        (folder / "done").touch()
    while rank < 3 and not (folder / "done").exists():
        if (folder / f"leave{rank}").exists():
            bh.leave()
            return None
        time.sleep(0.01)
    wait_for(folder / "done")
    bh.shutdown(graceful=False)
    return found


def test_relays_that_leave_are_replaced(tmp_path: pathlib.Path) -> None:
    """Two of three: the last one is neither an anchor of the first choice nor asked first."""
    *_, found = run_processes(lose_relays, 5, tmp_path)
    assert len(set(found)) == 3


# What else two such workers do with each other.


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int) -> int:
        self.count += number
        return self.count


def use_everything(rank: int, folder: pathlib.Path) -> Any:
    worker = start(rank, 3, folder, rank == 0)
    if rank == 2:
        bh.serve()
        return None
    if rank == 0:
        wait_for(folder / "done")
        relayed = bh.get_debug_info()["num_relayed"]
        bh.shutdown()
        return relayed
    counter = bh.remote("worker2", Counter)
    numbers = [counter.rpc_sync().add(number) for number in (1, 2)]
    torch.manual_seed(0)
    local = torch.nn.Linear(3, 2)
    module = bh.nn.RemoteModule("worker2", torch.nn.Linear, args=(3, 2))
    module.load_state_dict(local.state_dict())
    x = torch.ones(2, 3)
    with bh.context() as context:
        loss = module(x).square().sum()
        bh.backward(context, [loss])
        bh.optim.DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.1).step(context)
    local(x).square().sum().backward()
    torch.optim.SGD(local.parameters(), lr=0.1).step()
    torch.testing.assert_close(dict(module.state_dict()), dict(local.state_dict()))
    channel = worker.part(Node).peers.find("worker2").channel
    (folder / "done").touch()
    bh.shutdown()
    return numbers, channel is not None and channel.relayed


def test_references_modules_optimizers_and_serve(tmp_path: pathlib.Path) -> None:
    assert run_processes(use_everything, 3, tmp_path) == [1, ([1, 3], True), None]
