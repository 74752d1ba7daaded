"""Steps that survive the loss of a worker: at whatever time it is lost, the gradients equal plain autograd's."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator

import pytest
import torch

import backhaul as bh
from backhaul._autograd.failure.replay_member import ReplayMember
from backhaul._autograd.messages import AutogradKind
from backhaul._sim.channel import SimChannel
from backhaul._sim.cluster import SimCluster
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Kind
from backhaul.testing import oracle
from backhaul.testing.programs import Program, make_program

OPTIONS = bh.Options(timeout=20.0, connect_timeout=2.0, backward_timeout=30.0)
NAMES = ("worker0", "worker1", "worker2", "worker3")


# A program: parameters live on workers, by incarnation, so that a new one has none until they are restored.

_parameters: dict[tuple[str, str], torch.Tensor] = {}


def make_parameter(name: str) -> torch.Tensor:
    values = torch.Generator().manual_seed(NAMES.index(name) + 1)
    return torch.randn(3, dtype=torch.float64, generator=values).requires_grad_()


def restore() -> None:
    worker = bh.current_worker()
    _parameters[worker.name, worker.incarnation] = make_parameter(worker.name)


def own_parameter() -> torch.Tensor:
    worker = bh.current_worker()
    return _parameters[worker.name, worker.incarnation]


def apply(x: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x * parameter) + x.sin()


def layer(x: torch.Tensor) -> torch.Tensor:
    return apply(x, own_parameter())


def nested(x: torch.Tensor, path: list[str]) -> torch.Tensor:
    y = layer(x)
    return bh.rpc_sync(path[0], nested, args=(y, path[1:])) * y if path else y


def collect(ctx: int) -> torch.Tensor | None:
    try:
        found = bh.get_gradients(ctx)
    except bh.errors.UnknownContextError:
        return None
    with torch.no_grad():
        return found.get(own_parameter())


Grads = dict[str, torch.Tensor | None]


def forward(call: Callable[[str, torch.Tensor, list[str]], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Chains, nested calls, a call back to the caller, a worker called twice."""
    a = call("worker1", x, [])
    b = call("worker2", a * 2, ["worker3"])
    c = call("worker1", a + b, ["worker2", "worker1"])
    d = call("worker3", c * b, ["worker2"])
    return (d * a + c).sum()


def plainly() -> Grads:
    """The same in one process."""
    parameters = {name: make_parameter(name) for name in NAMES}

    def call(name: str, x: torch.Tensor, path: list[str]) -> torch.Tensor:
        y = apply(x.clone(), parameters[name])
        return (call(path[0], y, path[1:]) * y if path else y).clone()

    forward(call, parameters["worker0"]).backward()
    return {name: parameter.grad for name, parameter in parameters.items()}


over: list[bool] = []  # whether backward has returned: a worker lost after that is not replaced


def drive(asynchronous: bool = False, passes: int = 1) -> Grads:
    over.clear()
    for name in NAMES:
        bh.rpc_sync(name, restore)

    def call(name: str, x: torch.Tensor, path: list[str]) -> torch.Tensor:
        if asynchronous:
            return bh.rpc_async(name, nested, args=(x, path)).wait()
        return bh.rpc_sync(name, nested, args=(x, path))

    with bh.context(replay=bh.Replay(restore=restore, timeout=30.0)) as ctx:
        loss = forward(call, own_parameter())
        for _ in range(passes):
            ctx.backward(loss, deterministic=True)
        over.append(True)
        with torch.no_grad():
            return {name: bh.rpc_sync(name, collect, args=(ctx.id,)) for name in NAMES}


@pytest.fixture
def cluster() -> Iterator[SimCluster]:
    with SimCluster(4, seed=3, options=OPTIONS) as made:
        yield made
    _parameters.clear()


