"""Contexts: their ids, where they are current, and that each is released once on every worker."""

from __future__ import annotations

import asyncio
import collections
import contextvars
import ctypes
import gc
import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import backhaul as bh
from backhaul._autograd.backward.context_release import ContextRelease
from backhaul._autograd.backward.engine import Engine
from backhaul._autograd.container import Container
from backhaul._autograd.forward.recording import ForwardRecorder, current_scope
from backhaul._autograd.ids import ContextId, MessageId, split
from backhaul._autograd.messages import Abort, AutogradKind, Gradients, PassSpec, Release
from backhaul._transport.inproc import InprocChannel
from backhaul._wire.codec import encode
from backhaul._wire.frames import Frame
from backhaul._wire.messages import pack

from .worlds import DEADLINE_SECONDS, await_counts, contexts_on, engine_of, expect_no_contexts, vector


def current() -> int | None:
    """The id of the context that is current here."""
    scope = current_scope(bh.current_worker())
    return None if scope is None else scope.context.id


def current_on(*route: int) -> list[int | None]:
    """The current contexts here and on the workers of the route. Each worker is called by the one before it."""
    return [current(), *(bh.rpc_sync(route[0], current_on, args=route[1:]) if route else ())]


def scale(x: torch.Tensor, *route: int) -> torch.Tensor:
    """Double on every worker of the route."""
    return bh.rpc_sync(route[0], scale, args=(x, *route[1:])) * 2 if route else x * 2


# Names.


def test_ids_are_unique_over_workers_and_threads() -> None:
    with bh.cluster(3) as workers:
        opened = threading.Barrier(12)

        def open_some(worker: bh.Worker) -> list[int]:
            opened.wait(DEADLINE_SECONDS)
            found = []
            for _ in range(50):
                with worker, bh.context() as ctx:
                    assert int(ctx) >> 48 == worker.info.id
                    found.append(int(ctx))
            return found

        with ThreadPoolExecutor(12) as threads:
            ids = [number for found in threads.map(open_some, workers * 4) for number in found]
    assert len(set(ids)) == len(ids) == 600
    assert all(0 < number < 1 << 64 for number in ids)
    for worker in range(3):  # each counts from its own first number
        numbers = sorted(number for number in ids if number >> 48 == worker)
        assert numbers == list(range(numbers[0], numbers[0] + 200))


def test_messages_have_ids_of_the_same_kind() -> None:
    a = vector(1.0, 2.0)
    with bh.cluster(3), bh.context() as ctx:
        bh.rpc_sync(1, scale, args=(a, 2, 0))
        shares = ctx.describe()["workers"]
    sent = {share["message"]: name for name, found in shares.items() for share in found["sends"]}
    received = [share["message"] for found in shares.values() for share in found["recvs"]]
    assert sorted(sent) == sorted(received)
    assert len(received) == len(set(received)) == 6
    assert all(name == f"worker{message >> 48}" for message, name in sent.items())


def test_a_context_is_an_int() -> None:
    with bh.cluster(2), bh.context() as ctx:
        assert isinstance(ctx, int)
        assert ctx == ctx.id == int(ctx)
        assert type(ctx.id) is int
        assert {int(ctx): "found"}[ctx] == "found"
        assert json.loads(json.dumps({"context": ctx})) == {"context": int(ctx)}
        assert str(int(ctx)) in repr(ctx)
        copy = pickle.loads(pickle.dumps(ctx))
        assert (type(copy), copy) == (bh.ContextHandle, ctx)
        there = bh.rpc_sync(1, both, args=(ctx, int(ctx)))
        assert there == (bh.ContextHandle, int, ctx)
        assert bh.get_gradients(ctx) == bh.get_gradients(int(ctx)) == ctx.grads == {}


def both(handle: Any, number: Any) -> tuple[type, type, int]:
    assert handle.grads == bh.get_gradients(number) == {}
    return type(handle), type(number), number


@pytest.mark.parametrize("wrong", ["1", 1.0, None, True, [1]])
def test_what_is_no_context(wrong: Any) -> None:
    with bh.cluster(1), pytest.raises(TypeError):
        bh.get_gradients(wrong)


