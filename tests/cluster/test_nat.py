"""Workers behind NAT: two hosts that can be dialed, and two that open all connections themselves and reach each other
through one of the first two. The hosts are network namespaces. Needs root, iproute2 and iptables.
"""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import backhaul as bh
from backhaul._rpc.node import Node
from backhaul._transport.sockets import relay

from .hosts import Host, make_hosts, wait_for
from .nat import INNER_ADDRESS, hide_hosts
from .processes import DIED, run_processes

PORT = 29500
SECRET = "the secret of the hidden hosts"
PUBLIC = 2
"""Ranks below this can be dialed."""

PROGRAMS = pathlib.Path(__file__).parent / "programs"


@pytest.fixture
def hosts(tmp_path: pathlib.Path) -> Iterator[list[Host]]:
    """Two hosts on a bridge, and two behind NAT."""
    with make_hosts(PUBLIC, tmp_path) as public, hide_hosts(2, public, tmp_path) as hidden:
        yield [*public, *hidden]


def options(rank: int, **given: Any) -> bh.Options:
    """Such that a test which fails ends soon."""
    liveness = bh.Liveness(heartbeat_interval=0.2, suspect_after=0.8, lost_after=4.0)
    rest = {"rendezvous_timeout": 30.0, "shutdown_timeout": 20.0, "liveness": liveness, "listen": rank < PUBLIC}
    return bh.Options(**{**rest, **given})


def in_host(rank: int, hosts: list[Host], work: Callable[..., Any], *args: Any) -> Any:
    hosts[rank].enter()
    os.environ.update(
        BACKHAUL_SECRET=SECRET,
        MASTER_ADDR=hosts[0].address,
        MASTER_PORT=str(PORT),
        RANK=str(rank),
        WORLD_SIZE=str(len(hosts)),
    )
    return work(rank, *args)


