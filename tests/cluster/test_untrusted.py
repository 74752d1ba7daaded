"""Workers that do not trust others: what can be called and sent, and that gradients are those of autograd."""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed import TCPStore

import backhaul as bh
from backhaul._autograd.backward.engine import Engine
from backhaul._rpc.cluster.departure import seal_of
from backhaul._rpc.cluster.membership_table import Standing
from backhaul._rpc.node import Node, describe, start_node
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._wire.messages import Departure, pack

from .mixed import mixed_cluster
from .processes import run_processes

TRUSTING = bh.Options(shutdown_timeout=10, timeout=20)
STRICT = bh.Options(shutdown_timeout=10, timeout=20, security=bh.Security(trusted=False))
weight = torch.full((3,), 2.0, requires_grad=True)
started, gate = threading.Semaphore(0), threading.Event()


@bh.expose
def scale(x: torch.Tensor, *, by: float = 1.0) -> torch.Tensor:
    return x * weight * by


@bh.expose
def relay(to: str, x: torch.Tensor) -> torch.Tensor:
    return bh.rpc_sync(to, scale, args=(x,)) + scale(x * x)


@bh.expose
def both(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    shared = x * y * weight
    return [shared.sin(), shared.cos()]


@bh.expose
def echo(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


@bh.expose
def fail(how: str) -> None:
    if how == "own":
        raise bh.errors.ContextError("mine", context=5)
    if how == "class":
        raise type("Special", (ValueError,), {})("special")
    if how == "object":
        raise ValueError(object)
    raise {"key": KeyError("k", 3), "os": FileNotFoundError(2, "gone"), "stop": StopIteration(4)}[how]


@bh.expose
def wait() -> str:
    started.release()
    assert gate.wait(20)
    return "done"


@bh.expose(to=("chief*",))
def for_chiefs() -> str:
    return "yes"


@bh.expose
def returns_an_object() -> Any:
    return threading.Lock


@bh.expose
@bh.async_execution
def later(x: int) -> bh.Future[int]:
    done: bh.Future[int] = bh.Future()
    done.set_result(x + 1)
    return done


def not_exposed() -> str:
    return "never"


@pytest.fixture(params=["strict", "trusting driver", "trusting worker", "sockets"])
def pair(request: pytest.FixtureRequest) -> Iterator[list[bh.Worker]]:
    driver = TRUSTING if request.param == "trusting driver" else STRICT
    worker = TRUSTING if request.param == "trusting worker" else STRICT
    sockets = functools.partial(SocketEndpoint, secret=b"s")
    kind = {"endpoints": sockets} if request.param == "sockets" else {}
    with mixed_cluster({"driver": driver, "worker": worker, "third": STRICT}, **kind) as workers:
        yield workers


def test_values(pair: list[bh.Worker]) -> None:
    sent = [1, (2.5, {"x": {3}, "y": b"z"}), None, 1 << 80, torch.arange(3), torch.float16]
    (found,), rest = bh.rpc_sync("worker", echo, args=(sent,), kwargs={"k": [1j]})
    assert torch.equal(found.pop(4), sent.pop(4))  # type: ignore[arg-type]
    assert (found, rest) == (sent, {"k": [1j]})
    assert bh.rpc_async("worker", later, args=(1,)).wait() == 2
    big = torch.rand(300_000)
    assert torch.equal(bh.rpc_sync("worker", echo, args=(big,))[0][0], big)


def test_values_that_cannot_be_sent_fail_at_the_caller(pair: list[bh.Worker]) -> None:
    for wrong in (threading.Lock(), not_exposed, bh.RRef(1), torch.nn.Linear(1, 1)):
        with pytest.raises(bh.errors.SerializationError, match=r"args\[0\]"):
            bh.rpc_sync("worker", echo, args=([wrong],))
    with pytest.raises(bh.errors.SerializationError, match="result"):
        bh.rpc_sync("worker", returns_an_object)
    with pytest.raises(bh.errors.SerializationError, match="expose"):
        bh.rpc_sync("worker", lambda: 1)
    with pytest.raises(bh.errors.PermissionDeniedError, match="references"):
        bh.remote("worker", dict)
    assert bh.rpc_sync("worker", echo) == ((), {})


def test_a_worker_trusts_itself() -> None:
    with mixed_cluster({"driver": STRICT}):
        assert bh.rpc_sync("driver", lambda: [threading.get_native_id()])


def test_what_is_not_exposed_is_refused() -> None:
    with mixed_cluster({"driver": TRUSTING, "worker": STRICT, "chief1": STRICT}) as (driver, _, chief):
        channel = None
        for name in (
            not_exposed,
            "os:system",
            "torch:load",
            "builtins:eval",
            for_chiefs,
            "backhaul._rref.remote:create",
        ):
            with pytest.raises(bh.errors.PermissionDeniedError) as caught:
                bh.rpc_sync("worker", name, args=("true",))
            assert (caught.value.worker, caught.value.caller) == ("worker", "driver")
            assert caught.value.function
            found = driver.part(Node).peers.find("worker").channel
            assert channel in (None, found)  # it stays open
            channel = found
        with chief:
            assert bh.rpc_sync("worker", for_chiefs) == "yes"


def test_allow_lists() -> None:
    allow = bh.Options(
        shutdown_timeout=10, security=bh.Security(trusted=False, allow={"driver": ["*:echo"], "chief*": ["*"]})
    )
    with mixed_cluster({"driver": TRUSTING, "worker": allow}):
        assert bh.rpc_sync("worker", echo, args=(1,)) == ((1,), {})
        with pytest.raises(bh.errors.PermissionDeniedError, match="allow"):
            bh.rpc_sync("worker", later, args=(1,))


def test_faults(pair: list[bh.Worker]) -> None:
    with pytest.raises(KeyError) as key:
        bh.rpc_sync("worker", fail, args=("key",))
    assert key.value.args == ("k", 3)
    with pytest.raises(FileNotFoundError, match="gone"):
        bh.rpc_sync("worker", fail, args=("os",))
    with pytest.raises(bh.errors.ContextError) as own:
        bh.rpc_sync("worker", fail, args=("own",))
    assert (own.value.context, own.value.worker) == (5, "worker")
    with pytest.raises(ValueError, match="object"):
        bh.rpc_sync("worker", fail, args=("object",))
    for how in ("class", "stop"):
        with pytest.raises(bh.RemoteError) as other:
            bh.rpc_sync("worker", fail, args=(how,))
        assert other.value.type_name


def test_tracebacks_are_not_sent_unless_options_allow_it() -> None:
    shown = bh.Options(shutdown_timeout=10, security=bh.Security(trusted=False, tracebacks=True))
    with mixed_cluster({"driver": TRUSTING, "quiet": STRICT, "open": shown}):
        for name, wanted in (("quiet", False), ("open", True)):
            with pytest.raises(KeyError) as caught:
                bh.rpc_sync(name, fail, args=("key",))
            assert isinstance(caught.value.__cause__, bh.errors.RemoteTraceback)
            assert ("test_untrusted.py" in caught.value.__cause__.text) is wanted


def gradients(call: Any, relayed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """One program; with ``call`` local or remote."""
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    first, second = call(both, x, x * 2)
    y = call(scale, first) + second * relayed(x)
    return x, (y * y).sum()


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_gradients_are_those_of_autograd(pair: list[bh.Worker], mode: Any) -> None:
    x, loss = gradients(lambda f, *args: f(*args), lambda x: scale(x) + scale(x * x))
    expected, expected_weight = torch.autograd.grad(loss, [x, weight])

    def call(function: Any, *args: Any) -> Any:
        return bh.rpc_sync("worker", function, args=args)

    with bh.context() as ctx:
        x, loss = gradients(call, lambda x: call(relay, "third", x))
        ctx.backward(loss, mode=mode, retain_graph=True)
        torch.testing.assert_close(ctx.grads[x], expected)
        found: Any = 0
        for worker in pair[1:]:
            with worker:
                found = found + bh.get_gradients(int(ctx))[weight]
        torch.testing.assert_close(found, expected_weight)
        assert set(ctx.describe()["workers"]) == {"driver", "worker", "third"}
        ctx.backward(loss)
        torch.testing.assert_close(ctx.grads[x], 2 * expected)
    with bh.context() as ctx:  # again through itself
        x = torch.ones(3, requires_grad=True)
        y = bh.rpc_sync("worker", both, args=(x, x))[0].sum()
        ctx.backward(y, create_graph=True)
        ctx.backward(ctx.grads[x].sum())
    assert all(worker.counters["num_autograd_contexts"]() == 0 for worker in pair[:1])


class Explosive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise ArithmeticError("boom", 7)


@bh.expose
def explosive(x: torch.Tensor) -> torch.Tensor:
    return Explosive.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def test_errors_in_a_pass(pair: list[bh.Worker]) -> None:
    with bh.context() as ctx:
        loss = bh.rpc_sync("worker", explosive, args=(torch.ones(2, requires_grad=True),)).sum()
        with pytest.raises(ArithmeticError) as caught:
            ctx.backward(loss)
        assert caught.value.args == ("boom", 7)


def test_profiles_leave_untrusting_workers_out(pair: list[bh.Worker]) -> None:
    with bh.profile():
        assert bh.rpc_sync("worker", later, args=(1,)) == 2


# Members.


@pytest.mark.parametrize("of_others", [STRICT, TRUSTING])
def test_leaving(of_others: bh.Options) -> None:
    with mixed_cluster({"driver": STRICT, "worker": of_others, "goes": STRICT}) as (driver, worker, goes):
        with goes:
            assert bh.rpc_sync("driver", echo) == ((), {})
            bh.leave()
        assert goes.closed
        for other in (driver, worker):  # also the member to which it never had a channel
            with other:
                assert [info.name for info in bh.get_worker_infos()] == ["driver", "worker"]
                with pytest.raises(bh.errors.UnknownWorkerError, match="has left"):
                    bh.rpc_sync("goes", echo)
        assert bh.rpc_sync("worker", echo) == ((), {})


def test_no_worker_can_dismiss_another() -> None:
    forget = "backhaul._rpc.cluster.leaving:forget"
    with mixed_cluster({"driver": STRICT, "worker": STRICT, "hostile": TRUSTING}) as (driver, worker, hostile):
        with hostile:
            for wrong in ({"args": (1,)}, {"args": ("worker",)}, {"kwargs": {"worker": 1}}):
                with pytest.raises(TypeError):
                    bh.rpc_sync("driver", forget, **wrong)
            lives = [worker.incarnation, driver.incarnation]
            for proof in ("", "a lie", *lives, seal_of("a lie"), worker.part(Node).peers.own.record.seal):
                for life in lives:
                    bh.rpc_sync("driver", "backhaul._rpc.cluster.leaving:departed", args=([[life, proof]],))
                left = tuple(Departure(life, 1, "worker", proof) for life in lives)
                standing = pack(Standing((), tuple(lives), left))
                bh.rpc_sync("driver", "backhaul._rpc.cluster.partition_healing:compare", args=(standing,))
            with pytest.raises(TypeError):
                bh.rpc_sync("driver", "backhaul._rpc.cluster.leaving:departed", args=(lives[0], 1))
            assert [info.name for info in bh.get_worker_infos()] == ["driver", "worker", "hostile"]
            bh.rpc_sync("driver", forget, args=("a lie", [worker.incarnation, 5]))
        with driver:
            assert [info.name for info in bh.get_worker_infos()] == ["driver", "worker"]
            assert bh.rpc_sync("worker", echo) == ((), {})
        with worker:
            bh.rpc_sync("worker", forget, args=("", []))  # itself: a worker cannot leave in this way
            assert [info.name for info in bh.get_worker_infos()] == ["driver", "worker", "hostile"]


def test_a_worker_that_any_member_tells_of_is_asked_itself() -> None:
    """What others say about it is not believed: it is asked itself, and admitted by its own record."""
    nodes = []
    for number, name in enumerate(("one", "other")):
        endpoint = SocketEndpoint(secret=b"s", unix=True, bind="127.0.0.1")
        own = describe(name, number, endpoint, STRICT, host="here")
        nodes.append(start_node(own, [own], endpoint, STRICT))
    one, other = nodes
    try:
        record = other.peers.own.record
        for false in ({"incarnation": "another"}, {"name": "evil"}, {"addresses": ("unix:@nobody",)}, {"id": -5}):
            one.worker.run(one.admission.approach, msgspec.structs.replace(record, **false))
            assert [peer.info.name for peer in one.peers] == ["one"]
            assert [peer.info.name for peer in other.peers] == ["other"]
        one.worker.run(one.admission.approach, msgspec.structs.replace(record, id=7, seal="a lie", trusting=True))
        for node in nodes:
            assert node.peers.records == (one.peers.own.record, record)
            with node.worker:
                assert [bh.rpc_sync(name, echo) for name in ("one", "other")] == [((), {})] * 2
    finally:
        for node in nodes:
            node.shutdown(graceful=False, timeout=5.0)


def come_and_go(rank: int, port: int) -> Any:
    options = bh.Options(timeout=60, security=bh.Security(secret="of the untrusting", trusted=False))
    store = TCPStore("127.0.0.1", port, is_master=False)
    if rank < 2:
        bh.init(f"w{rank}", rank=rank, world_size=2, store=store, options=options)
        store.set(f"address {rank}", bh.get_address())
        store.get("late has left")
        found = [info.name for info in bh.get_worker_infos()]
        with pytest.raises(bh.errors.UnknownWorkerError, match="has left"):
            bh.rpc_sync("late", echo)
    else:
        addresses = [store.get(f"address {other}").decode() for other in range(2)]
        bh.init("late", join=addresses, options=options)
        found = [bh.rpc_sync(info, echo, args=(1,)) for info in bh.get_worker_infos()]
        bh.leave()
        store.set("late has left", "")
    bh.shutdown(timeout=60)
    return found


def test_joining_and_leaving_processes() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second, late = run_processes(come_and_go, 3, store.port)
    assert first == second == ["w0", "w1"]
    assert late == [((1,), {})] * 3


# Limits.


def test_calls_of_one_peer_are_limited_and_those_of_others_are_not() -> None:
    few = bh.Options(shutdown_timeout=10, limits=bh.Limits(calls=3))  # also for trusted peers
    gate.clear()
    with mixed_cluster({"driver": TRUSTING, "worker": few, "other": TRUSTING}) as (_, worker, other):
        calls = [bh.rpc_async("worker", wait) for _ in range(3)]
        for _ in calls:
            assert started.acquire(timeout=20)
        with pytest.raises(bh.errors.LimitError) as caught:
            bh.rpc_sync("worker", later, args=(1,))
        assert (caught.value.option, caught.value.value, caught.value.worker) == ("limits.calls", 3, "worker")
        with other:
            assert bh.rpc_sync("worker", later, args=(1,)) == 2
        gate.set()
        assert bh.wait_all(calls) == ["done"] * 3
        assert bh.rpc_sync("worker", later, args=(1,)) == 2
        assert worker.counters["num_calls_in_flight"]() == 0


def test_bytes_in_flight_are_limited() -> None:
    few = bh.Options(
        shutdown_timeout=10, security=bh.Security(trusted=False), limits=bh.Limits(bytes_in_flight=1 << 16)
    )
    gate.clear()
    with mixed_cluster({"driver": TRUSTING, "worker": few}):
        assert bh.rpc_sync("worker", echo, args=(torch.zeros(1 << 15),))
        held = bh.rpc_async("worker", wait)
        assert started.acquire(timeout=20)
        with pytest.raises(bh.errors.LimitError, match=r"limits\.bytes_in_flight"):
            bh.rpc_sync("worker", echo, args=(torch.zeros(1 << 15),))
        gate.set()
        held.wait()
        assert bh.rpc_sync("worker", echo, args=(torch.zeros(1 << 15),))


def open_context(x: torch.Tensor) -> int:
    context = bh.context().__enter__()
    bh.rpc_sync("worker", scale, args=(x,))
    return int(context)


def test_tensors_depth_and_contexts_are_limited() -> None:
    few = bh.Options(
        shutdown_timeout=10, security=bh.Security(trusted=False), limits=bh.Limits(tensors=4, depth=3, contexts=2)
    )
    with mixed_cluster({"driver": TRUSTING, "worker": few}) as (driver, _):
        assert bh.rpc_sync("worker", echo, args=tuple(torch.zeros(4, 2)))
        with pytest.raises(bh.errors.LimitError, match=r"limits\.tensors"):
            bh.rpc_sync("worker", echo, args=tuple(torch.zeros(5, 2)))
        assert bh.rpc_sync("worker", echo, args=([[[1]]],))
        with pytest.raises(bh.errors.LimitError, match=r"limits\.depth"):
            bh.rpc_sync("worker", echo, args=([[[[1]]]],))
        x = torch.ones(1, requires_grad=True)

        def in_a_context() -> None:
            with bh.context():
                bh.rpc_sync("worker", scale, args=(x,))

        for _ in range(5):
            in_a_context()  # one at a time
        contexts = [contextvars.copy_context().run(open_context, x) for _ in range(2)]
        with pytest.raises(bh.errors.LimitError, match=r"limits\.contexts"):
            in_a_context()
        for context in contexts:
            driver.part(Engine).release(context)
        assert bh.rpc_sync("worker", echo) == ((), {})


@bh.expose
def numbers(count: int) -> list[int]:
    return list(range(count))


@bh.expose
def raise_many(count: int) -> None:
    raise ValueError("too many", list(range(count)))


@bh.expose
def total(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors).sum() * weight.sum()


@pytest.mark.parametrize("driver", [TRUSTING, STRICT])
def test_values_are_limited_and_nothing_is_lost(driver: bh.Options) -> None:
    """A worker that would send too much gets an error before anything is sent; calls on the same channel go on."""
    gate.clear()
    with mixed_cluster({"driver": driver, "worker": STRICT}) as (first, _):
        assert bh.rpc_sync("worker", echo, args=(list(range(60_000)),))
        peer = first.part(Node).peers.find("worker")
        channel, held = peer.channel, bh.rpc_async("worker", wait)
        assert started.acquire(timeout=20)
        assert channel is not None
        sent = first.counters["bytes_sent"]()
        with pytest.raises(bh.errors.LimitError, match="echo has more values") as caught:
            bh.rpc_sync("worker", echo, args=(list(range(70_000)),))
        found = caught.value
        assert (found.option, found.value, found.worker) == ("limits.values", 1 << 16, "worker")
        assert first.counters["bytes_sent"]() == sent
        deep: Any = 1
        for _ in range(80):
            deep = [deep]
        with pytest.raises(bh.errors.LimitError, match=r"limits\.depth") as caught:
            bh.rpc_sync("worker", echo, args=(deep,))
        assert (caught.value.option, caught.value.value) == ("limits.depth", 64)
        gate.set()
        assert held.wait() == "done"
        assert peer.channel is channel


def test_results_and_exceptions_of_too_many_values() -> None:
    few = bh.Options(
        shutdown_timeout=10, timeout=20, security=bh.Security(trusted=False), limits=bh.Limits(values=4096)
    )
    with mixed_cluster({"driver": few, "worker": STRICT}) as (driver, _):
        assert bh.rpc_sync("worker", numbers, args=(4000,)) == list(range(4000))
        channel = driver.part(Node).peers.find("worker").channel
        with pytest.raises(bh.errors.LimitError, match=r"the result of .*numbers has more values") as caught:
            bh.rpc_sync("worker", numbers, args=(5000,))
        assert (caught.value.option, caught.value.value, caught.value.worker) == ("limits.values", 4096, "driver")
        with pytest.raises(ValueError, match="too many"):
            bh.rpc_sync("worker", raise_many, args=(10,))
        with pytest.raises(bh.RemoteError, match="too many") as other:  # its type and text, if not the exception itself
            bh.rpc_sync("worker", raise_many, args=(5000,))
        assert other.value.type_name == "builtins.ValueError"
        assert driver.part(Node).peers.find("worker").channel is channel


@pytest.mark.parametrize("worker", [TRUSTING, STRICT])
def test_gradients_of_too_many_values_end_their_pass_alone(worker: bh.Options) -> None:
    few = bh.Options(
        shutdown_timeout=10, timeout=20, security=bh.Security(trusted=False), limits=bh.Limits(values=4096)
    )
    with mixed_cluster({"driver": few, "worker": worker}) as (driver, _):
        for count, fits in ((100, True), (500, False)):
            xs = [torch.ones(1, requires_grad=True) for _ in range(count)]
            with bh.context() as ctx:
                loss = bh.rpc_sync("worker", total, args=(xs,))
                channel = driver.part(Node).peers.find("worker").channel
                if fits:
                    ctx.backward(loss)
                    assert all(ctx.grads[x] == 6 for x in xs)
                else:
                    with pytest.raises(bh.errors.LimitError, match="gradients") as caught:
                        ctx.backward(loss)
                    assert (caught.value.option, caught.value.worker) == ("limits.values", "driver")
        assert driver.part(Node).peers.find("worker").channel is channel
        assert bh.rpc_sync("worker", echo) == ((), {})


def test_many_tensors_are_few_values() -> None:
    with mixed_cluster({"driver": TRUSTING, "worker": STRICT}):
        sent = [tensor.clone() for tensor in torch.arange(12_000.0).view(12_000, 1)]
        (found,), _ = bh.rpc_sync("worker", echo, args=(sent,))
        assert torch.equal(torch.cat(found), torch.cat(sent))