class Fault:
    """Crashes a worker before or after a certain frame of a kind is sent, then starts it again."""

    def __init__(self, cluster: SimCluster, victim: str, kinds: tuple[int, ...], number: int, *, after: bool) -> None:
        self.count = 0
        self.struck = False
        self._cluster = cluster
        self._victim = victim
        self._kinds = kinds
        self._number = number
        self._after = after

    def __enter__(self) -> Fault:
        self._send = send = SimChannel.send
        fault = self

        def watched(channel: SimChannel, frame: Frame, *, timeout: float | None = None) -> None:
            if frame.kind not in fault._kinds or fault._victim not in (channel.source, channel.target):
                send(channel, frame, timeout=timeout)
                return
            fault.count += 1
            now = fault.count == fault._number and not fault.struck
            if now:
                fault.struck = True
                fault._cluster.scheduler.after(0.0005 if fault._after else 0.0, fault._strike)
            send(channel, frame, timeout=timeout)

        SimChannel.send = watched  # type: ignore[method-assign]
        return self

    def _strike(self) -> None:
        self._cluster.spawn(self._crash, "crash")

    def _crash(self) -> None:
        if over:
            return
        self._cluster.crash(self._victim)
        self._cluster.sleep(0.7)
        self._cluster.start(self._victim)

    def __exit__(self, *_: object) -> None:
        SimChannel.send = self._send  # type: ignore[method-assign]


def same(found: Grads, expected: Grads) -> None:
    for name, grad in expected.items():
        got = found[name]
        assert (got is None) == (grad is None), name
        assert grad is None or torch.equal(got, grad), (name, got, grad)


def expect_the_same(cluster: SimCluster, fault: Fault, program: Callable[[], Grads] = drive) -> None:
    """Expect the gradients of a run without faults, then no leftovers, and a next step that works."""
    expected = cluster.run("worker0", program).result()
    try:
        with fault:
            same(cluster.run("worker0", program).result(), expected)
    except bh.PeerLostError:  # the pass was over, and the lost worker took its gradients with it
        assert over
    cluster.sleep(5.0)
    cluster.collect()
    assert not cluster.leftovers()
    same(cluster.run("worker0", program).result(), expected)


def test_nothing_happens(cluster: SimCluster) -> None:
    torch.testing.assert_close(cluster.run("worker0", drive).result(), plainly(), rtol=1e-12, atol=1e-12)
    cluster.sleep(1.0)
    assert not cluster.leftovers()


FORWARD = (int(Kind.REQUEST), int(Kind.REPLY))
BACKWARD = (int(AutogradKind.GRADIENT), int(AutogradKind.REPORT))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", range(3, 17))
@pytest.mark.parametrize("victim", NAMES[1:])
def test_a_worker_that_is_lost_in_forward(cluster: SimCluster, victim: str, number: int, after: bool) -> None:
    """Before, during and after each message from or to the worker; the first two prepare it."""
    expect_the_same(cluster, Fault(cluster, victim, FORWARD, number, after=after))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("victim", NAMES[1:])
def test_a_worker_that_is_lost_in_backward(cluster: SimCluster, victim: str, number: int, after: bool) -> None:
    expect_the_same(cluster, Fault(cluster, victim, BACKWARD, number, after=after))


@pytest.mark.parametrize("number", [4, 5, 8, 11])
@pytest.mark.parametrize("victim", NAMES[1:])
def test_calls_whose_futures_wait(cluster: SimCluster, victim: str, number: int) -> None:
    program = functools.partial(drive, asynchronous=True)
    expect_the_same(cluster, Fault(cluster, victim, FORWARD, number, after=False), program)


@pytest.mark.parametrize("number", [1, 3, 6, 7, 9, 12])
@pytest.mark.parametrize("victim", NAMES[1:])
def test_a_worker_that_is_lost_in_a_later_pass(cluster: SimCluster, victim: str, number: int) -> None:
    """Its gradients of earlier passes are computed again too, and no worker counts any twice."""
    program = functools.partial(drive, passes=3)
    expect_the_same(cluster, Fault(cluster, victim, BACKWARD, number, after=False), program)


# Random programs.


def run_program(program: Program, run: int) -> oracle.Result:
    everyone = range(program.workers)
    prepare = functools.partial(oracle.prepare, program, run)
    for worker in everyone:
        bh.rpc_sync(worker, prepare)
    result = oracle.Result()
    over.clear()
    with bh.context(replay=bh.Replay(restore=prepare, timeout=30.0)) as ctx:
        roots = oracle.serve(run, program.body, [])
        loss = [root.sum() for root in roots if root.requires_grad]
        if loss:
            bh.backward(ctx, loss, deterministic=True)
        over.append(True)
        for worker in everyone:
            with torch.no_grad():
                grads, _ = bh.rpc_sync(worker, oracle.collect, args=(int(ctx), run))
            result.grads.update({(worker, index): grad for index, grad in enumerate(grads)})
    return result