# Where a context is current.


def test_contexts_do_not_nest() -> None:
    with bh.cluster(2) as workers:
        with bh.context() as outer:
            with pytest.raises(bh.errors.ContextError) as caught, bh.context():
                pass
            assert (caught.value.context, caught.value.worker) == (outer, "worker0")
            assert current() == outer
            with pytest.raises(bh.errors.ContextError) as caught:
                bh.rpc_sync(1, open_another)
            assert (caught.value.context, caught.value.worker) == (outer, "worker1")
        with bh.context() as later:
            assert later != outer
        expect_no_contexts(workers)


def open_another() -> None:
    with bh.context():
        pass


def test_another_worker_of_the_process_has_contexts_of_its_own() -> None:
    with bh.cluster(2) as workers, bh.context() as outer:
        with workers[1]:
            assert current() is None
            with bh.context() as inner:
                assert int(inner) >> 48 == 1
                assert current_on(0, 1) == [inner] * 3
            assert current() is None
        assert current_on(1, 0) == [outer] * 3


def divide_in_a_context(x: torch.Tensor) -> torch.Tensor:
    assert current() is not None
    raise ZeroDivisionError


def test_a_context_ends_though_its_body_fails() -> None:
    with bh.cluster(2) as workers:
        with pytest.raises(ZeroDivisionError), bh.context():
            bh.rpc_sync(1, divide_in_a_context, args=(vector(1.0),))
        assert current() is None
        expect_no_contexts(workers)


def test_a_worker_that_ends_inside_of_a_context() -> None:
    with bh.cluster(1) as workers:
        with bh.context():
            bh.shutdown(graceful=False)
            assert workers[0].closed
        with pytest.raises(bh.errors.NotInitializedError):
            bh.get_debug_info()


def test_handlers_see_the_context_of_their_call() -> None:
    with bh.cluster(3):
        assert current_on(1, 2, 0) == [None] * 4
        with bh.context() as ctx:
            assert current_on(1, 2, 0, 0, 1) == [ctx] * 6
            assert bh.rpc_async(1, current_on, args=(2,)).wait() == [ctx] * 2
        assert current_on(1, 2, 0) == [None] * 4


def test_threads_that_served_a_context_forget_it() -> None:
    """Calls with and without a context, in turn and concurrent, with far fewer threads than calls."""
    with bh.cluster(2, options=bh.Options(threads=2)) as workers:

        def call(number: int) -> None:
            with workers[0]:
                if number % 3:
                    with bh.context() as ctx:
                        assert current_on(1, 0, 1) == [ctx] * 4
                assert current_on(1, 0, 1) == [None] * 4

        with ThreadPoolExecutor(6) as threads:
            list(threads.map(call, range(60)))
        expect_no_contexts(workers)


def test_a_handler_that_fails_leaves_no_context_behind() -> None:
    with bh.cluster(2, options=bh.Options(threads=1)):
        for _ in range(5):
            with bh.context(), pytest.raises(ZeroDivisionError):
                bh.rpc_sync(1, divide)
            assert current_on(1) == [None, None]


def divide() -> None:
    raise ZeroDivisionError


async def current_after(*route: int) -> list[int | None]:
    """As ``current_on``, in coroutines."""
    before = current()
    await asyncio.sleep(0)
    there = await bh.rpc_async(route[0], current_after, args=route[1:]) if route else []
    assert current() == before
    return [before, *there]


@bh.async_execution
def current_later(to: int) -> bh.Future[Any]:
    return bh.rpc_async(to, current_on).then(lambda done: [current(), *done.value()])


def test_handlers_that_answer_later_see_it_too() -> None:
    with bh.cluster(3):
        with bh.context() as ctx:
            assert bh.rpc_sync(1, current_after, args=(2, 0, 1)) == [ctx] * 4
            assert bh.rpc_sync(1, current_later, args=(2,)) == [ctx] * 2
        assert bh.rpc_sync(1, current_after, args=(2, 0, 1)) == [None] * 4


