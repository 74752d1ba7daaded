"""Workers on three hosts, which are network namespaces on one bridge: where they listen, what they encrypt, and what
happens when a cable is pulled. Needs root and iproute2.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import backhaul as bh
from backhaul._rpc.node import Node
from backhaul._transport.sockets import interfaces
from backhaul._transport.sockets.tcp_listener import TcpListener, listen_address

from .hosts import CABLE, Host, make_hosts, wait_all, wait_for
from .processes import run_processes

PROGRAMS = pathlib.Path(__file__).parent / "programs"
PORT = 29500  # of the store; each test has networks of its own
SECRET = "the secret of the namespaces"


def options(**given: Any) -> bh.Options:
    """Such that a test which fails ends soon."""
    return bh.Options(**{"rendezvous_timeout": 30.0, "shutdown_timeout": 20.0, **given})


def in_host(rank: int, hosts: list[Host], work: Callable[..., Any], secret: str | None, *args: Any) -> Any:
    hosts[rank].enter()
    if secret is not None:
        os.environ["BACKHAUL_SECRET"] = secret
    return work(rank, hosts, *args)


def on_hosts(hosts: list[Host], work: Callable[..., Any], *args: Any, secret: str | None = SECRET) -> list[Any]:
    """Call ``work(rank, hosts, *args)`` in a process of each host; return the results."""
    return run_processes(in_host, len(hosts), hosts, work, secret, *args)


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def meet(rank: int, hosts: list[Host], given: bh.Options, master: str = "") -> bh.Worker:
    host = master or hosts[0].address
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(PORT), RANK=str(rank), WORLD_SIZE=str(len(hosts)))
    return bh.init(options=given)


def train(worker: bh.Worker) -> tuple[str, str]:
    """A step over all workers, which must be right. Returns this worker's TCP address and the kind of its channels."""
    others = [info for info in bh.get_worker_infos() if info.name != worker.name]
    x = torch.ones(3, requires_grad=True)
    y = x
    for other in others:
        y = bh.rpc_sync(other, scale, args=(y,))
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2 ** len(others)] * 3
    kinds = {type(worker.part(Node).peers.find(other.name).channel).__name__ for other in others}
    return bh.get_address(), " ".join(kinds)


def take_part(rank: int, hosts: list[Host], given: list[bh.Options], master: str = "") -> Any:
    found = train(meet(rank, hosts, given[rank], master))
    bh.shutdown()
    return found


def hosts_of(found: list[tuple[str, str]]) -> list[str]:
    return [address.removeprefix("tcp:").rpartition(":")[0] for address, _ in found]


@pytest.mark.parametrize("plain", [False, True])
def test_nothing_but_a_secret_is_needed(hosts: list[Host], plain: bool) -> None:
    given = options(security=bh.Security(allow_plain=plain))
    master = hosts[0].name if plain else hosts[0].address  # the name means 127.0.1.1 on the host that has it
    found = on_hosts(hosts, take_part, [given] * 3, master)
    assert hosts_of(found) == [host.address for host in hosts]
    assert {kind for _, kind in found} == {"LanedChannel" if plain else "TlsChannel"}


def test_ipv6(hosts: list[Host]) -> None:
    found = on_hosts(hosts, take_part, [options()] * 3, hosts[0].address6)
    assert hosts_of(found) == [f"[{host.address6}]" for host in hosts]


def test_every_way_to_name_an_address(hosts: list[Host]) -> None:
    """An interface; the own name, which means 127.0.1.1 on its host; all addresses."""
    given = [options(bind=f"if:{CABLE}"), options(bind=hosts[1].name), options(bind="0.0.0.0")]
    found = on_hosts(hosts, take_part, given)
    assert hosts_of(found) == [host.address for host in hosts]
    given = [
        options(bind="::"),
        options(bind=f"{hosts[1].address}:7000"),
        options(bind="0.0.0.0:7001", advertise="host3"),
    ]
    found = on_hosts(hosts, take_part, given)
    assert hosts_of(found) == [hosts[0].address, hosts[1].address, "host3"]
    assert [address.rpartition(":")[2] for address, _ in found[1:]] == ["7000", "7001"]


