"""References on real workers: what they return, where they travel, and when values are dropped."""

from __future__ import annotations

import copy
import gc
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import backhaul as bh
from backhaul._rpc.calls import server
from backhaul._rpc.node import Node
from backhaul._rref import notice_sender
from backhaul._rref.registry import RRefRegistry
from backhaul._transport.inproc import InprocEndpoint
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul.testing.faults import Faults

from ..cluster.processes import DIED, run_processes

DEADLINE_SECONDS = 20.0
SECRET = b"x" * 32


def sockets() -> SocketEndpoint:
    return SocketEndpoint(secret=SECRET)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "never came about"
        gc.collect()
        time.sleep(0.005)


def counts(workers: Sequence[bh.Worker]) -> list[tuple[int, int]]:
    return [(w.counters["num_owner_rrefs"](), w.counters["num_user_rrefs"]()) for w in workers]


@pytest.fixture(params=["inproc", "sockets"])
def workers(request: pytest.FixtureRequest) -> Iterator[Sequence[bh.Worker]]:
    """Three workers. After the test no reference may be left."""
    with bh.cluster(3, endpoints=InprocEndpoint if request.param == "inproc" else sockets) as made:
        yield made
        eventually(lambda: counts(made) == [(0, 0)] * 3)  # exceptions hold frames, which hold references


class Meeting:
    """Is there when the gate is open. Its visitors wait for each other."""

    def __init__(self) -> None:
        assert opening.wait(DEADLINE_SECONDS)
        self.visitors = threading.Barrier(3)

    def visit(self) -> None:
        self.visitors.wait(DEADLINE_SECONDS)


opening = threading.Event()


def test_methods_of_a_value_that_is_not_there_yet_may_wait_for_each_other(workers: Sequence[bh.Worker]) -> None:
    for _ in range(3):
        opening.clear()
        meeting = bh.remote("worker1", Meeting)
        visits = [meeting.rpc_async().visit() for _ in range(3)]
        bh.rpc_sync("worker1", abs, args=(-1,))  # as a rule, all visits wait for the value now
        opening.set()
        bh.wait_all(visits)