@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed: int) -> None:
    """Hooks fire again when a pass runs again, so they are not counted."""
    draw = random.Random(seed)
    program = make_program(draw.randrange, workers=4, depth=3)
    with SimCluster(4, seed=seed, options=OPTIONS) as cluster:
        expected = cluster.run("worker0", lambda: run_program(program, 10_000 + 2 * seed)).result()
        assert not oracle.compare(dataclasses.replace(oracle.run_locally(program), counts={}), expected)
        kinds = draw.choice((FORWARD, BACKWARD, FORWARD + BACKWARD))
        fault = Fault(cluster, draw.choice(NAMES[1:]), kinds, draw.randint(3, 20), after=draw.random() < 0.5)
        try:
            with fault:
                found = cluster.run("worker0", lambda: run_program(program, 10_001 + 2 * seed)).result()
        except (bh.PeerLostError, KeyError):  # the pass was over, and the lost worker took its gradients with it
            assert over
        else:
            for key, grad in expected.grads.items():
                got = found.grads[key]
                assert (got is None) == (grad is None), key
                assert grad is None or torch.equal(got, grad), key
        cluster.sleep(5.0)
        cluster.collect()
        assert not cluster.leftovers()
    oracle._states.clear()


# Where it ends.


def forward_only(x: torch.Tensor, **options: object) -> None:
    with bh.context(replay=bh.Replay(timeout=3.0)) as ctx:
        y = bh.rpc_sync("worker1", torch.mul, args=(x, 2))
        ctx.backward(y.sum(), **options)


@pytest.mark.parametrize("options", [{"create_graph": True}, {"accumulate": "grad"}, {"mode": "fast"}])
def test_passes_that_cannot_be_run_again_are_refused(cluster: SimCluster, options: dict[str, object]) -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(bh.errors.ContextError, match=next(iter(options))):
        cluster.run("worker0", functools.partial(forward_only, x, **options)).result()


def test_nobody_takes_the_place(cluster: SimCluster) -> None:
    """The error is the same as without replay, notes what was tried, and comes when the time is up."""
    x = torch.ones(2, requires_grad=True)
    cluster.crash("worker1")
    begun = cluster.scheduler.now
    with pytest.raises(bh.PeerLostError) as caught:
        cluster.run("worker0", functools.partial(forward_only, x)).result()
    assert caught.value.worker == "worker1"
    assert "within 3 s" in "\n".join(caught.value.__notes__)
    assert cluster.scheduler.now >= begun + 2.9
    cluster.sleep(1.0)
    assert not cluster.leftovers()


# Time.


def pause(seconds: float) -> None:
    bh.current_worker().runtime.one_shot().wait(seconds)


def lose(cluster: SimCluster, name: str) -> None:
    """Crash a worker from within a program."""
    cluster.scheduler.after(0.0, lambda: cluster.spawn(lambda: cluster.crash(name), "crash"))
    pause(0.5)


def call_with(timeout: float | None) -> None:
    bh.rpc_sync("worker1", torch.mul, args=(torch.ones(2, requires_grad=True), 2), timeout=timeout)


def wait_with(timeout: float | None) -> None:
    bh.rpc_async("worker1", torch.mul, args=(torch.ones(2, requires_grad=True), 2), timeout=timeout).wait()


def nested_with(timeout: float | None) -> None:
    """On a worker that did not make the context."""
    x = torch.ones(2, requires_grad=True)
    bh.rpc_sync("worker2", pass_on, args=(x, timeout), timeout=0)


def pass_on(x: torch.Tensor, timeout: float | None) -> torch.Tensor:
    return bh.rpc_sync("worker1", torch.mul, args=(x, 2), timeout=timeout)


TRIED = {"call": call_with, "wait": wait_with, "nested": nested_with}