def test_callbacks_see_the_context_they_were_added_in() -> None:
    with bh.cluster(2):
        outside = bh.rpc_async(1, current_on)
        with bh.context() as ctx:
            inside = bh.rpc_async(1, current_on)
            assert inside.then(lambda done: (current(), current_on(1), done.value())).wait() == (ctx, [ctx] * 2, [ctx])
            assert outside.then(lambda done: (current(), done.value())).wait() == (ctx, [None])
            seen: bh.Future[int | None] = bh.Future()
            inside.add_done_callback(lambda _: seen.set_result(current()))
            assert seen.wait() == ctx
        assert inside.then(lambda _: current()).wait() is None


def test_calls_of_a_callback_are_recorded() -> None:
    a = vector(0.5, 2.0)
    with bh.cluster(3), bh.context() as ctx:
        y = bh.rpc_async(1, torch.sin, args=(a,)).then(lambda done: scale(done.value() * a, 2)).wait()
        ctx.backward(y.sum())
        found = ctx.grads[a]
    (torch.sin(a) * a * 4).sum().backward()
    torch.testing.assert_close(found, a.grad)


def test_tasks_of_asyncio_have_contexts_of_their_own() -> None:
    """Many tasks on one thread, each records its own calls. A task inherits the context of the task that starts it."""
    with bh.cluster(3) as workers:

        async def step(number: int) -> None:
            leaf = vector(float(number), 1.0)
            with bh.context() as ctx:
                values = await asyncio.gather(*(use(leaf * n, ctx) for n in (1, 2, 3)))
                await asyncio.to_thread(ctx.backward, sum(values).sum())
                torch.testing.assert_close(ctx.grads, {leaf: torch.full((2,), 24.0, dtype=torch.float64)})
            assert current() is None

        async def use(x: torch.Tensor, ctx: int) -> torch.Tensor:
            assert current() == ctx
            y = await bh.rpc_async(1, scale, args=(x, 2))
            assert await bh.rpc_async(1, current_on) == [ctx]
            assert current() == ctx
            return y

        async def main() -> None:
            await asyncio.gather(*(step(number) for number in range(12)))
            assert current() is None

        asyncio.run(main())
        expect_no_contexts(workers)


def test_a_new_thread_has_no_context_unless_it_is_given_one() -> None:
    with bh.cluster(1) as workers, bh.context() as ctx, ThreadPoolExecutor(1) as threads:

        def look() -> int | None:
            with workers[0]:
                return current()

        assert threads.submit(look).result() is None
        assert threads.submit(contextvars.copy_context().run, look).result() == ctx


def test_many_contexts_at_once_from_many_threads() -> None:
    """Three workers drive passes through each other at the same time. Every step gets only its own gradients."""
    start = threading.Barrier(9)
    with bh.cluster(3) as workers:

        def train(number: int) -> None:
            worker = workers[number % 3]
            others = [other.info.id for other in workers if other is not worker]
            with worker:
                start.wait(DEADLINE_SECONDS)
                for step in range(6):
                    leaf = vector(number + 0.5, step + 0.25)
                    with bh.context() as ctx:
                        x = torch.sin(leaf)
                        y = bh.rpc_sync(others[0], scale, args=(x, others[1], worker.info.id))
                        z = bh.rpc_sync(others[1], torch.mul, args=(x, y))
                        ctx.backward((z * x).sum())
                        (found,) = ctx.grads.items()
                    assert found[0] is leaf
                    torch.testing.assert_close(
                        found[1], 24 * torch.sin(leaf).pow(2).detach() * torch.cos(leaf.detach())
                    )

        with ThreadPoolExecutor(9) as threads:
            list(threads.map(train, range(9)))
        expect_no_contexts(workers)