def on_hosts(hosts: list[Host], work: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``work(rank, *args)`` in a process of each host; return the results."""
    return run_processes(in_host, len(hosts), hosts, work, *args)


def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight)


def layer_and_back(x: torch.Tensor, weight: torch.Tensor, to: str) -> torch.Tensor:
    """Calls back to the worker at the other side of the relay."""
    return bh.rpc_sync(to, layer, args=(layer(x, weight), weight))


def relay_of(worker: bh.Worker, name: str) -> str:
    """Where the relay of the channel to a worker listens; empty: nobody relays it."""
    channel = worker.part(Node).peers.find(name).channel
    assert channel is not None
    return channel.peer.removeprefix("relayed by ") if channel.relayed else ""


# Training: worker2 drives, and worker3 is behind another router.


def weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(4, 4, generator=generator, requires_grad=True) for _ in range(3)]


def train(steps: int, far: Callable[..., torch.Tensor], near: Callable[..., torch.Tensor], retry: bool) -> list[Any]:
    """Gradient descent. A step that loses a worker is made again: nothing has changed before its end."""
    here = weights()
    for step in range(steps):
        x = torch.full((2, 4), 0.1 * (step + 1))
        deadline = time.monotonic() + 60
        while True:
            for weight in here:
                weight.grad = None
            try:
                near(far(layer(x, here[0]), here[1]), here[2]).square().sum().backward()
                break
            # A worker may give up a pass that began while it was busy with the loss before: that pass ends in time.
            except (bh.PeerLostError, bh.errors.GraphFreedError, bh.errors.BackwardTimeoutError):
                assert retry
                assert time.monotonic() < deadline
        with torch.no_grad():
            for place, weight in enumerate(here):
                assert weight.grad is not None
                here[place] -= 0.1 * weight.grad
    return [weight.tolist() for weight in here]


STEPS = 6


def alone() -> list[Any]:
    """The oracle: plain autograd in this process."""

    def twice(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return layer(layer(x, weight), weight)

    return train(STEPS, twice, layer, retry=False)


def train_and_lose_the_relay(rank: int, folder: pathlib.Path) -> Any:
    worker = bh.init(options=options(rank, backward_timeout=5.0))
    if rank == 2:
        relays = []

        def far(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            y = bh.rpc_sync("worker3", layer_and_back, args=(x, weight, "worker2"))
            relays.append(relay_of(worker, "worker3"))
            if len(relays) == 2:  # in the middle of a step
                (folder / "part").write_text(relays[0])
                (folder / "part").rename(folder / "relay")
                wait_for(folder / "killed")
            return y

        def near(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            there = [info.name for info in bh.get_worker_infos() if info.id < PUBLIC]
            return bh.rpc_sync(there[-1], layer, args=(x, weight))

        found = train(STEPS, far, near, retry=True)
        (folder / "done").touch()
        bh.shutdown(graceful=False)
        return found, relays
    deadline = time.monotonic() + 60
    while not (folder / "done").exists():
        assert time.monotonic() < deadline
        if rank < PUBLIC and (folder / "relay").exists() and (folder / "relay").read_text() == bh.get_address():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
    bh.shutdown(graceful=False)
    return None


def test_training_goes_on_when_its_relay_is_killed(hosts: list[Host], tmp_path: pathlib.Path) -> None:
    *public, (found, relays), _ = on_hosts(hosts, train_and_lose_the_relay, tmp_path)
    assert public.count(DIED) == 1
    assert all(relays), "nobody can dial the other worker"
    first, last = relays[0], relays[-1]
    assert first != last
    assert {address.split(":")[1] for address in (first, last)} == {host.address for host in hosts[:PUBLIC]}
    for weight, expected in zip(found, alone(), strict=True):
        torch.testing.assert_close(torch.tensor(weight), torch.tensor(expected))


# What a relay sees.


def known(seed: int) -> torch.Tensor:
    return torch.randn(1 << 14, generator=torch.Generator().manual_seed(seed))


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def send_known_tensors(rank: int, folder: pathlib.Path) -> Any:
    worker = bh.init(options=options(rank, security=bh.Security(allow_plain=True)))
    relayed = ""
    if rank == 2:
        for number in range(PUBLIC):
            wait_for(folder / f"tap{number}.ready")
            bh.rpc_sync(number, double, args=(known(number),))
        x = known(3).requires_grad_()
        bh.rpc_sync("worker3", double, args=(x,)).square().sum().backward()
        relayed = relay_of(worker, "worker3")
        (folder / "end").touch()
    bh.shutdown()
    return relayed


def pieces_in(recording: bytes, tensor: torch.Tensor) -> int:
    """How many of the tensor's pieces of 32 bytes a recording has; of a piece where a packet ends, only a half."""
    data = tensor.numpy().tobytes()
    return sum(
        data[place : place + 16] in recording or data[place + 16 : place + 32] in recording
        for place in range(0, len(data), 1 << 11)
    )


def test_a_relay_sees_no_plain_text(hosts: list[Host], tmp_path: pathlib.Path) -> None:
    """Where the cluster's own connections are not encrypted either, which shows that the wiretap works."""
    taps = [
        host.start(sys.executable, PROGRAMS / "wiretap.py", tmp_path / f"tap{number}.bin", tmp_path / "end")
        for number, host in enumerate(hosts[:PUBLIC])
    ]
    *_, relayed, _ = on_hosts(hosts, send_known_tensors, tmp_path)
    assert [tap.wait(30) for tap in taps] == [0] * PUBLIC
    assert relayed.split(":")[1] in [host.address for host in hosts[:PUBLIC]]
    for number, host in enumerate(hosts[:PUBLIC]):
        recording = (tmp_path / f"tap{number}.bin").read_bytes()
        assert pieces_in(recording, known(number)) == 32
        assert pieces_in(recording, known(3)) == 0
        assert pieces_in(recording, 2 * known(3)) == 0
        if host.address in relayed:
            assert len(recording) > 4 * known(3).nbytes, "the tensor, its double and their gradients, once in, once out"


# Members that call such a worker, and workers that come later or again.


def come_later(rank: int, folder: pathlib.Path) -> Any:
    if rank < 3:
        os.environ["WORLD_SIZE"] = "3"
        bh.init(options=options(rank))
        if rank == 0:
            (folder / "part").write_text(bh.get_address())
            (folder / "part").rename(folder / "address")
        found = []
        for number in (1, 2):
            wait_for(folder / f"come{number}")
            if rank == number - 1:  # a member that has no channel to it, as a rule: another one relays or tells it
                x = torch.ones(2, requires_grad=True)
                bh.rpc_sync("late", double, args=(x,)).sum().backward()
                assert x.grad is not None
                found.append(x.grad.tolist())
                (folder / f"called{number}").touch()
        wait_for(folder / "done")
        if rank == 2:
            assert bh.rpc_sync("late", double, args=(torch.ones(1),)).item() == 2
            (folder / "relayed").touch()
        wait_for(folder / "relayed")
        bh.shutdown(graceful=False)
        return found
    peers = []
    for number in (1, 2):  # comes, leaves, and comes again
        worker = bh.init("late", join=wait_for(folder / "address"), options=options(rank))
        (folder / f"come{number}").touch()
        wait_for(folder / f"called{number}")
        if number == 1:
            bh.leave()
    x = torch.ones(2, requires_grad=True)
    bh.rpc_sync("worker2", layer, args=(x, torch.eye(2))).sum().backward()
    assert x.grad is not None
    peers.append(bool(relay_of(worker, "worker2")))
    (folder / "done").touch()
    wait_for(folder / "relayed")
    bh.shutdown(graceful=False)
    return peers


def test_a_hidden_worker_that_comes_later_and_again(hosts: list[Host], tmp_path: pathlib.Path) -> None:
    assert on_hosts(hosts, come_later, tmp_path) == [[[2, 2]], [[2, 2]], [], [True]]


# Links that break.


def lose_the_link(rank: int, folder: pathlib.Path) -> Any:
    bh.init(options=options(rank))
    seen = []
    if rank in (1, 2):  # one that can be dialed, and one that cannot
        assert bh.rpc_sync("worker3", double, args=(torch.ones(1),)).item() == 2
        (folder / f"ready{rank}").touch()
        wait_for(folder / "is cut")
        with pytest.raises(bh.PeerLostError) as caught:
            bh.rpc_sync("worker3", double, args=(torch.ones(1),))
        seen.append(caught.value.worker)
        (folder / f"lost{rank}").touch()
        wait_for(folder / "is healed")
        deadline = time.monotonic() + 30  # TCP sends lost packets again after a while
        while True:
            try:
                assert bh.rpc_sync("worker3", double, args=(torch.ones(1),)).item() == 2
                break
            except bh.PeerLostError:
                assert time.monotonic() < deadline
        (folder / f"done{rank}").touch()
    for number in (1, 2):
        wait_for(folder / f"done{number}")
    bh.shutdown(graceful=False)
    return seen


def test_a_hidden_worker_is_cut_off_and_comes_back(hosts: list[Host], tmp_path: pathlib.Path) -> None:
    def pull() -> None:
        router = hosts[3].router  # type: ignore[attr-defined]
        for number in (1, 2):
            wait_for(tmp_path / f"ready{number}")
        router.cut()
        (tmp_path / "is cut").touch()
        for number in (1, 2):
            wait_for(tmp_path / f"lost{number}")
        router.heal()
        (tmp_path / "is healed").touch()

    thread = threading.Thread(target=pull)
    thread.start()
    found = on_hosts(hosts, lose_the_link, tmp_path)
    thread.join()
    assert found == [[], ["worker3"], ["worker3"], []]


def vanish_together(rank: int, folder: pathlib.Path) -> Any:
    if rank >= PUBLIC:
        bh.init(options=options(rank))
        if rank == 2:
            assert bh.rpc_sync("worker3", double, args=(torch.ones(1),)).item() == 2
            (folder / "ready").touch()
        wait_for(folder / "is cut")
        os.kill(os.getpid(), signal.SIGKILL)
    relay._KEEPALIVE = tuple((option, 1) for option, _ in relay._KEEPALIVE)
    bh.init(options=options(rank))
    wait_for(folder / "ready")
    found = bh.get_debug_info()["num_relayed"]
    (folder / f"counted{rank}").touch()
    wait_for(folder / "is cut")
    deadline = time.monotonic() + 60
    while bh.get_debug_info()["num_relayed"]:
        assert time.monotonic() < deadline, "the relay holds the connection for ever"
        time.sleep(0.05)
    bh.shutdown(graceful=False)
    return found


def test_a_relay_notices_that_both_ends_are_gone(hosts: list[Host], tmp_path: pathlib.Path) -> None:
    def pull() -> None:
        for number in range(PUBLIC):
            wait_for(tmp_path / f"counted{number}")
        for host in hosts[PUBLIC:]:
            host.router.cut()  # type: ignore[attr-defined]
        (tmp_path / "is cut").touch()

    thread = threading.Thread(target=pull)
    thread.start()
    found = on_hosts(hosts, vanish_together, tmp_path)
    thread.join()
    assert sum(found[:PUBLIC]) == 1
    assert found[PUBLIC:] == [DIED, DIED]


# Errors of init.


def fail(rank: int) -> Any:
    with pytest.raises(bh.errors.RendezvousError) as caught:
        bh.init(options=options(rank, listen=False))
    return caught.value.worker


def test_somebody_must_listen(hosts: list[Host]) -> None:
    assert on_hosts(hosts[:2], fail) == ["worker0", "worker0"]


def try_to_dial(rank: int, folder: pathlib.Path) -> Any:
    if rank == 2:
        with socket.create_server(("", PORT)):
            (folder / "listens").touch()
            wait_for(folder / "tried")
        return None
    if rank == 0:
        wait_for(folder / "listens")
        with pytest.raises(OSError):
            socket.create_connection((INNER_ADDRESS, PORT), 0.5)
        (folder / "tried").touch()
    return None


def test_the_hidden_hosts_are_hidden(hosts: list[Host], tmp_path: pathlib.Path) -> None:
    on_hosts(hosts[:3], try_to_dial, tmp_path)
    addresses = [host.ip("-4", "-br", "addr", "show", "dev", "cable") for host in hosts]
    assert [INNER_ADDRESS in address for address in addresses] == [False, False, True, True]
