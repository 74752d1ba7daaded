"""Workers whose tensors are all on a fake device: CPU memory with clocked streams instead of CUDA. Calls and passes
run, in slots, handed over or staged; a slot that is written too early is found, and none is lost.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import backhaul as bh
from backhaul._autograd.backward import leaves, node_inputs, node_runner
from backhaul._autograd.forward import functions
from backhaul._autograd.ids import ContextId, MessageId
from backhaul._autograd.messages import AutogradKind, Gradients, PassSpec
from backhaul._autograd.torch_engine import run
from backhaul._devices import borrowing, channel_link, deferred_free, handover, lending, seam
from backhaul._devices import device_context as contexts
from backhaul._devices.channel_link import hand_over
from backhaul._devices.cuda import process
from backhaul._devices.device_context import DeviceContext, Member
from backhaul._devices.links import DeviceLink
from backhaul._devices.shared_slots import SharedSlots
from backhaul._devices.stream_order import StreamOrder
from backhaul._devices.tensor_walk import tensors_in
from backhaul._rpc.node import Node
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._wire.codec import Encoded, encode
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Kind, Reply, Request, pack
from backhaul._worker.worker import Worker
from backhaul.errors import SerializationError
from tests.unit.devices.clocks import Cell, FakeCuda, FakeEvent, FakeStream
from tests.unit.devices.fake_ipc import FakeIpc

weight = torch.full((16,), 0.5, requires_grad=True)


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * weight


def relay(to: str, x: torch.Tensor) -> torch.Tensor:
    return bh.rpc_sync(to, scale, args=(x,))


def slow(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.3)
    return x


def fail(x: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


def weight_grad(context: int) -> torch.Tensor:
    return bh.get_gradients(context)[weight]


class Spoiled:
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def spoiled_with(x: torch.Tensor) -> Any:
    return x, Spoiled()


def wait_for(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class World:
    """Workers over sockets that act as if they were in different processes, or in one."""

    def __init__(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cuda = FakeCuda()
        self.ipc = FakeIpc(self.cuda)
        self.stream_order = StreamOrder(self.cuda)
        self.contexts: list[DeviceContext] = []
        monkeypatch.setattr(seam, "streams", self.stream_order)
        monkeypatch.setattr(process, "identities", lambda: ("X",))
        monkeypatch.setattr(process, "start", self._start)
        monkeypatch.setattr(channel_link, "index_at", lambda device: 0 if device.type == "cpu" else None)
        monkeypatch.setattr(channel_link, "device_at", lambda index: torch.device("cpu"))
        self.kind = kind
        self.workers: list[Worker] = []

    def _start(self, own: Member, slot_bytes: int | None) -> DeviceContext:
        device_context = DeviceContext(own, self.ipc, self.ipc, self.stream_order, slot_bytes)
        if self.kind != "handed over":
            contexts._processes.clear()
        if self.kind == "staged":
            self.ipc.refuse = True
        self.contexts.append(device_context)
        return device_context

    @property
    def links(self) -> list[DeviceLink]:
        found = [peer.link for worker in self.workers for peer in worker.part(Node).peers]
        return [link for link in found if isinstance(link, DeviceLink)]

    @property
    def shared(self) -> list[SharedSlots]:
        return [shared for link in self.links for _, shared in link.shared()]

    def warm(self) -> None:
        """Send small tensors in both directions until there are slots for them: other threads make the slots."""

        def warm() -> bool:
            bh.rpc_sync("worker1", torch.neg, args=(torch.ones(16),))
            return sum(shared.lender.bytes_lent > 0 for shared in self.shared) == 2  # there and back

        assert wait_for(warm)

    @property
    def lent(self) -> int:
        gc.collect()
        return sum(shared.lender.lent for shared in self.shared) + len(handover._handed)


@pytest.fixture(params=["slots", "handed over", "staged"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(request.param, monkeypatch)
    weight.grad = None
    with bh.cluster(2, endpoints=lambda: SocketEndpoint(secret=b"secret")) as made.workers:
        if request.param == "slots":
            made.warm()
        yield made
        assert wait_for(lambda: not made.lent), "no slot is left"  # handlers free some just after their replies
        bytes_lent = sum(shared.lender.bytes_lent for shared in made.shared)
        assert (bytes_lent > 0) == (request.param == "slots")
        assert not made.stream_order.trouble
        made.cuda.finish()  # a worker that shuts down waits for that
        assert bh.get_debug_info()["cuda_usable"]
    made.cuda.finish()
    assert wait_for(lambda: not deferred_free.free_deferred())
    assert made.ipc.there_now == 0
    assert [device_context.slot_bytes for device_context in made.contexts] == [0, 0]


def test_calls(world: World) -> None:
    for number in range(8):
        x = torch.full((16,), float(number))
        assert torch.equal(bh.rpc_sync("worker1", torch.neg, args=(x,)), -x)
        assert torch.equal(bh.rpc_async("worker1", torch.neg, args=(x,)).wait(), -x)


def test_many_at_once(world: World) -> None:
    for _ in range(3):
        xs = [torch.full((16,), float(number)) for number in range(40)]
        found = bh.wait_all([bh.rpc_async("worker1", torch.neg, args=(x,)) for x in xs])
        assert all(torch.equal(value, -x) for value, x in zip(found, xs, strict=True))
        del found


def test_nested_values_and_itself(world: World) -> None:
    for _ in range(4):
        made: Any = bh.rpc_sync("worker1", dict, kwargs={"a": [torch.ones(3)], "b": torch.eye(2).to_sparse()})
        assert torch.equal(made["a"][0], torch.ones(3))
        assert torch.equal(made["b"].to_dense(), torch.eye(2))
        assert torch.equal(bh.rpc_sync("worker0", torch.neg, args=(torch.ones(3),)), -torch.ones(3))


def test_passes(world: World) -> None:
    for _ in range(4):
        x = torch.arange(16.0, requires_grad=True)
        with bh.context() as context:
            y = bh.rpc_sync("worker1", scale, args=(x,))
            z = bh.rpc_sync("worker1", relay, args=("worker0", y))
            bh.backward(context, [(y + z).sum()])
            assert torch.equal(bh.get_gradients(context)[x], torch.full((16,), 0.75))
            both = torch.arange(16.0) * 1.5
            assert torch.equal(bh.rpc_sync("worker1", weight_grad, args=(context,)), both)
        del y, z


def test_references(world: World) -> None:
    for _ in range(4):
        value = bh.remote("worker1", torch.add, args=(torch.ones(16), 1))
        assert torch.equal(value.to_here(), torch.full((16,), 2.0))
        assert torch.equal(bh.rpc_sync("worker1", bh.RRef.local_value, args=(value,)), torch.full((16,), 2.0))
        del value


def test_errors(world: World) -> None:
    for _ in range(4):
        with pytest.raises(torch.OutOfMemoryError):
            bh.rpc_sync("worker1", fail, args=(torch.ones(16),))
        with pytest.raises(SerializationError):
            bh.rpc_sync("worker1", torch.neg, args=(torch.ones(16), (i for i in ())))


def test_replies_that_come_too_late(world: World) -> None:
    for _ in range(4):
        with pytest.raises(bh.CallTimeoutError):
            bh.rpc_sync("worker1", slow, args=(torch.ones(16),), timeout=0.02)
    bh.rpc_sync("worker1", slow, args=(torch.ones(16),))
    bh.rpc_sync("worker1", slow, args=(torch.ones(16),))


def test_messages_that_nobody_reads(world: World) -> None:
    for _ in range(3):
        bh.rpc_sync("worker1", torch.neg, args=(torch.ones(16),))
    for make in (late_reply, late_request, stray_gradient):
        for sender, receiver in ((0, 1), (1, 0)):
            peer = world.workers[sender].part(Node).peers.find(receiver)
            assert peer.channel is not None
            encoded = encode([torch.ones(16)], names=["x"], link=peer.link.answer(peer.channel))
            if encoded.lease is not None:
                hand_over(encoded.lease, peer.channel)
            peer.channel.send(make(encoded))
            del encoded
    for _ in range(3):  # behind those
        bh.rpc_sync("worker1", relay, args=("worker0", torch.ones(16)))


def late_reply(encoded: Encoded) -> Frame:
    return Frame(Kind.REPLY, 1 << 30, pack(Reply(encoded.payload)), encoded.buffers, encoded.keep)


def late_request(encoded: Encoded) -> Frame:
    request = Request("torch:neg", encoded.payload, left=1e-9)
    return Frame(Kind.REQUEST, 1 << 30, pack(request), encoded.buffers, encoded.keep)


def stray_gradient(encoded: Encoded) -> Frame:
    body = pack(Gradients(PassSpec(ContextId(5), 1, 1), [MessageId(77)], [1], encoded.payload))
    return Frame(AutogradKind.GRADIENT, 0, body, encoded.buffers, encoded.keep)


def test_a_tensor_without_a_place_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    World("staged", monkeypatch)
    options = bh.Options(devices=bh.Devices(maps={"worker1": {"cpu": 0}}))
    with bh.cluster(2, options=options):
        with pytest.raises(SerializationError, match=r"args\[1\].*cuda:0 has no place at worker 'worker1'") as caught:
            bh.rpc_sync("worker1", torch.add, args=(1, torch.ones(2)))
        assert caught.value.path == "args[1]"
        assert torch.equal(bh.rpc_sync("worker1", torch.zeros, args=(2,)), torch.zeros(2))
        assert bh.rpc_sync("worker1", max, args=(1, 2)) == 2


def test_only_what_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("slots", monkeypatch)
    weight.grad = None
    options = bh.Options(devices=bh.Devices(maps={"worker1": {0: 0}}, placement="mapped"))
    with bh.cluster(2, options=options, endpoints=lambda: SocketEndpoint(secret=b"secret")):
        x = torch.arange(16.0, requires_grad=True)
        with bh.context() as context:  # gradients go back the way that the caller has mapped, both ways
            bh.backward(context, [bh.rpc_sync("worker1", scale, args=(x,)).sum()])
            assert torch.equal(bh.get_gradients(context)[x], torch.full((16,), 0.5))
        with pytest.raises(SerializationError, match=r"no place at worker 'worker0'.*its map says nothing") as caught:
            bh.rpc_sync("worker1", relay, args=("worker0", x))
        assert (caught.value.device, caught.value.path) == ("cuda:0", "args[0]")
        world.cuda.finish()


def test_maps_are_checked_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    World("staged", monkeypatch)
    with (
        pytest.raises(ValueError, match="names cuda:7 of worker 'worker0', which has cuda:0"),
        bh.cluster(2, options=bh.Options(devices=bh.Devices(maps={"worker1": {7: 0}}))),
    ):
        pass


def test_everything_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("slots", monkeypatch)
    with bh.cluster(2, options=bh.Options(devices=bh.Devices(placement="cpu"))):
        for _ in range(4):
            assert torch.equal(bh.rpc_sync("worker1", torch.neg, args=(torch.ones(16),)), -torch.ones(16))
        world.cuda.finish()
    assert [device_context.slot_bytes for device_context in world.contexts] == [0, 0]


def test_who_waits_for_a_worker_that_was_killed_goes_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        kept = bh.rpc_sync("worker1", scale, args=(torch.ones(16),))
    if world.kind != "slots":
        return
    waiting = [flag for flag in world.ipc.flags.values() if not flag.query()]
    assert waiting
    ended: list[int] = []
    for module in (lending, borrowing):
        monkeypatch.setattr(module, "has_ended", lambda process, _: process in ended)
    peer = world.workers[0].part(Node).peers.find(1)
    assert peer.channel is not None
    peer.channel.abort("killed")
    assert wait_for(lambda: bool(deferred_free.deferred_frees))
    time.sleep(0.3)
    assert not any(flag.query() for flag in waiting), "nobody is known to have ended"
    ended.append(os.getpid())
    assert wait_for(lambda: all(flag.query() for flag in waiting))
    assert kept.shape == (16,)
    del kept
    for _ in range(4):
        bh.rpc_sync("worker1", scale, args=(torch.ones(16),))


def test_slots_of_calls_that_cannot_be_decoded_go_back(world: World) -> None:
    for _ in range(3):
        bh.rpc_sync("worker1", scale, args=(torch.ones(16),))
    for _ in range(5):
        with pytest.raises(bh.errors.SerializationError):
            bh.rpc_sync("worker1", scale, args=(torch.ones(16), Spoiled()))
        with pytest.raises(bh.errors.SerializationError):
            bh.rpc_sync("worker1", spoiled_with, args=(torch.ones(16),))
    assert wait_for(lambda: not world.lent)


def test_a_loss_is_told_though_cuda_has_failed(world: World) -> None:
    future = bh.rpc_async("worker1", slow, args=(torch.ones(16),))
    if world.kind != "slots":
        return
    for _ in range(3):
        bh.rpc_sync("worker1", scale, args=(torch.ones(16),))
    peer = world.workers[0].part(Node).peers.find(1)
    assert peer.channel is not None
    future = bh.rpc_async("worker1", slow, args=(torch.ones(16),))
    world.cuda.broken = True
    peer.channel.abort("killed")
    with pytest.raises(bh.PeerLostError):
        future.wait()
    world.cuda.broken = False
    world.stream_order.streams.trouble = ""
    for _ in range(4):
        bh.rpc_sync("worker1", scale, args=(torch.ones(16),))


def test_bytes_of_devices_are_counted(world: World) -> None:
    bh.rpc_sync("worker1", torch.numel, args=(torch.ones(1024),))  # the first goes before there is a channel
    before = bh.get_debug_info()["bytes_sent"]
    assert bh.rpc_sync("worker1", torch.numel, args=(torch.ones(1024),)) == 1024
    carried = 0 if world.kind == "handed over" else 4096
    assert carried <= bh.get_debug_info()["bytes_sent"] - before < carried + 2000


def test_where_results_have_a_place(world: World) -> None:
    agent = world.workers[0].part(Node).client
    there = {name: agent.has_place_for("worker1", torch.device(name)) for name in ("cpu", "cuda", "cuda:0", "cuda:1")}
    assert there == {"cpu": False, "cuda": True, "cuda:0": True, "cuda:1": False}
    assert agent.has_place_for("worker0", torch.device("cuda:1")), "its own stay where they are"
    assert not agent.has_place_for("nobody", torch.device("cuda:0"))


@pytest.mark.parametrize("shared", [0, 99, 1000])
def test_what_is_staged_arrives_whole(world: World, shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_link, "_CHUNK_BYTES", 100)
    monkeypatch.setattr(channel_link, "_PARALLEL_BYTES", shared)
    for size in (1, 25, 26, 1001):
        x = torch.randn(size)
        assert torch.equal(bh.rpc_sync("worker1", torch.neg, args=(x,)), -x)


class Owner:
    """Has a tensor on a device that its methods use."""

    def write(self) -> None:
        cells[0].write()

    async def read(self) -> None:
        cells[0].read()


cells: list[Cell] = []


async def make_owner() -> Owner:
    cells[0].read()
    return Owner()


def test_methods_in_asyncio_come_after_what_was_done_before(world: World) -> None:
    cells[:] = [Cell(world.cuda)]
    owner = bh.remote("worker1", Owner)
    for _ in range(3):
        owner.rpc_sync().write()
        owner.rpc_sync().read()
        bh.remote("worker1", make_owner).to_here(timeout=10)


class Touch(torch.autograd.Function):
    """Its backward runs on the stream of its forward, as torch's engine arranges."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        lane, cuda = lanes[0], lanes[0].backend
        behind(cuda, lane, cuda.current(0))
        cuda.use(lane)
        cells[0].write()
        return grads[0].clone()