def test_passes_on_one_context_from_several_threads() -> None:
    """As plain autograd allows with ``retain_graph``; their gradients add up."""
    a, count = vector(0.5, 2.0), 6
    inside = threading.Barrier(count)
    with bh.cluster(3) as workers, bh.context() as ctx:
        shared = bh.rpc_sync(1, scale, args=(torch.sin(a), 2))
        losses = [(bh.rpc_sync(2, torch.mul, args=(shared, n)) * shared).sum() for n in range(count)]
        for loss in losses:
            loss.register_hook(lambda _: (inside.wait(DEADLINE_SECONDS), None)[1])

        def run(loss: torch.Tensor) -> None:
            with workers[0]:
                ctx.backward(loss, retain_graph=True, timeout=DEADLINE_SECONDS)

        with ThreadPoolExecutor(count) as threads:
            list(threads.map(run, losses))
        assert bh.get_debug_info()["num_current_backward_passes"] == 0
        found = ctx.grads[a]
    expected = sum(torch.autograd.grad((4 * torch.sin(a)).pow(2).sum() * n, a)[0] for n in range(count))
    torch.testing.assert_close(found, expected)


def test_calls_made_during_a_pass_do_not_disturb_it() -> None:
    """Another thread computes on in the same context, from values that the pass goes through."""
    a, inside, go_on = vector(0.5, 2.0), threading.Event(), threading.Event()
    with bh.cluster(3) as workers, bh.context() as ctx, ThreadPoolExecutor(1) as threads:
        x = torch.sin(a)
        y = bh.rpc_sync(1, scale, args=(x, 2))
        z = bh.rpc_sync(2, torch.mul, args=(x, y)) * x
        z.register_hook(lambda _: (inside.set(), go_on.wait(DEADLINE_SECONDS), None)[2])
        running = threads.submit(workers[0].run, ctx.backward, z.sum())
        try:
            assert inside.wait(DEADLINE_SECONDS)
            more = [bh.rpc_sync(1 + n % 2, torch.mul, args=(x, y)) for n in range(8)]
        finally:
            go_on.set()
        running.result(DEADLINE_SECONDS)
        found = ctx.grads[a]
        assert len(more) == 8
    (4 * torch.sin(a).pow(3)).sum().backward()
    torch.testing.assert_close(found, a.grad)


def test_two_workers_drive_passes_on_one_context_at_once() -> None:
    """Through the same values; each is the driver of its own pass."""
    a, together = vector(0.5, 2.0), threading.Barrier(2)
    with bh.cluster(3) as workers, bh.context() as ctx:
        x = torch.sin(a)
        shared = bh.rpc_sync(1, scale, args=(x, 2))
        bh.rpc_sync(1, keep_loss, args=(shared * 3,))
        losses = [shared.pow(2).sum(), kept_losses[1]]

        def run(number: int) -> None:
            with workers[number]:
                together.wait(DEADLINE_SECONDS)
                ctx.backward(losses[number], retain_graph=True, timeout=DEADLINE_SECONDS)

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(run, range(2)))
        found = ctx.grads[a]
    kept_losses.clear()
    shared = 4 * torch.sin(a)
    (shared.pow(2) + torch.cos(shared * 3)).sum().backward()
    torch.testing.assert_close(found, a.grad)


kept_losses: dict[int, torch.Tensor] = {}


def keep_loss(x: torch.Tensor) -> None:
    """A root of this worker, computed from what another worker sent."""
    kept_losses[bh.get_worker_info().id] = bh.rpc_sync(2, torch.cos, args=(x,)).sum()


# Release.


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[tuple[int, int]]:
    """How often each context was released on each worker."""
    found: collections.Counter[tuple[int, int]] = collections.Counter()
    pop = Container.pop

    def count(self: Container, number: int) -> Any:
        context = pop(self, number)
        if context is not None:
            found[split(self.new_message())[0], number] += 1
        return context

    monkeypatch.setattr(Container, "pop", count)
    return found