@pytest.mark.parametrize("how", ["timeout", "deadline"])
@pytest.mark.parametrize("what", [*TRIED, "backward"])
def test_nobody_waits_longer_than_it_may(cluster: SimCluster, what: str, how: str) -> None:
    """A call, a pass or a block with less time than ``Replay.timeout`` does not wait longer for a replacement."""

    def program() -> float:
        now = bh.current_worker().runtime.now
        with bh.context(replay=bh.Replay(timeout=300.0)) as ctx:
            y = bh.rpc_sync("worker1", torch.mul, args=(torch.ones(2, requires_grad=True), 2))
            lose(cluster, "worker1")
            begun = now()
            expected = bh.errors.BackwardTimeoutError if what == "backward" else bh.CallTimeoutError
            timeout = 3.0 if how == "timeout" else 0.0
            try_it = TRIED.get(what) or functools.partial(bh.backward, ctx, [y.sum()], timeout=timeout)
            arguments = (timeout,) if what in TRIED else ()
            with bh.deadline(3.0 if how == "deadline" else 100.0), pytest.raises(expected) as caught:
                try_it(*arguments)
            assert how != "deadline" or caught.value.cut_by == "bh.deadline"
            assert how == "deadline" or (caught.value.cut_by is None and "3 s" in str(caught.value))
            assert what == "nested" or "to take the place" in "\n".join(caught.value.__notes__)
            return now() - begun

    assert 2.9 <= cluster.run("worker0", program).result() <= 3.1
    cluster.sleep(1.0)  # the context was released: nobody waits for the worker any more
    cluster.collect()
    assert not cluster.leftovers()


def test_a_call_that_is_rescued_can_be_cancelled(cluster: SimCluster) -> None:
    def program() -> float:
        now = bh.current_worker().runtime.now
        x = torch.ones(2, requires_grad=True)
        with bh.context(replay=bh.Replay(timeout=300.0)):
            under_way = bh.rpc_async("worker1", slow, args=(x,), timeout=0)
            pause(0.5)
            lose(cluster, "worker1")
            later = bh.rpc_async("worker1", slow, args=(x,), timeout=0)
            begun = now()
            for future in (under_way, later):
                pause(0.5)
                assert not future.done()
                assert future.cancel()
                assert future.done()
                assert not future.cancel()
                with pytest.raises(bh.CallCancelledError):
                    future.wait()
        return now() - begun

    assert cluster.run("worker0", program).result() < 1.5
    cluster.sleep(1.0)
    cluster.collect()
    assert not cluster.leftovers()


def slow(x: torch.Tensor) -> torch.Tensor:
    pause(5.0)
    return x * 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rescue_ends_with_the_handler_that_it_is_for(cluster: SimCluster, asynchronous: bool) -> None:
    """The call that was cancelled."""
    ended.clear()

    def program() -> None:
        x = torch.ones(2, requires_grad=True)
        with bh.context(replay=bh.Replay(timeout=300.0)):
            lose(cluster, "worker1")
            future = bh.rpc_async("worker2", give_up, args=(x, asynchronous), timeout=0)
            pause(3.0)
            assert future.cancel()
            pause(0.5)

    cluster.run("worker0", program).result()
    assert len(ended) == 1
    assert 2.5 < ended[0] < 3.5


ended: list[float] = []  # seconds after which cancelled calls ended


def give_up(x: torch.Tensor, asynchronous: bool) -> None:
    now = bh.current_worker().runtime.now
    begun = now()
    try:
        wait_with(0) if asynchronous else call_with(0)
    except bh.CallCancelledError:
        ended.append(now() - begun)


@pytest.mark.parametrize("passes_before", [0, 1])
@pytest.mark.parametrize("what", ["call", "backward"])
def test_what_was_given_up_can_be_tried_again(cluster: SimCluster, what: str, passes_before: int) -> None:
    """The replacement came too late for it, or just when its time was over: nothing is half done or lost."""

    def program() -> Grads:
        for name in NAMES:
            bh.rpc_sync(name, restore)
        with bh.context(replay=bh.Replay(restore=restore, timeout=300.0)) as ctx:
            y = bh.rpc_sync("worker1", nested, args=(own_parameter(), ["worker2"]))
            for _ in range(passes_before):
                ctx.backward(y.sum(), deterministic=True)
            if disturbed:
                lose(cluster, "worker1")
                if what == "call":
                    with pytest.raises(bh.CallTimeoutError):
                        bh.rpc_sync("worker1", nested, args=(y, []), timeout=2.0)
                else:
                    with pytest.raises(bh.errors.BackwardTimeoutError):
                        ctx.backward(y.sum(), timeout=2.0)
                cluster.scheduler.after(0.0, lambda: cluster.spawn(lambda: cluster.start("worker1"), "crash"))
                pause(1.0)
            y = bh.rpc_sync("worker1", nested, args=(y, []))
            ctx.backward(y.sum(), deterministic=True)
            with torch.no_grad():
                return {name: bh.rpc_sync(name, collect, args=(ctx.id,)) for name in NAMES}

    disturbed = False
    expected = cluster.run("worker0", program).result()
    disturbed = True
    same(cluster.run("worker0", program).result(), expected)