def test_link_local_addresses(hosts: list[Host]) -> None:
    """The scope in an address is a name of the host that has it; another host calls its interface differently."""
    hosts[2].ip("link", "set", CABLE, "down")
    hosts[2].ip("link", "set", CABLE, "name", "lan0")
    hosts[2].ip("link", "set", "lan0", "up")
    hosts[2].ip("addr", "add", f"{hosts[2].link_local}/64", "dev", "lan0", "nodad")
    given = [options(bind=f"{host.link_local}%{CABLE}") for host in hosts[:2]]
    found = on_hosts(hosts, take_part, [*given, options(bind=f"{hosts[2].link_local}%lan0")])
    assert [address.partition("%")[0] for address in hosts_of(found)] == [f"[{host.link_local}" for host in hosts]


# Errors of init.


def fail(rank: int, hosts: list[Host], folder: pathlib.Path, given: list[bh.Options]) -> Any:
    found = "fine", None, ""
    try:
        meet(rank, hosts, given[rank])
    except (bh.BackhaulError, ValueError) as error:
        found = type(error).__name__, getattr(error, "worker", None), str(error)
    (folder / f"came{rank}").touch()
    for other in range(len(hosts)):  # they may want to connect to this worker
        wait_for(folder / f"came{other}")
    bh.shutdown(graceful=False)
    return found


@pytest.mark.parametrize("wrong", [{"transport": "unix"}, {"bind": "127.0.0.1"}], ids=str)
def test_a_host_that_does_not_listen(hosts: list[Host], wrong: dict[str, Any], tmp_path: pathlib.Path) -> None:
    found = on_hosts(hosts, fail, tmp_path, [options(), options(), options(**wrong)])
    assert [each[:2] for each in found] == [("RendezvousError", "worker2")] * 3


def test_a_secret_that_is_missing(hosts: list[Host], tmp_path: pathlib.Path) -> None:
    found = on_hosts(hosts[:2], fail, tmp_path, [options()] * 2, secret=None)
    assert [each[:2] for each in found] == [("RendezvousError", "worker0")] * 2
    assert all("BACKHAUL_SECRET" in text and "\n" not in text for _, _, text in found)


def test_a_secret_that_only_some_have(hosts: list[Host], tmp_path: pathlib.Path) -> None:
    given = [options(security=bh.Security(secret=SECRET), rendezvous_timeout=2.0), options()]
    found = on_hosts(hosts[:2], fail, tmp_path, given, secret=None)
    assert found[1][0] == "RendezvousError"
    assert "rank 0 has a secret" in found[1][2]


def test_a_secret_that_is_easy_to_guess(hosts: list[Host], tmp_path: pathlib.Path) -> None:
    found = on_hosts(hosts[:2], fail, tmp_path, [options()] * 2, secret="secret")
    assert [kind for kind, _, _ in found] == ["ValueError"] * 2


@pytest.mark.parametrize("security", [bh.Security(), bh.Security(allow_plain=True)], ids=["tls", "plain"])
def test_a_wrong_secret(hosts: list[Host], security: bh.Security, tmp_path: pathlib.Path) -> None:
    right = options(security=security)
    wrong = options(security=bh.Security(secret="another secret than theirs", allow_plain=security.allow_plain))
    found = on_hosts(hosts[:2], fail, tmp_path, [right, wrong])
    assert [worker for _, worker, _ in found] == ["worker1", "worker0"]
    # On a busy machine one may have ended before the other tried it.
    assert "AuthenticationError" in {kind for kind, _, _ in found} <= {"AuthenticationError", "RendezvousError"}


def test_an_address_that_does_not_answer(hosts: list[Host], tmp_path: pathlib.Path) -> None:
    nowhere = options(advertise=f"{hosts[0].address.rpartition('.')[0]}.99")
    found = on_hosts(hosts[:2], fail, tmp_path, [options(connect_timeout=1.0), nowhere])
    assert found[0][:2] == ("RendezvousError", "worker1")


def look_around(rank: int, hosts: list[Host]) -> dict[str, Any]:
    def text_of(bind: str | None) -> str:
        try:
            listen_address(bind)
        except ValueError as error:
            return str(error)
        raise AssertionError("no error")

    wrong = ["if:eth9", "if:empty0", hosts[0].link_local, "0.0.0.0", None, "nobody"]
    found: dict[str, Any] = {str(bind): text_of(bind) for bind in wrong}
    with pytest.raises(ValueError) as caught:
        TcpListener(listen_address("10.1.2.3"))
    found["10.1.2.3"] = str(caught.value)
    found["towards"] = [interfaces.own_address(towards) for towards in ("10.213.0.2", "10.214.0.9")]
    return found