class Counter:
    """A value on some worker."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, number: int = 1) -> int:
        self.count += number
        return self.count

    def fail(self) -> None:
        raise KeyError("on purpose")

    @bh.async_execution
    def add_far_away(self, to: int) -> Any:
        return bh.rpc_async(to, int.__add__, args=(self.count, 100))

    def __call__(self) -> str:
        return bh.get_worker_info().name


def test_a_value_made_elsewhere(workers: Any) -> None:
    rref = bh.remote("worker1", torch.add, args=(torch.ones(2), 1), kwargs={"alpha": 3})
    assert rref.to_here().tolist() == [4.0, 4.0]
    assert (rref.owner(), rref.owner_name(), rref.is_owner()) == (bh.get_worker_info("worker1"), "worker1", False)
    eventually(rref.confirmed_by_owner)
    with pytest.raises(bh.BackhaulError, match=r"on worker 'worker1', not on 'worker0'.*to_here"):
        rref.local_value()
    assert rref._get_type() is torch.Tensor
    assert rref._get_type(blocking=False).wait() is torch.Tensor


def test_a_value_of_its_own(workers: Any) -> None:
    value = [1, 2]
    rref = bh.RRef(value)
    assert rref.is_owner()
    assert rref.confirmed_by_owner()
    assert rref.local_value() is value
    assert rref.to_here() is value
    assert rref._get_type() is list


def test_a_value_made_here_by_a_call(workers: Any) -> None:
    rref = bh.remote(0, Counter, args=(5,))
    assert rref.is_owner()
    assert rref.local_value().count == 5
    assert rref.rpc_sync().add() == 6


def test_calls_on_a_value(workers: Any) -> None:
    rref = bh.remote(1, Counter, args=(5,))
    assert rref.rpc_sync().add(2) == 7
    assert rref.rpc_async().add(number=3).wait() == 10
    assert rref.remote().add().to_here() == 11
    assert rref.rpc_sync().add_far_away(2) == 111
    assert rref.rpc_sync(timeout=DEADLINE_SECONDS).__call__() == "worker1"
    with pytest.raises(KeyError, match="on purpose"):
        rref.rpc_sync().fail()
    with pytest.raises(KeyError, match="on purpose"):
        rref.remote().fail().to_here()
    with pytest.raises(AttributeError, match="no_such_thing"):
        rref.rpc_sync().no_such_thing()


def nothing_to_see() -> None:
    raise ValueError("could not make it")


def give_back(rref: bh.RRef[Any]) -> bh.RRef[Any]:
    return rref


def read(rref: bh.RRef[Any]) -> Any:
    return rref.to_here()


def read_for(rref: bh.RRef[Any], to: int) -> Any:
    return bh.rpc_sync(to, read, args=(rref,))


def is_owner(rref: bh.RRef[Any]) -> bool:
    return rref.is_owner()


def test_an_error_in_making_is_raised_at_use(workers: Any) -> None:
    rref = bh.remote(1, nothing_to_see)
    for use in (
        rref.to_here,
        rref.rpc_sync().anything,
        lambda: rref.rpc_async().anything().wait(),
        lambda: bh.rpc_sync(2, read, args=(rref,)),
        lambda: bh.rpc_sync(1, read, args=(rref,)),
        lambda: bh.remote(1, read, args=(rref,)).to_here(),
    ):
        with pytest.raises(ValueError, match="could not make it"):
            use()


def test_a_call_that_cannot_be_made(workers: Any) -> None:
    with pytest.raises(bh.errors.UnknownWorkerError):
        bh.remote("nobody", len)
    with pytest.raises(TypeError, match="callable"):
        bh.remote(1, 3)  # type: ignore[arg-type]
    with pytest.raises(bh.errors.SerializationError):
        bh.remote(1, len, args=(threading.Lock(),))


@pytest.mark.parametrize("to", [0, 1, 2])
@pytest.mark.parametrize("owner", [0, 1, 2])
def test_they_travel(workers: Any, owner: int, to: int) -> None:
    rref = bh.remote(owner, Counter, args=(1,))
    back = bh.rpc_sync(to, give_back, args=(rref,))
    assert back.owner() == rref.owner()
    assert bh.rpc_sync(to, is_owner, args=(rref,)) == (owner == to)
    assert back.rpc_sync().add() == 2
    assert rref.rpc_sync().add() == 3
    assert bh.rpc_sync(to, read_for, args=({"in": [rref]}["in"][0], 3 - max(to, 1))).count == 3


def test_a_reference_in_a_reference(workers: Any) -> None:
    inner = bh.remote(2, Counter, args=(7,))
    outer = bh.remote(1, give_back, args=(inner,))
    del inner
    assert outer.to_here().rpc_sync().add() == 8


def pass_around(rref: bh.RRef[Any], left: int) -> bh.RRef[Any]:
    following = (bh.get_worker_info().id + 1) % 3
    return bh.rpc_sync(following, pass_around, args=(rref, left - 1)) if left else rref


def test_many_ways_at_once(workers: Any) -> None:
    """Handles are deleted on all workers all the time; the value stays."""
    rref = bh.remote(1, Counter)
    calls = [bh.rpc_async(n % 3, pass_around, args=(rref, n % 7)) for n in range(150)]
    copies = bh.wait_all(calls)
    assert sum(copy.rpc_sync().add() > 0 for copy in copies[::10]) == 15
    del rref, calls
    copies = copies[-1:]
    gc.collect()
    assert copies[0].to_here().count == 15


made: list[weakref.ref[Counter]] = []


def make() -> Counter:
    value = Counter()
    made[:] = [weakref.ref(value)]
    return value


def test_a_value_ends_with_its_last_reference(workers: Any) -> None:
    rref = bh.remote(1, make)
    there = bh.remote(2, give_back, args=(rref,))
    there.to_here()
    del rref
    gc.collect()
    assert there.to_here().rpc_sync().add() == 1
    assert made[0]() is not None
    del there
    eventually(lambda: made[0]() is None)


def test_a_handle_that_dies_during_its_call(workers: Any) -> None:
    futures = [bh.remote(1, Counter, args=(n,)).rpc_async().add() for n in range(50)]
    gc.collect()
    assert bh.wait_all(futures) == list(range(1, 51))


def test_they_do_not_travel_otherwise(workers: Any) -> None:
    rref = bh.RRef(1)
    for way in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="in calls only"):
            way(rref)


def test_a_message_that_cannot_be_sent_leaves_nothing_behind(workers: Any) -> None:
    rref = bh.remote(1, Counter)
    with pytest.raises(bh.errors.SerializationError):
        bh.rpc_sync(2, read, args=(rref, threading.Lock()))


class Unreadable:
    def __reduce__(self) -> Any:
        return int, ("not a number",)


def test_a_message_that_cannot_be_read_leaves_nothing_behind(workers: Any) -> None:
    rref = bh.remote(1, Counter)
    with pytest.raises(bh.errors.SerializationError):
        bh.rpc_sync(2, give_back, args=([rref, Unreadable()],))
    assert rref.rpc_sync().add() == 1


gates: dict[str, threading.Event] = {}


def wait_and_give_back(gate: str, rref: bh.RRef[Any]) -> bh.RRef[Any]:
    assert gates[gate].wait(DEADLINE_SECONDS)
    return rref


def test_a_reply_that_comes_too_late_leaves_nothing_behind(workers: Any) -> None:
    gates["late"] = threading.Event()
    rref = bh.remote(1, Counter)
    with pytest.raises(bh.CallTimeoutError):
        bh.rpc_sync(2, wait_and_give_back, args=("late", rref), timeout=0.1)
    gates["late"].set()
    assert rref.rpc_sync().add() == 1


def test_a_lent_reference_that_the_callee_keeps(workers: Any) -> None:
    """It counts as soon as the call is over."""
    value = Counter(1)
    there = bh.rpc_sync(2, keep_here, args=(bh.RRef(value),))
    assert workers[0].counters["num_forks"]() == 1
    alive = weakref.ref(value)
    del value
    assert alive() is not None
    assert bh.rpc_sync(2, add_to_kept) == 2
    there.rpc_sync().clear()
    eventually(lambda: alive() is None)


def test_references_to_one_value_in_one_call(workers: Any) -> None:
    mine, theirs = bh.RRef(Counter(1)), bh.remote(1, Counter, args=(2,))
    references = [mine, theirs, mine]
    assert bh.rpc_sync(1, add_all, args=(references,)) == [2, 3, 3]
    assert bh.rpc_sync(2, add_all, args=(references,)) == [4, 4, 5]
    assert bh.rpc_sync(0, add_all, args=(references,)) == [6, 5, 7]


def add_all(references: list[bh.RRef[Counter]]) -> list[int]:
    return [reference.rpc_sync().add() for reference in references]


here: list[bh.RRef[Counter]] = []


def keep_here(rref: bh.RRef[Counter]) -> bh.RRef[list[bh.RRef[Counter]]]:
    here.append(rref)
    return bh.RRef(here)


def add_to_kept() -> int:
    return here[0].rpc_sync().add()  # type: ignore[no-any-return]


def test_a_lent_reference_in_a_message_that_cannot_be_read(workers: Any) -> None:
    rref = bh.RRef(Counter())
    with pytest.raises(bh.errors.SerializationError):
        bh.rpc_sync(2, give_back, args=([rref, Unreadable()],))
    assert rref.rpc_sync().add() == 1
    for worker in workers:
        assert not worker.part(RRefRegistry).owned._table._released_early


def wait_and_make(gate: str) -> int:
    assert gates[gate].wait(DEADLINE_SECONDS)
    return 5


def test_use_before_it_is_made(workers: Any) -> None:
    gates["make"] = threading.Event()
    rref = bh.remote(1, wait_and_make, args=("make",))
    assert not rref.confirmed_by_owner()
    calls = [bh.rpc_async(to, read, args=(rref,)) for to in range(3)]
    with pytest.raises(bh.CallTimeoutError):
        rref.to_here(timeout=0.1)
    assert not any(call.done() for call in calls)
    gates["make"].set()
    assert bh.wait_all(calls) == [5, 5, 5]


def test_making_that_takes_too_long(workers: Any) -> None:
    gates["slow"] = threading.Event()
    rref = bh.remote(1, wait_and_make, args=("slow",), timeout=0.1)
    assert rref._created is not None
    with pytest.raises(bh.CallTimeoutError):
        rref._created.wait()
    with pytest.raises(bh.CallTimeoutError, match="wait_and_make"):
        rref.to_here()
    gates["slow"].set()


# Autograd.


class Layer:
    def __init__(self, size: int) -> None:
        self.weight = torch.full((size,), 0.5, dtype=torch.float64, requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sin()

    def gradient(self, context: int) -> torch.Tensor:
        return bh.get_gradients(context)[self.weight]


def by_hand() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(3.0, dtype=torch.float64, requires_grad=True)
    layer = Layer(3)
    layer.forward(layer.forward(x)).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    return x.grad, layer.weight.grad


@pytest.mark.parametrize("way", ["rpc_sync", "rpc_async", "remote", "backward"])
def test_gradients_flow_through_calls_on_values(workers: Any, way: str) -> None:
    x = torch.arange(3.0, dtype=torch.float64, requires_grad=True)
    layer = bh.remote(1, Layer, args=(3,))
    with bh.context() as ctx:
        if way == "rpc_sync":
            ctx.backward(layer.rpc_sync().forward(layer.rpc_sync().forward(x)).sum())
        elif way == "rpc_async":
            ctx.backward(layer.rpc_async().forward(layer.rpc_async().forward(x).wait()).wait().sum())
        elif way == "remote":
            ctx.backward(layer.remote().forward(layer.remote().forward(x).to_here()).to_here().sum())
        else:
            y = layer.remote().forward(layer.remote().forward(x).to_here())
            bh.remote(1, torch.sum, args=(y.to_here(),)).backward(ctx)
        expected = by_hand()
        assert torch.equal(ctx.grads[x], expected[0])
        assert torch.equal(layer.rpc_sync().gradient(int(ctx)), expected[1])


def test_backward_without_a_context(workers: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    rref = bh.RRef((x * 3).sum())
    rref.backward(retain_graph=True)
    bh.rpc_sync(0, bh.RRef.backward, args=(rref,))
    assert x.grad is not None
    assert x.grad.tolist() == [6.0, 6.0]
    with pytest.raises(TypeError, match="starts from a tensor"):
        bh.RRef(3).backward()


# The end.


def test_a_leak_is_reported() -> None:
    with bh.cluster(2, endpoints=sockets) as made:
        rref = bh.remote(1, Counter)
        rref.to_here()
        registry = made[1].part(RRefRegistry)
        assert registry.end() == ["a value of type Counter is still referred to by worker 0"]
        made[0].part(RRefRegistry).begin()
        eventually(lambda: registry.end() == [])
        del rref


def fail() -> None:
    raise ValueError("long ago")


def test_a_leak_of_a_value_that_could_not_be_made_is_reported_as_any() -> None:
    with bh.cluster(2, endpoints=sockets) as made:
        rref = bh.remote(1, fail)
        with pytest.raises(ValueError, match="long ago"):
            rref.to_here()
        other = made[0].part(Node)
        ending = threading.Thread(target=other.shutdown, kwargs={"graceful": True, "timeout": DEADLINE_SECONDS})
        ending.start()
        with pytest.raises(
            bh.errors.LeakError, match=r"could not be made \(ValueError\) is still referred to by worker 0"
        ):
            made[1].part(Node).shutdown(graceful=True, timeout=DEADLINE_SECONDS, strict=True)
        ending.join()
        assert made[1].closed
        del rref


def quit_program() -> None:
    raise SystemExit(2)


def test_a_function_that_means_to_end_the_program(workers: Any) -> None:
    with pytest.raises(bh.RemoteError, match="SystemExit"):
        bh.remote(1, quit_program).to_here()


async def later(number: int) -> int:
    return number + 1


class Slow:
    async def answer(self) -> int:
        return 42


def test_coroutines(workers: Any) -> None:
    assert bh.remote(1, later, args=(1,)).to_here() == 2
    assert bh.remote(0, later, args=(1,)).to_here() == 2
    assert bh.remote(2, Slow).rpc_sync().answer() == 42


def test_a_value_of_its_own_that_comes_too_late(workers: Any) -> None:
    gates["own"] = threading.Event()
    rref = bh.remote(0, wait_and_make, args=("own",))
    with pytest.raises(bh.CallTimeoutError):
        rref.to_here(timeout=0.05)
    late = bh.remote(0, wait_and_make, args=("own",), timeout=0.05)
    with pytest.raises(bh.CallTimeoutError):
        late.to_here()
    gates["own"].set()
    assert rref.to_here() == 5


def test_arguments_are_counted_as_the_user_does(workers: Any) -> None:
    for _ in range(3):
        with pytest.raises(bh.errors.SerializationError, match=r"args\[1\]") as caught:
            bh.remote(1, torch.add, args=(1, threading.Lock()))
        assert caught.value.path == "args[1]"
    for worker in workers:
        assert not worker.part(RRefRegistry).owned._table._released_early


def test_a_call_that_was_not_sent_leaves_nothing_behind(workers: Any) -> None:
    faults = Faults(lambda pending: ["give_back" if "give_back" in pending.label else ""], lose={"give_back"}, times=2)
    faults.install(workers[0].part(Node).client)
    for owner in (0, 1):
        with pytest.raises(bh.PeerLostError):
            bh.rpc_sync(2, give_back, args=(bh.remote(owner, Counter),))


def test_notices_that_are_lost_again_and_again(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner applies no later notice before the lost ones, so later notices carry them."""
    monkeypatch.setattr(notice_sender, "MAX_TRIES", 5)
    rref = bh.remote(1, Counter)
    rref.to_here()
    rrefs = workers[0].part(RRefRegistry)
    faults = Faults(lambda pending: ["notice" if "take_notices" in pending.label else ""], lose={"notice"}, times=5)
    faults.install(workers[0].part(Node).client)
    del rref
    gc.collect()
    eventually(lambda: any(outbox._undelivered for outbox in rrefs.notices._outboxes.values()))
    for _ in range(5):
        bh.remote(1, Counter).to_here()


