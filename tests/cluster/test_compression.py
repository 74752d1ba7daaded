"""Codecs in calls and passes over real sockets: which messages are compressed, with what error, and how many bytes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import backhaul as bh
from backhaul._rpc.node import Node
from backhaul._transport.base import EndpointFactory
from backhaul._transport.inproc import InprocEndpoint
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._wire.tensors.buffer_forms import LOSSY, readable_forms

from .mixed import mixed_cluster
from .processes import run_processes

TCP = functools.partial(SocketEndpoint, secret=b"the tests' own", unix=False, bind="127.0.0.1")
UNIX = functools.partial(SocketEndpoint, secret=b"the tests' own")
UNIX_ALONE = functools.partial(SocketEndpoint, secret=b"the tests' own", shm_bytes=0)
COUNT = 50_000
BYTES = 4 * COUNT
zstd = pytest.mark.skipif("zstd" not in readable_forms(), reason="zstd is not installed")


def options(compression: Any, **more: Any) -> bh.Options:
    return bh.Options(compression=compression, timeout=20, shutdown_timeout=10, **more)


@contextlib.contextmanager
def two(
    first: bh.Options, second: bh.Options, endpoints: EndpointFactory = TCP, hosts: tuple[str, ...] = ("left", "right")
) -> Iterator[list[bh.Worker]]:
    """Two workers; ``alice`` is current. By default they are on two hosts."""
    with mixed_cluster({"alice": first, "bob": second}, endpoints, hosts=hosts) as workers:
        yield workers


class Sent:
    """How many bytes each of two workers has sent in a block, in units of the large tensor. The receivers count them:
    a sender counts what it has sent when its system call returns, which may be after the answer.
    """

    def __init__(self, workers: list[bh.Worker]) -> None:
        self._workers = workers
        self.all: list[float] = []

    def __enter__(self) -> list[float]:
        self._before = self._read()
        return self.all

    def __exit__(self, *args: object) -> None:
        self.all += [(now - before) / BYTES for now, before in zip(self._read(), self._before, strict=True)]

    def _read(self) -> list[int]:
        found = [worker.part(Node).peers.connections.channels() for worker in reversed(self._workers)]
        return [sum(channel.bytes_received or 0 for channel, _ in channels) for channels in found]


@bh.expose
def echo(x: torch.Tensor) -> torch.Tensor:
    return x


@bh.expose
def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@bh.compression(None)
def exact(x: torch.Tensor) -> torch.Tensor:
    return x


@bh.compression(bh.Codec(forward="int8"))
def coarse(x: torch.Tensor) -> torch.Tensor:
    return x


def numbers(**how: Any) -> torch.Tensor:
    return torch.rand(COUNT, generator=torch.Generator().manual_seed(0), **how).add_(0.5).requires_grad_()


def approx(*units: float) -> Any:
    return pytest.approx(list(units), abs=0.06)


HALF = bh.Codec(forward="fp16", backward="bf16")


def test_calls_and_gradients() -> None:
    x = numbers()
    with two(options(HALF), options(HALF)) as workers:
        with Sent(workers) as sent:
            y = bh.rpc_sync("bob", triple, args=(x,))
        assert sent == approx(0.5, 0.5)
        assert y.requires_grad
        rounded = x.detach().half().float() * 3
        assert torch.equal(y.detach(), rounded.half().float())
        with Sent(workers) as sent:
            y.square().sum().backward()
        assert sent == approx(0.5, 0.5)
    # Gradients flow as if the values had been sent exactly: each is rounded to bfloat16 on the way.
    slope = (2 * y.detach()).bfloat16().float() * 3
    assert x.grad is not None
    assert torch.equal(x.grad, slope.bfloat16().float())


def test_each_side_decides_for_what_it_sends() -> None:
    x = numbers()
    for first, second, calls, passes in [
        (HALF, None, (0.5, 1), (0.5, 1)),
        (None, HALF, (1, 0.5), (1, 0.5)),
        ({"b*": None, "*": HALF}, {"nobody": None, "al*": bh.Codec(forward="int8")}, (1, 0.25), (1, 1)),
    ]:
        with two(options(first), options(second)) as workers:
            with Sent(workers) as sent:
                y = bh.rpc_sync("bob", triple, args=(x,))
            assert sent == approx(*calls)
            with Sent(workers) as sent:
                y.square().sum().backward()
            assert sent == approx(*passes)


@pytest.mark.parametrize(
    ("endpoints", "where", "hosts", "units"),
    [
        (TCP, "hosts", ("one", "one"), [1.0]),
        (TCP, "hosts", ("left", "right"), [0.5]),
        (TCP, "always", ("one", "one"), [0.5]),
        (UNIX, "hosts", ("one", "one"), [0.0, 1.0]),  # whether there is a slot in shared memory depends on timing
        (UNIX, "always", ("one", "one"), [0.0, 1.0]),
        (UNIX_ALONE, "hosts", ("one", "one"), [1.0]),
        (UNIX_ALONE, "always", ("one", "one"), [0.5]),
        (InprocEndpoint, "always", ("one", "one"), [0.0]),
    ],
)
def test_where(endpoints: Any, where: Any, hosts: tuple[str, str], units: list[float]) -> None:
    x, codec = numbers().detach(), bh.Codec(forward="fp16", backward="fp16", where=where)
    off = {"shm_bytes": 0} if endpoints is UNIX_ALONE else {}
    with two(options(codec, **off), options(codec, **off), endpoints, hosts) as workers:
        with Sent(workers) as sent:
            y = bh.rpc_sync("bob", echo, args=(x,))
        assert bh.rpc_sync("alice", echo, args=(x,)).equal(x)
    assert torch.equal(x, y) == (units != [0.5])
    assert all(any(each == pytest.approx(unit, abs=0.06) for unit in units) for each in sent)


def test_one_call() -> None:
    x = numbers().detach()
    with two(options(HALF), options(HALF)) as workers:
        with Sent(workers) as sent:
            assert bh.rpc_sync("bob", exact, args=(x,)).equal(x)
        assert sent == approx(1, 1)
        with Sent(workers) as sent, bh.compression(None):
            assert not bh.rpc_sync("bob", echo, args=(x,)).equal(x)
        assert sent == approx(1, 0.5)
        with Sent(workers) as sent, bh.compression(bh.Codec(forward="int8")):
            bh.rpc_sync("bob", exact, args=(x,))
            bh.rpc_async("bob", triple, args=(x,)).wait()
        assert sent == approx(0.5, 1.5)
    with two(options(None), options(None)) as workers:
        with Sent(workers) as sent:
            y = bh.rpc_sync("bob", coarse, args=(x,))
        assert sent == approx(0.25, 0.25)
        assert 0 < float((y - x).abs().max()) <= 2 * 1.5 / 254
        with Sent(workers) as sent:
            assert bh.rpc_sync("bob", echo, args=(x,)).equal(x)
        assert sent == approx(1, 1)


@zstd
def test_lossless() -> None:
    codec = bh.Codec(forward="zstd", backward="zstd")
    given = (torch.arange(COUNT), torch.rand(COUNT) > 0.5, numbers().detach(), torch.nn.Linear(100, 100))
    with two(options(codec), options(codec)) as workers:
        for value in given[:3]:
            with Sent(workers) as sent:
                got = bh.rpc_sync("bob", echo, args=(value,))
            assert got.equal(value)
            assert max(sent) < 0.95 * value.nbytes / BYTES
        made = bh.rpc_sync("bob", echo, args=(given[3],))
    assert torch.equal(made.weight, given[3].weight)


def test_a_peer_that_lacks_a_codec(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("backhaul._rpc.node.readable_forms", lambda: tuple(LOSSY))
    x = numbers().detach()
    if "zstd" in readable_forms():
        with two(options(bh.Codec(forward="zstd")), options(bh.Codec(forward="fp16"))) as workers:
            with Sent(workers) as sent:
                bh.rpc_sync("bob", echo, args=(x,))
            assert sent == approx(1, 0.5)
        assert [
            record.getMessage() for record in caplog.records if "'bob' cannot read the codec zstd" in record.message
        ]
    monkeypatch.setattr("backhaul._rpc.compression.readable_forms", lambda: tuple(LOSSY))
    with pytest.raises(ValueError, match=r"backhaul\[compression\]"):
        bh.compression(bh.Codec(backward="zstd"))
    with pytest.raises(ValueError, match=r"backhaul\[compression\]"):
        bh.cluster(1, options=options({"a": bh.Codec(forward="zstd")})).start()


def test_without_trust() -> None:
    strict = bh.Security(trusted=False)
    x = numbers()
    with two(options(HALF, security=strict), options(HALF, security=strict)) as workers:
        with Sent(workers) as sent:
            y = bh.rpc_sync("bob", triple, args=(x,))
        assert sent == approx(0.5, 0.5)
        with Sent(workers) as sent:
            y.square().sum().backward()
        assert sent == approx(0.5, 0.5)
        assert x.grad is not None


def test_a_small_peer_is_not_asked_for_more_than_it_takes() -> None:
    """Limits hold for what the receiver has in the end, not for what is sent."""
    small = options(None, security=bh.Security(trusted=False), limits=bh.Limits(frame_bytes=BYTES // 4 * 3))
    with two(options(HALF), small), pytest.raises(bh.errors.FrameTooLargeError):
        bh.rpc_sync("bob", echo, args=(numbers().detach(),))


def test_second_derivatives() -> None:
    x = numbers()
    with two(options(bh.Codec(forward="fp16", backward="fp16")), options(bh.Codec(forward="fp16", backward="fp16"))):
        y = bh.rpc_sync("bob", triple, args=(x,)).square().sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.square().sum(), x)
    with torch.no_grad():
        assert float((slope - 18 * x).abs().max()) < 0.05
        assert float((bend - 2 * 18 * 18 * x).abs().max() / (bend.max())) < 0.01
        assert float(y) == pytest.approx(float((3 * x).square().sum()), rel=1e-3)


def test_state_travels_as_it_is() -> None:
    coarse_all = options(bh.Codec(forward="int8", backward="int8"))
    with two(coarse_all, coarse_all):
        layer = bh.nn.RemoteModule("bob", torch.nn.Linear, (200, 200))
        state = layer.state_dict()
        given = {name: torch.rand_like(value) for name, value in state.items()}
        layer.load_state_dict(given)
        assert layer.state_dict()["weight"].equal(given["weight"])
        assert layer.weight.to_here().equal(given["weight"])
        layer.weight.data = 2 * given["weight"]
        assert layer.weight.to_here().equal(2 * given["weight"])
        optimizer = bh.optim.DistributedOptimizer(torch.optim.Adam, layer.remote_parameters(), lr=0.1)
        x = torch.rand(300, 200)
        y = layer(x)
        assert not y.equal(torch.nn.functional.linear(x, 2 * given["weight"], given["bias"]))
        y.sum().backward()
        optimizer.step()
        saved = optimizer.state_dict()
        for state in saved["state"].values():
            state["exp_avg"] = torch.rand_like(state["exp_avg"])
        optimizer.load_state_dict(saved)
        again = optimizer.state_dict()["state"]
        assert all(state["exp_avg"].equal(again[key]["exp_avg"]) for key, state in saved["state"].items())


def train(compression: Any) -> float:
    torch.manual_seed(0)
    x, target = torch.randn(256, 64), torch.randn(256, 8)
    target = target * 0.1 + x[:, :8]
    with two(options(compression), options(compression)):
        first = torch.nn.Linear(64, 128)
        second = bh.nn.RemoteModule("bob", torch.nn.Linear, (128, 8))
        second.load_state_dict({"weight": torch.linspace(-1, 1, 1024).view(8, 128) / 8, "bias": torch.zeros(8)})
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.3)
        for _ in range(60):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(second(torch.relu(first(x))), target)
            loss.backward()
            optimizer.step()
        return loss.item()


def test_training_comes_to_the_same_loss() -> None:
    exactly = train(None)
    codecs: Mapping[str, float] = {"fp16": 0.01, "bf16": 0.05, "int8": 0.1}
    for name, bound in codecs.items():
        found = train(bh.Codec(forward=name, backward=name))  # type: ignore[arg-type]
        assert found != exactly
        assert found == pytest.approx(exactly, rel=bound)


def step_in_process(rank: int, store: str, compression: bh.Codec | None) -> tuple[float, float, float]:
    """A step of two processes: bytes that this one has sent, the loss, and the first number of the gradient."""
    how = options(compression, transport="tcp", init_method=f"file://{store}", security=bh.Security(secret="ours"))
    bh.init(f"worker{rank}", rank=rank, world_size=2, options=how)
    loss, slope = 0.0, 0.0
    if rank == 0:
        x = numbers()
        y = bh.rpc_sync("worker1", triple, args=(x,)).square().sum()
        y.backward()
        assert x.grad is not None
        loss, slope = y.item(), x.grad[0].item()
    me = bh.current_worker()
    bh.shutdown()  # after that all bytes are counted
    return me.counters["bytes_sent"]() / BYTES, loss, slope


def test_two_processes(tmp_path: Path) -> None:
    codec = bh.Codec(forward="fp16", backward="int8", where="always")
    exactly, halved = (run_processes(step_in_process, 2, str(tmp_path / f"{each}"), each) for each in (None, codec))
    first = 3 * float(numbers().detach()[0])
    assert exactly[0][2] == pytest.approx(6 * first, rel=1e-6)
    assert halved[0][2] == pytest.approx(6 * first, abs=6 * 1.5 * 3 / 100)
    assert halved[0][2] != exactly[0][2]
    assert halved[0][1] == pytest.approx(exactly[0][1], rel=1e-3)
    assert [each[0] for each in exactly] == approx(2, 2)
    assert [each[0] for each in halved] == approx(0.75, 0.75)