Call = Callable[[str, torch.Tensor, list[str]], torch.Tensor]
Replace = Callable[[str], None]
GoBack = Callable[[torch.Tensor], None]


def expect_the_same_if_replaced(cluster: SimCluster, program: Callable[[Call, Replace, GoBack], torch.Tensor]) -> None:
    """``program`` gets functions that call a worker, replace one, and run a pass."""

    def call(name: str, x: torch.Tensor, path: list[str]) -> torch.Tensor:
        return bh.rpc_sync(name, nested, args=(x, path))

    def run() -> Grads:
        for name in NAMES:
            bh.rpc_sync(name, restore)
        with bh.context(replay=bh.Replay(restore=restore, timeout=30.0)) as ctx:

            def go_back(y: torch.Tensor) -> None:
                ctx.backward(y.sum(), deterministic=True)

            go_back(program(call, replace, go_back))
            with torch.no_grad():
                return {name: bh.rpc_sync(name, collect, args=(ctx.id,)) for name in NAMES}

    def replace(name: str) -> None:
        if disturbed:
            cluster.scheduler.after(0.0, lambda: cluster.spawn(functools.partial(crash, name), "crash"))
            bh.current_worker().runtime.one_shot().wait(2.0)

    def crash(name: str) -> None:
        cluster.crash(name)
        cluster.sleep(0.5)
        cluster.start(name)

    disturbed = False
    expected = cluster.run("worker0", run).result()
    disturbed = True
    same(cluster.run("worker0", run).result(), expected)


@pytest.mark.parametrize("passes_before", [0, 1, 2])
def test_a_worker_that_was_replaced_between_calls(cluster: SimCluster, passes_before: int) -> None:
    """Nothing was under way there, so no call has failed; what it had computed is gone all the same, and so are its
    gradients of passes before.
    """

    def program(call: Call, replace: Replace, go_back: GoBack) -> torch.Tensor:
        y = call("worker1", own_parameter(), ["worker2"])
        for _ in range(passes_before):
            go_back(y)
        replace("worker1")
        y = call("worker1", y, [])
        replace("worker2")
        return y

    expect_the_same_if_replaced(cluster, program)


def test_a_worker_that_was_replaced_before_it_was_called(cluster: SimCluster) -> None:
    """It had computed nothing, but it had a state that the new worker does not have."""

    def program(call: Call, replace: Replace, go_back: GoBack) -> torch.Tensor:
        replace("worker1")
        replace("worker2")
        return call("worker1", own_parameter(), ["worker2"])

    expect_the_same_if_replaced(cluster, program)


def test_what_is_run_again_calls_the_worker_it_is_run_for(cluster: SimCluster) -> None:
    """The call goes through a worker whose own calls to the lost worker are not repeated yet; this was a deadlock."""

    def program(call: Call, replace: Replace, go_back: GoBack) -> torch.Tensor:
        x = call("worker1", own_parameter(), ["worker2", "worker1"])
        x = call("worker2", x, ["worker1"])
        replace("worker1")
        return call("worker1", x, [])

    expect_the_same_if_replaced(cluster, program)


def test_a_worker_that_is_lost_while_its_share_is_made_again(cluster: SimCluster) -> None:
    """The second replacement gets the state too, before any function runs there."""
    again: list[str] = []
    repeat = ReplayMember.repeat

    def strike(self: ReplayMember, context: int, place: tuple[int, ...], to: int, incarnation: str) -> None:
        if not again:
            again.append("worker1")
            cluster.scheduler.after(0.0, lambda: cluster.spawn(crash, "crash"))
            bh.current_worker().runtime.one_shot().wait(2.0)
        repeat(self, context, place, to, incarnation)

    def crash() -> None:
        cluster.crash("worker1")
        cluster.start("worker1")

    def program(call: Call, replace: Replace, go_back: GoBack) -> torch.Tensor:
        x = call("worker1", own_parameter(), [])
        replace("worker1")
        return call("worker1", x, [])

    ReplayMember.repeat = strike  # type: ignore[method-assign]
    try:
        expect_the_same_if_replaced(cluster, program)
    finally:
        ReplayMember.repeat = repeat  # type: ignore[method-assign]
    assert again