def test_errors_name_the_interfaces_there_are(hosts: list[Host]) -> None:
    """A host with two networks and no default route."""
    hosts[0].ip("link", "add", "second0", "type", "veth", "peer", "name", "empty0")
    hosts[0].ip("addr", "add", "10.214.0.1/24", "dev", "second0")
    hosts[0].ip("link", "set", "second0", "up")
    (found,) = on_hosts(hosts[:1], look_around)
    assert found.pop("towards") == ["10.213.0.1", "10.214.0.1"]
    assert f"'{hosts[0].link_local}%eth0'" in found.pop(hosts[0].link_local)
    for text in found.values():
        assert f"{CABLE} (10.213.0.1" in text
        assert "second0 (10.214.0.1)" in text


# Workers that come later.


def come_and_go(rank: int, hosts: list[Host], folder: pathlib.Path) -> Any:
    if rank < 2:
        worker = meet(rank, hosts[:2], options())
        if rank == 0:
            (folder / "part").write_text(bh.get_address())
            (folder / "part").rename(folder / "address")
        wait_for(folder / "done")
        bh.shutdown(graceful=False)
        return worker.name
    found = []
    for name in ("late", "late", "later"):
        worker = bh.init(name, join=wait_for(folder / "address"), options=options())
        found.append(train(worker))
        bh.leave()
    (folder / "done").touch()
    return found


def test_workers_that_come_later_or_again(hosts: list[Host], tmp_path: pathlib.Path) -> None:
    *_, found = on_hosts(hosts, come_and_go, tmp_path)
    assert hosts_of(found) == [hosts[2].address] * 3
    assert {kind for _, kind in found} == {"TlsChannel"}


def begin_alone(rank: int, hosts: list[Host], folder: pathlib.Path) -> Any:
    """The first worker is the only one at the start, and says nothing of where it listens."""
    if rank == 0:
        worker = meet(0, hosts[:1], options())
    else:
        wait_for(folder / "begun")
        os.environ.update(MASTER_ADDR=hosts[0].address, MASTER_PORT=str(PORT), RANK="1", WORLD_SIZE="2")
        worker = bh.init(join=True, options=options())
    found: Any
    if rank == 0:
        found = bh.get_address()
        (folder / "begun").touch()
        wait_for(folder / "ended")
    else:
        found = train(worker)
        (folder / "ended").touch()
    bh.shutdown(graceful=False)
    return found


def test_workers_of_other_hosts_join_one_that_began_alone(hosts: list[Host], tmp_path: pathlib.Path) -> None:
    first, (address, kind) = on_hosts(hosts[:2], begin_alone, tmp_path)
    assert first.startswith(f"tcp:{hosts[0].address}:")
    assert address.startswith(f"tcp:{hosts[1].address}:")
    assert kind == "TlsChannel"


def begin_alone_with(rank: int, hosts: list[Host], given: bh.Options, master: str) -> str:
    meet(rank, hosts, given, master)
    address = bh.get_address()
    bh.shutdown()
    return address


def test_who_begins_alone_and_does_not_listen(hosts: list[Host]) -> None:
    """No secret, a secret that is too short, no other way to the store than from this host, or a wish."""
    for secret, given, master in (
        (None, options(), ""),
        ("short", options(), ""),
        (SECRET, options(), "127.0.0.1"),
        (SECRET, options(transport="unix"), ""),
    ):
        (found,) = on_hosts(hosts[:1], begin_alone_with, given, master, secret=secret)
        assert found.startswith("unix:")


# A cable that is pulled.

LOST_SECONDS = 4.0  # a busy machine may keep a worker from its heartbeats for a while


def drive(rank: int, hosts: list[Host], folder: pathlib.Path) -> Any:
    """Rank 0 makes steps until the test has seen what it wants."""
    liveness = bh.Liveness(heartbeat_interval=0.2, suspect_after=0.8, lost_after=LOST_SECONDS)
    given = options(liveness=liveness, connect_timeout=1.0, backward_timeout=20.0)
    meet(rank, hosts, given)
    if rank:
        wait_for(folder / "end")
    else:
        step()
        (folder / "cut").touch()
        wait_for(folder / "is cut")
        begun = time.monotonic()
        with pytest.raises(bh.PeerLostError) as caught:
            step()
        took = time.monotonic() - begun
        assert caught.value.worker == "worker2"
        assert bh.rpc_sync("worker1", scale, args=(torch.ones(1),)) == 2  # the others go on
        (folder / "heal").touch()
        wait_for(folder / "is healed")
        deadline = time.monotonic() + 30  # TCP sends lost packets again after a while
        while True:
            try:
                step()
                break
            except bh.PeerLostError:  # the other worker may lose this one only now
                assert time.monotonic() < deadline
        (folder / "end").touch()
        bh.shutdown(graceful=False)
        return took
    bh.shutdown(graceful=False)
    return None