def test_release_reaches_every_worker_once(released: collections.Counter[tuple[int, int]]) -> None:
    """Also workers that the driver never called, and workers that sent no tensor that requires grad."""
    a = vector(1.0, 2.0)
    with bh.cluster(6) as workers:
        with bh.context() as ctx:
            y = bh.rpc_sync(1, scale, args=(a, 2, 3, 1, 2))
            assert bh.rpc_sync(4, current_on, args=(5, 4)) == [ctx] * 3
            ctx.backward(y.sum())
            assert [len(engine_of(worker).container) for worker in workers] == [1] * 6
        expect_no_contexts(workers)
        assert released == {(worker.info.id, int(ctx)): 1 for worker in workers}


def test_release_is_told_to_those_that_had_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one message each way between two workers that called each other; none to other workers."""
    sent: list[int] = []
    send = InprocChannel.send

    def count(self: InprocChannel, frame: Frame, *, timeout: float | None = None) -> None:
        if frame.kind == AutogradKind.RELEASE:
            sent.append(frame.kind)
        send(self, frame, timeout=timeout)

    monkeypatch.setattr(InprocChannel, "send", count)
    with bh.cluster(5) as workers:
        with bh.context():
            bh.rpc_sync(1, scale, args=(vector(1.0), 2, 3))
        expect_no_contexts(workers)
        bh.rpc_sync(1, current_on, args=(2, 3))  # now all pending messages are sent
        assert 3 <= len(sent) <= 6


def test_releasing_twice_or_what_is_not_there() -> None:
    with bh.cluster(2) as workers:
        with bh.context() as ctx:
            bh.rpc_sync(1, scale, args=(vector(1.0),))
            engine_of(workers[0]).release(int(ctx))
            engine_of(workers[0]).release(int(ctx))
        engine_of(workers[0]).release(123456)
        expect_no_contexts(workers)


def wait_and_call(gate: str, to: int, x: torch.Tensor) -> torch.Tensor:
    gates[gate + " reached"].set()
    assert gates[gate].wait(DEADLINE_SECONDS)
    return bh.rpc_sync(to, torch.mul, args=(x, 2))


gates: dict[str, threading.Event] = collections.defaultdict(threading.Event)


@pytest.fixture
def gate(request: pytest.FixtureRequest) -> Any:
    name = request.node.name
    yield name
    gates[name].set()


def test_a_call_that_outlives_its_context(gate: str) -> None:
    """What its handler does later belongs to no context, and does not create one."""
    with bh.cluster(3) as workers:
        with bh.context():
            late = bh.rpc_async(1, wait_and_call, args=(gate, 2, vector(1.0)))
            assert gates[gate + " reached"].wait(DEADLINE_SECONDS)
        expect_no_contexts(workers)
        gates[gate].set()
        assert late.wait().tolist() == [2.0]
        assert [contexts_on(worker.name) for worker in workers] == [0] * 3


def test_a_release_that_overtakes_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Different threads may handle messages of one channel."""
    over, request_in, release = threading.Event(), ForwardRecorder.request_in, ContextRelease.release

    def hold(self: ForwardRecorder, *args: Any) -> Any:
        if self._worker.name == "worker1":
            assert over.wait(DEADLINE_SECONDS)
        return request_in(self, *args)

    def tell(self: ContextRelease, *args: Any) -> None:
        release(self, *args)
        if self._worker.name == "worker1":
            over.set()

    with bh.cluster(2) as workers:
        bh.rpc_sync(1, len, args=("",))
        monkeypatch.setattr(ForwardRecorder, "request_in", hold)
        monkeypatch.setattr(ContextRelease, "release", tell)
        with bh.context() as ctx:
            late = bh.rpc_async(1, torch.mul, args=(vector(3.0), 2))
            # The driver has told nobody yet; this is its message, delivered early.
            channel = workers[0].part(Engine).client.peers.find("worker1").channel
            channel.send(Frame(AutogradKind.RELEASE, 0, pack(Release(int(ctx)))))
            assert late.wait().tolist() == [6.0]
        monkeypatch.undo()
        expect_no_contexts(workers)