class Named:
    def _call(self) -> str:
        return "called"


def test_a_method_of_any_name(workers: Any) -> None:
    assert bh.remote(1, Named).rpc_sync()._call() == "called"


kept: list[Any] = []


def keep(rref: Any) -> None:
    kept.append(rref)


def owned_values() -> int:
    return bh.get_debug_info()["num_owner_rrefs"]


def lose_a_holder(rank: int, folder: str) -> Any:
    bh.init(f"worker{rank}", rank=rank, world_size=3, store=torch.distributed.FileStore(f"{folder}/store", 3))
    found = None
    if rank == 0:
        rref = bh.remote(1, Counter)
        bh.rpc_sync(2, keep, args=(rref,))  # it never talks to the owner
        del rref
        gc.collect()
        assert bh.rpc_sync(1, owned_values) == 1
        with pytest.raises(bh.PeerLostError):
            bh.rpc_sync(2, os._exit, args=(3,))
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (found := bh.rpc_sync(1, owned_values)) and time.monotonic() < deadline:
            time.sleep(0.01)
    bh.shutdown(timeout=DEADLINE_SECONDS)
    return found


def test_a_holder_that_dies_without_a_word(tmp_path: pathlib.Path) -> None:
    assert run_processes(lose_a_holder, 3, str(tmp_path), patience=3 * DEADLINE_SECONDS) == [0, None, DIED]