def fail_to_restore() -> None:
    raise KeyError("no checkpoint")


@pytest.mark.parametrize("what", ["call", "nested", "backward"])
def test_a_restore_that_fails_says_what_it_was(cluster: SimCluster, what: str) -> None:
    """The call raises the error of the user's ``restore``."""

    def program() -> None:
        x = torch.ones(2, requires_grad=True)
        with bh.context(replay=bh.Replay(restore=fail_to_restore, timeout=30.0)) as ctx:
            y = bh.rpc_sync("worker1", torch.mul, args=(x, 2))
            lose(cluster, "worker1")
            cluster.scheduler.after(0.0, lambda: cluster.spawn(lambda: cluster.start("worker1"), "crash"))
            pause(1.0)
            if what == "backward":
                ctx.backward(y.sum())
            else:
                TRIED[what](20.0)

    with pytest.raises(KeyError, match="no checkpoint") as caught:
        cluster.run("worker0", program).result()
    assert "raised by Replay.restore on worker 'worker1'" in "\n".join(caught.value.__notes__)


def test_references_are_refused(cluster: SimCluster) -> None:
    """Values of references on the lost worker are not rebuilt."""

    def program() -> None:
        x = torch.ones(2, requires_grad=True)
        with bh.context(replay=bh.Replay(timeout=3.0)):
            rref = bh.remote("worker1", torch.mul, args=(x, 2))
            rref.to_here()
            cluster.scheduler.after(0.0, lambda: cluster.spawn(crash, "crash"))
            bh.current_worker().runtime.one_shot().wait(2.0)
            bh.rpc_sync("worker1", torch.mul, args=(x, 2))

    def crash() -> None:
        cluster.crash("worker1")
        cluster.sleep(0.5)
        cluster.start("worker1")

    with pytest.raises(bh.PeerLostError) as caught:
        cluster.run("worker0", program).result()
    assert "references" in "\n".join(caught.value.__notes__)


@pytest.mark.parametrize("near", [0.0, 0.1])
@pytest.mark.parametrize("number", range(1, 10))
def test_a_channel_that_is_lost_in_backward(cluster: SimCluster, number: int, near: float) -> None:
    """Only a channel is lost, no worker: the pass runs again."""
    expected = cluster.run("worker0", drive).result()
    send, count = SimChannel.send, 0

    def lossy(channel: SimChannel, frame: Frame, *, timeout: float | None = None) -> None:
        nonlocal count
        count += frame.kind in BACKWARD
        if frame.kind in BACKWARD and count == number:
            cluster.network.drop(channel, near, 0.1 - near)
        else:
            send(channel, frame, timeout=timeout)

    SimChannel.send = lossy  # type: ignore[method-assign]
    try:
        same(cluster.run("worker0", drive).result(), expected)
    finally:
        SimChannel.send = send  # type: ignore[method-assign]
    assert count > number


def test_arguments_that_change_after_they_were_sent(cluster: SimCluster) -> None:
    """The repeated request has the arguments of the first one."""

    def program() -> list[float]:
        x = torch.ones(2, dtype=torch.float64, requires_grad=True)
        with bh.context(replay=bh.Replay(timeout=30.0)) as ctx:
            factor = torch.full((2,), 3.0, dtype=torch.float64)
            y = bh.rpc_sync("worker1", torch.mul, args=(x, factor))
            factor.fill_(100.0)
            cluster.scheduler.after(0.0, lambda: cluster.spawn(crash, "crash"))
            bh.current_worker().runtime.one_shot().wait(2.0)
            ctx.backward(y.sum())
            return ctx.grads[x].tolist()

    def crash() -> None:
        cluster.crash("worker1")
        cluster.sleep(0.5)
        cluster.start("worker1")

    assert cluster.run("worker0", program).result() == [3.0, 3.0]


def test_replay_that_makes_no_sense() -> None:
    for wrong in (1, "yes", restore):
        with pytest.raises(TypeError, match="replay"):
            bh.context(replay=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout"):
        bh.Replay(timeout=-1.0)
    with pytest.raises(TypeError, match="restore"):
        bh.Replay(restore=3)  # type: ignore[arg-type]