def test_other_messages_of_a_released_context() -> None:
    """Late gradients and aborts are dropped silently, and create no context."""
    with bh.cluster(2) as workers:
        with bh.context() as ctx:
            bh.rpc_sync(1, scale, args=(vector(1.0),))
        expect_no_contexts(workers)
        channel = engine_of(workers[0]).client.peers.find("worker1").channel
        spec = PassSpec(ContextId(int(ctx)), 0, 99)
        encoded = encode([torch.ones(1)], names=["gradient"])
        gradient = Gradients(spec, [MessageId(5)], [1], encoded.payload)
        for _ in range(3):
            channel.send(Frame(AutogradKind.GRADIENT, 0, pack(gradient), encoded.buffers, encoded.keep))
            channel.send(Frame(AutogradKind.ABORT, 0, pack(Abort(spec))))
            channel.send(Frame(AutogradKind.RELEASE, 0, pack(Release(int(ctx)))))
        for _ in range(20):
            assert contexts_on("worker1") == 0


def test_messages_of_what_was_never_there() -> None:
    """Or the context was released so long ago that it is forgotten."""
    with bh.cluster(2) as workers:
        bh.rpc_sync(1, len, args=("",))
        channel = engine_of(workers[0]).client.peers.find("worker1").channel
        spec = PassSpec(ContextId(77), 0, 1)
        encoded = encode([torch.ones(1)], names=["gradient"])
        channel.send(Frame(AutogradKind.ABORT, 0, pack(Abort(spec))))
        gradient = Gradients(spec, [MessageId(5)], [1], encoded.payload)
        channel.send(Frame(AutogradKind.GRADIENT, 0, pack(gradient), encoded.buffers))
        for _ in range(20):
            assert contexts_on("worker1") == 0


def test_gradients_outlive_their_context() -> None:
    a = vector(1.0, 2.0)
    with bh.cluster(2):
        with bh.context() as ctx:
            ctx.backward(scale(a, 1).sum())
            found = ctx.grads
        assert found[a].tolist() == [4.0, 4.0]
        with pytest.raises(bh.errors.UnknownContextError):
            bh.get_gradients(ctx)


def test_a_context_lets_go_of_the_graph() -> None:
    """The graph on both workers is freed as soon as the context is released, without the garbage collector."""
    a = vector(1.0, 2.0)
    with bh.cluster(2) as workers:
        gc.collect()
        gc.disable()
        try:
            with bh.context() as ctx:
                alive.clear()
                y = bh.rpc_sync(1, watch, args=(watched(a * 2),))
                ctx.backward(watched(y * 3).sum())
                del y
            expect_no_contexts(workers)
            deadline = 1000
            while alive and deadline:  # the thread that served the release may still hold it
                contexts_on("worker1")
                deadline -= 1
            assert not alive
        finally:
            gc.enable()


alive: set[int] = set()