def step() -> None:
    x = torch.ones(3, requires_grad=True)
    y = bh.rpc_sync("worker2", scale, args=(bh.rpc_sync("worker1", scale, args=(x,)),))
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [4, 4, 4]


def test_a_cable_that_is_pulled_and_put_back(hosts: list[Host], tmp_path: pathlib.Path) -> None:
    def pull() -> None:
        wait_for(tmp_path / "cut")
        hosts[2].cut()
        (tmp_path / "is cut").touch()
        wait_for(tmp_path / "heal")
        hosts[2].heal()
        (tmp_path / "is healed").touch()

    thread = threading.Thread(target=pull)
    thread.start()
    took, *_ = on_hosts(hosts, drive, tmp_path)
    thread.join()
    # The failure detector's deadline, an attempt to connect again, and a wide margin for a busy machine. Without the
    # detector the call would wait for its timeout of 60 s.
    assert took < 30


# Large messages.


def send_much(rank: int, hosts: list[Host], folder: pathlib.Path, plain: bool) -> Any:
    """Rank 0 exchanges large tensors with the others over several connections, until one of them is killed."""
    me = meet(rank, hosts, options(security=bh.Security(allow_plain=plain), lanes="auto" if plain else 4))
    if rank == 0:
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(3 << 20, generator=draw)
        for _ in range(3):  # there are lanes from the first one on
            futures = [bh.rpc_async(f"worker{other}", scale, args=(x,)) for other in (1, 2)]
            assert all(torch.equal(future.wait(), 2 * x) for future in futures)
            assert bh.rpc_sync("worker1", scale, args=(torch.ones(1),)) == 2
        channels = [me.part(Node).peers.find(f"worker{other}").channel for other in (1, 2)]
        assert [getattr(channel, "lanes", 0) for channel in channels] == [16 if plain else 4] * 2
        large = bh.rpc_async("worker2", scale, args=(torch.zeros(64 << 20),))
        bh.rpc_async("worker2", os.kill, args=(bh.rpc_sync("worker2", os.getpid), 9))
        with pytest.raises(bh.PeerLostError):
            large.wait()
        assert torch.equal(bh.rpc_sync("worker1", scale, args=(x,)), 2 * x)
        (folder / "end").touch()
        bh.shutdown(graceful=False)
        return "as it should be"
    wait_for(folder / "end")
    bh.shutdown(graceful=False)
    return None


@pytest.mark.parametrize("plain", [False, True])
def test_large_messages_go_over_several_connections(hosts: list[Host], tmp_path: pathlib.Path, plain: bool) -> None:
    found = on_hosts(hosts, send_much, tmp_path, plain)
    assert found[0] == "as it should be"


# The whole: torchrun as users run it.


def test_torchrun_on_three_hosts(hosts: list[Host], tmp_path: pathlib.Path) -> None:
    """No options, no certificates, no addresses: a secret and torchrun's own arguments."""
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nnodes", "3", "--nproc-per-node", "1"]
    meeting = ["--master-addr", hosts[0].address, "--master-port", str(PORT)]
    environment = {"BACKHAUL_SECRET": SECRET, "OMP_NUM_THREADS": "1"}
    started = [
        host.start(
            *torchrun,
            *meeting,
            "--node-rank",
            str(rank),
            PROGRAMS / "under_torchrun.py",
            tmp_path,
            environment=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, host in enumerate(hosts)
    ]
    assert wait_all(started) == [0, 0, 0], [process.stderr and process.stderr.read() for process in started]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    for rank, each in enumerate(found):
        assert each["me"] == f"worker{rank}"
        assert each["names"] == ["worker0", "worker1", "worker2"]
        assert each["served"] == ["worker0", "worker1", "worker2"]
        assert each["sum"] == [1 + rank] * 2
        assert each["again"] == "again0"


def test_one_host_needs_no_network(tmp_path: pathlib.Path) -> None:
    """Workers of one host stay with their Unix sockets, with a secret too."""
    with make_hosts(1, tmp_path) as hosts:
        found = on_hosts(hosts * 2, take_part, [options()] * 2, "127.0.0.1")
    assert [address.partition(":")[0] for address, _ in found] == ["unix", "unix"]
    assert {kind for _, kind in found} == {"SocketChannel"}