lanes: list[FakeStream] = []


def behind(cuda: FakeCuda, stream: FakeStream, other: FakeStream) -> None:
    event = FakeEvent(cuda)
    cuda.record(event, other)
    cuda.wait(stream, event)


def circle(x: torch.Tensor) -> torch.Tensor:
    z = bh.rpc_sync("worker0", scale, args=(x,))
    return Touch.apply(z) + Touch.apply(z) + x  # type: ignore[no-untyped-call, no-any-return]


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_nodes_that_run_one_by_one(world: World, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = world.cuda
    cells[:], lanes[:] = [Cell(cuda)], [cuda.fresh(0)]
    sums: list[int] = []

    def engine(*args: Any, **options: Any) -> Any:
        before = cuda.current(0)
        try:
            found = run.run_engine(*args, **options)
            behind(cuda, before, lanes[0])  # the engine does so, but not if there is an error
            return found
        finally:
            cuda.use(before)

    def add(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
        if left is not None and right is not None:
            sums.append(1)
            cells[0].read()
        return functions.add(left, right)

    for module in (leaves, node_runner):
        monkeypatch.setattr(module, "run_engine", engine)
    monkeypatch.setattr(node_inputs, "add", add)
    for _ in range(3):
        x = torch.arange(16.0, requires_grad=True)
        with bh.context() as context:
            y = bh.rpc_sync("worker1", circle, args=(x,))
            bh.backward(context, [y.sum()], mode=mode)
            assert torch.equal(bh.get_gradients(context)[x], torch.full((16,), 2.0))
        del y
    assert sums


def test_gradients_are_used_on_the_streams_of_who_got_them(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    adopted: list[torch.Tensor] = []
    monkeypatch.setattr(world.stream_order, "adopt", lambda value: adopted.extend(t + 0 for t in tensors_in(value)))
    x = torch.arange(16.0, requires_grad=True)
    with bh.context() as context:
        bh.backward(context, [bh.rpc_sync("worker1", scale, args=(x,)).sum()])
        found = bh.rpc_sync("worker1", weight_grad, args=(context,))
    for grad in (torch.full((16,), 0.5), found):  # the one that is sent, the one that stays
        assert any(torch.equal(grad, tensor) for tensor in adopted)


async def doubled(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return x * 2, threading.get_ident()


class Doubler:
    async def doubled(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return await doubled(x)


def test_what_asyncio_gets_is_used_on_its_streams(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    adopted: list[tuple[int, list[float]]] = []

    def adopt(value: Any) -> None:
        adopted.extend((threading.get_ident(), tensor.tolist()) for tensor in tensors_in(value))

    monkeypatch.setattr(world.stream_order, "adopt", adopt)
    doubler = bh.remote("worker1", Doubler)
    ways: list[Callable[[torch.Tensor], Any]] = [
        lambda x: bh.rpc_sync("worker1", doubled, args=(x,)),
        lambda x: doubler.rpc_sync().doubled(x),
        lambda x: bh.remote("worker1", doubled, args=(x,)).to_here(),
    ]
    for number, way in enumerate(ways):
        given = [float(number)] * 16
        result, thread = way(torch.tensor(given))
        assert result.tolist() == [2.0 * number] * 16
        assert (thread, given) in adopted


def test_nothing_is_sent_while_a_graph_is_being_made(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    here = threading.get_ident()
    monkeypatch.setattr(world.cuda, "capturing", lambda: making and threading.get_ident() == here)
    x, lent = torch.ones(16), sum(shared.lender.bytes_lent for shared in world.shared)
    making = True
    with pytest.raises(SerializationError, match="captures a CUDA graph"):
        bh.rpc_sync("worker1", torch.neg, args=(x,))
    with pytest.raises(SerializationError, match="captures a CUDA graph"):
        bh.rpc_sync("worker1", torch.ones, args=(16,))
    assert bh.rpc_sync("worker1", max, args=(1, 2)) == 2
    making = False
    if world.kind == "slots":
        assert sum(shared.lender.bytes_lent for shared in world.shared) == lent + 64, "only the answer"
    assert torch.equal(bh.rpc_sync("worker1", torch.neg, args=(x,)), -x)