def test_a_cluster_that_is_never_left() -> None:
    """As in a notebook: the interpreter must still exit."""
    program = "import backhaul as bh; c = bh.cluster(2); c.__enter__(); r = bh.remote(1, dict); print(r.to_here())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "{}\n"


def test_what_goes_to_a_function_that_is_not_there_is_let_go(
    workers: Sequence[bh.Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = server.resolve

    def resolve(name: str) -> Any:
        if name.endswith("add"):
            raise bh.errors.FunctionNotFoundError(f"no {name}", function=name)
        return found(name)

    reference = bh.remote(1, torch.ones, args=(2,))
    reference.to_here()
    with monkeypatch.context() as patch:
        patch.setattr(server, "resolve", resolve)
        with pytest.raises(bh.errors.FunctionNotFoundError, match="'worker2' has no function"):
            bh.rpc_sync(2, torch.add, args=(reference, 1))
    del reference
    eventually(lambda: counts(workers) == [(0, 0)] * len(workers))


@pytest.mark.parametrize("reason", [bh.CallTimeoutError, bh.PeerLostError])
def test_an_error_does_not_keep_what_its_caller_held(workers: Any, reason: type[bh.BackhaulError]) -> None:
    """Otherwise it would live until the next garbage collection, and another worker would keep the value."""
    gates["forgotten"] = threading.Event()
    with bh.context(replay=True):  # from now on a hook sees calls that lost their worker
        bh.rpc_sync("worker1", torch.add, args=(torch.ones(1, requires_grad=True), 1))

    def lose() -> None:
        for channel in workers[0].part(Node).peers.find("worker1").channels:
            channel.close()

    def give_up() -> weakref.ref[bh.RRef[int]]:
        made = bh.remote("worker1", wait_and_make, args=("forgotten",))
        try:
            if reason is bh.PeerLostError:
                threading.Timer(0.1, lose).start()
            made.to_here(timeout=0.02 if reason is bh.CallTimeoutError else 0)
        except reason:
            return weakref.ref(made)
        raise AssertionError

    gc.disable()
    try:
        assert give_up()() is None
    finally:
        gc.enable()
        gates["forgotten"].set()