class Watched(torch.autograd.Function):
    """Is in ``alive`` as long as its node exists."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.token = Token()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Token:
    def __init__(self) -> None:
        alive.add(id(self))

    def __del__(self) -> None:
        alive.discard(id(self))


def watched(x: torch.Tensor) -> torch.Tensor:
    return Watched.apply(x)


def watch(x: torch.Tensor) -> torch.Tensor:
    return watched(watched(x) * 2)


# What there is to see.


def test_describe_is_plain_data_of_all_workers() -> None:
    a = vector(1.0, 2.0)
    with bh.cluster(["alice", "bob", "carol", "dave"]), bh.context() as ctx:
        y = bh.rpc_sync("bob", scale, args=(a, 2))
        found = json.loads(json.dumps(ctx.describe()))
        assert found["context"] == ctx
        assert found["driver"] == "alice"
        assert set(found["workers"]) == {"alice", "bob", "carol"}
        alice, bob, carol = (found["workers"][name] for name in ("alice", "bob", "carol"))
        assert [share["known"] for share in (alice, bob, carol)] == [["bob"], ["alice", "carol"], ["bob"]]
        assert [(send["to"], send["tensors"]) for send in bob["sends"]] == [("carol", 1), ("alice", 1)]
        assert [recv["from"] for recv in bob["recvs"]] == ["alice", "carol"]
        assert [len(share["groups"]) for share in (alice, bob, carol)] == [1, 2, 1]
        assert not any(share["spent"] or share["gradients"] or share["passes"] for share in (alice, bob, carol))
        ctx.backward(y.sum())
        found = json.loads(json.dumps(ctx.describe()))["workers"]
        assert [found[name]["gradients"] for name in found] == [1, 0, 0]
        assert sum(len(share["spent"]) for share in found.values()) == 4
        assert not any(share["sends"] for share in found.values())


def test_describe_during_a_pass() -> None:
    """From another thread, while a hook blocks the pass."""
    a, inside, go_on = vector(1.0, 2.0), threading.Event(), threading.Event()
    with bh.cluster(2) as workers, bh.context() as ctx, ThreadPoolExecutor(1) as threads:
        x = a * 2
        x.register_hook(lambda _: (inside.set(), go_on.wait(DEADLINE_SECONDS), None)[2])
        y = bh.rpc_sync(1, scale, args=(x,))

        def run() -> None:
            with workers[0]:
                ctx.backward(y.sum())

        running = threads.submit(run)
        try:
            assert inside.wait(DEADLINE_SECONDS)
            assert bh.get_debug_info()["num_current_backward_passes"] == 1
            for _ in range(2000):  # the report of worker 1 may still be on its way
                (going,) = json.loads(json.dumps(ctx.describe()))["workers"]["worker0"]["passes"]
                if set(going["outstanding"].values()) == {"worker0"}:
                    break
            assert set(going["outstanding"].values()) == {"worker0"}
            assert going["driver"] == "worker0"
            assert not going["failed"]
        finally:
            go_on.set()
        running.result(DEADLINE_SECONDS)
        assert bh.get_debug_info()["num_current_backward_passes"] == 0


def test_debug_info_counts_contexts() -> None:
    with bh.cluster(3) as workers:
        with bh.context():
            bh.rpc_sync(1, scale, args=(vector(1.0),))
            counts = {worker.name: len(engine_of(worker).container) for worker in workers}
            assert counts == {"worker0": 1, "worker1": 1, "worker2": 0}
            with workers[2], bh.context():
                assert bh.get_debug_info()["num_autograd_contexts"] == 1
        await_counts({worker.name: 0 for worker in workers})


def resident() -> int:
    """Bytes of memory this process has, but for what the allocator keeps for later: each thread has an arena, and there
    are more threads when the machine is busy.
    """
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def train(steps: int) -> None:
    """Each step is a context over three workers with a circle, with the options that keep most memory."""
    weight = torch.randn(64, 64, requires_grad=True)
    for step in range(steps):
        with bh.context() as ctx:
            x = torch.tanh(weight)
            y = bh.rpc_sync(1, scale, args=(x, 2))
            z = bh.rpc_sync(2, torch.mul, args=(x * 2, y)) * x
            ctx.backward(z.sum(), create_graph=step % 5 == 0, deterministic=step % 2 == 0)
            if step % 5 == 0:
                ctx.backward(ctx.grads[weight].pow(2).sum())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_5000_contexts_leave_memory_flat() -> None:
    with bh.cluster(3) as workers:
        train(1000)
        gc.collect()
        before = resident()
        train(4000)
        gc.collect()
        grown = resident() - before
        expect_no_contexts(workers)
    # One context that stays keeps at least one 64 x 64 tensor: 4,000 of them would be 64 MiB.
    assert grown < 16 << 20, f"{grown / (1 << 20):.1f} MiB more after 4,000 contexts"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_5000_contexts_between_processes_leave_memory_flat() -> None:
    options = bh.Options(shutdown_timeout=500)
    grown = bh.launch(train_and_measure, 3, options=options, timeout=500, start_method="forkserver")
    assert max(grown) < 16 << 20, grown


def train_and_measure() -> int:
    if bh.get_worker_info().id != 0:
        return 0
    train(1000)
    before = [bh.rpc_sync(worker, resident) for worker in range(3)]
    train(4000)
    after = [bh.rpc_sync(worker, resident) for worker in range(3)]
    return max(late - early for early, late in zip(before, after, strict=True))
