"""Calls over every transport: whatever can be called, passed, returned or raised here can be so on another worker,
and does the same there.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import math
import operator
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import backhaul as bh
from backhaul._transport.base import Channel, Endpoint, EndpointFactory

from . import remote_functions as remote
from .remote_functions import PATIENCE, Counter, LaterCounter, Network, PlainError, gate
from .values import assert_same

A, B = torch.arange(6.0).reshape(2, 3), torch.full((2, 3), 2.0)
OFFSET = 5


def closure_over(number: int) -> Callable[[int], int]:
    def add(other: int) -> int:
        return number + other + OFFSET

    return add


def recursive(n: int) -> int:
    return 1 if n == 0 else n * recursive(n - 1)


# Callables. Each runs here and there with the same arguments.

CALLABLES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "builtin function": (len, ([1, 2, 3],), {}),
    "builtin type": (dict, ([("a", 1)],), {"b": 2}),
    "standard library": (math.hypot, (3, 4), {}),
    "importable function": (remote.combine, (1, 2, 3), {"scale": 4, "other": 5}),
    "class": (remote.Point, (1,), {"y": A}),
    "static method": (Counter.double, (3,), {}),
    "class method": (Counter.start, (3,), {}),
    "inherited class method": (LaterCounter.start, (3,), {}),
    "method through its class": (Counter.add, (Counter(1), 2), {}),
    "bound method": (Counter(1).add, (2,), {}),
    "callable object": (Counter(9), (2,), {}),
    "bound builtin method": ("a-b".split, ("-",), {}),
    "method of a builtin type": (str.upper, ("a",), {}),
    "itemgetter": (operator.itemgetter(1), ([4, 5],), {}),
    "partial": (functools.partial(remote.combine, 1, scale=3), (2,), {"more": 4}),
    "lambda": (lambda x, y=3: x * y + OFFSET, (4,), {}),
    "closure": (closure_over(2), (3,), {}),
    "recursive function": (recursive, (5,), {}),
    "partial of a lambda": (functools.partial(lambda x, y: (x, y), 1), (2,), {}),
    "torch function": (torch.add, (A, B), {"alpha": 2}),
    "torch function from Python": (torch.einsum, ("ij,kj->ik", A, B), {}),
    "torch.nn.functional": (torch.nn.functional.relu, (A - 2,), {}),
    "torch.linalg": (torch.linalg.norm, (A,), {"dim": 1}),
    "torch.linalg builtin": (torch.linalg.inv, (torch.eye(2) * 2,), {}),
    "torch.special": (torch.special.expm1, (A,), {}),
    "torch.sparse": (torch.sparse.sum, (A.to_sparse(),), {}),
    "factory": (torch.full, ((2,), 3), {"dtype": torch.int64}),
    "tensor method": (torch.Tensor.mul, (A, B), {}),
    "in-place tensor method": (torch.Tensor.add_, (A, B), {}),
    "operator of a tensor": (torch.Tensor.__matmul__, (A, B.T), {}),
    "bound tensor method": (A.clone().view, (3, 2), {}),
    "operator": (torch.ops.aten.add, (A, B), {}),
    "operator overload": (torch.ops.aten.add.Tensor, (A, B), {"alpha": 3}),
    "module": (Network(), (A,), {}),
    "method of a module": (Network().tied, (), {}),
    "container of modules": (torch.nn.Sequential(torch.nn.Flatten(0), torch.nn.ReLU()), (A - 2,), {}),
    "scripted function": (remote.scripted, (A, 3), {}),
    "scripted module": (remote.scripted_module, (A,), {}),
    "async_execution on a method": (Counter(4).add_later, (3,), {}),
}


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("case", CALLABLES)
def test_any_callable(case: str) -> None:
    function, args, kwargs = CALLABLES[case]
    before = copy.deepcopy((args, kwargs))
    found = bh.rpc_sync("bob", function, args=args, kwargs=kwargs)
    again = bh.rpc_async("bob", function, args=args, kwargs=kwargs).wait()
    assert_same((args, kwargs), before)
    expected = function(*before[0], **before[1])
    if isinstance(expected, torch.futures.Future):
        expected = expected.wait()
    assert_same(found, expected)
    assert_same(again, expected)


def test_runs_on_the_worker_that_is_meant(workers: list[bh.Worker]) -> None:
    alice, bob, carol = (worker.info for worker in workers)
    assert bh.get_worker_info() == alice == bh.get_worker_info("alice")
    assert bh.get_worker_infos() == [alice, bob, carol]
    assert [info.id for info in bh.get_worker_infos()] == [0, 1, 2]
    for to in ("bob", bob, bob.id):
        assert bh.rpc_sync(to, remote.whoami) == "bob"
        assert bh.rpc_async(to, remote.whoami).wait() == "bob"
    assert bh.rpc_sync("carol", bh.get_worker_info) == carol
    assert bh.rpc_sync("carol", bh.get_worker_info, args=("bob",)) == bob
    with workers[2]:
        assert bh.rpc_sync("alice", remote.whoami) == "alice"
        assert bh.get_worker_info() == carol
    assert bh.get_worker_info() == alice


def test_calls_to_oneself(workers: list[bh.Worker], gate_name: str) -> None:
    sent = [torch.ones(2), [1]]
    got = bh.rpc_sync("alice", remote.identity, args=(sent,))
    assert_same(got, sent)
    assert got is not sent
    got[0].zero_()
    got[1].clear()
    assert_same(sent, [torch.ones(2), [1]])
    waiting = bh.rpc_async(workers[0].info, remote.wait_at, args=(gate_name, "done"))
    bh.rpc_sync(0, remote.open_gate, args=(gate_name,))
    assert waiting.wait() == "done"
    with pytest.raises(PlainError) as caught:
        bh.rpc_sync("alice", remote.fail_plainly)
    assert isinstance(caught.value.__cause__, bh.errors.RemoteTraceback)
    assert bh.rpc_sync("alice", remote.bounce, args=(["alice"], 50)) == ["alice"] * 51


@pytest.mark.usefixtures("workers")
def test_a_method_runs_on_a_copy_of_its_object() -> None:
    counter = Counter(1)
    assert bh.rpc_sync("bob", counter.add, args=(5,)) == 6
    assert counter.value == 1


@pytest.mark.usefixtures("workers")
def test_handlers_start_in_a_clean_state() -> None:
    token = remote.variable.set("the caller's own")
    for _ in range(20):  # more often than there are threads that could remember
        assert bh.rpc_sync("bob", remote.grad_mode_and_variable) == (True, "unset")
    assert remote.variable.get() == "the caller's own"
    assert torch.is_grad_enabled()
    remote.variable.reset(token)


# Errors.


def attempt(to: str, function: Callable[..., Any], *args: Any, way: str, timeout: float | None = None) -> Any:
    """Call in one of the ways a user may."""
    if way == "sync":
        return bh.rpc_sync(to, function, args=args, timeout=timeout)
    future = bh.rpc_async(to, function, args=args, timeout=timeout)
    if way == "await":

        async def wait() -> Any:
            return await future

        return asyncio.run(wait())
    return future.wait() if way == "async" else future.then(lambda done: done.value()).wait()


WAYS = pytest.mark.parametrize("way", ["sync", "async", "then", "await"])


@WAYS
@pytest.mark.usefixtures("workers")
def test_an_exception_keeps_its_type_and_says_where_it_was_raised(way: str) -> None:
    with pytest.raises(PlainError) as caught:
        attempt("bob", remote.fail_plainly, way=way)
    error = caught.value
    assert type(error) is PlainError
    assert (error.args, error.code) == (("plain", 7), 7)
    assert isinstance(error.__cause__, bh.errors.RemoteTraceback)
    assert error.__cause__.worker == "bob"
    assert "in fail_plainly" in error.__cause__.text
    assert "PlainError: ('plain', 7)" in error.__cause__.text
    assert any("'bob'" in note for note in error.__notes__)


@WAYS
@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize(
    ("function", "type_name", "message"),
    [
        (remote.fail_awkwardly, "AwkwardError", "awkward (8)"),
        (remote.fail_with_lock, "HoldsLockError", "holds a lock"),
    ],
)
def test_an_exception_that_cannot_be_rebuilt_is_described(
    way: str, function: Callable[[], None], type_name: str, message: str
) -> None:
    with pytest.raises(bh.RemoteError) as caught:
        attempt("bob", function, way=way)
    error = caught.value
    assert error.type_name == f"{remote.__name__}.{type_name}"
    assert error.worker == "bob"
    assert message in str(error)
    assert isinstance(error.__cause__, bh.errors.RemoteTraceback)
    assert f"in {function.__name__}" in error.__cause__.text


@pytest.mark.usefixtures("workers")
def test_an_exception_carries_its_tensors_and_its_own_causes() -> None:
    with pytest.raises(PlainError) as caught:
        bh.rpc_sync("bob", remote.fail_with_tensor)
    assert_same(caught.value.code, torch.ones(3))
    with pytest.raises(ValueError, match="because of another") as chained:
        bh.rpc_sync("bob", remote.fail_from_another)
    assert isinstance(chained.value.__cause__, bh.errors.RemoteTraceback)
    assert "KeyError: 'absent'" in chained.value.__cause__.text


@pytest.mark.usefixtures("workers")
def test_an_exception_that_crossed_two_workers_shows_both() -> None:
    with pytest.raises(PlainError) as caught:
        bh.rpc_sync("bob", remote.fail_far_away, args=("carol",))
    cause = caught.value.__cause__
    assert isinstance(cause, bh.errors.RemoteTraceback)
    assert cause.worker == "bob"
    assert "in fail_far_away" in cause.text
    assert "in fail_plainly" in cause.text
    assert "'carol'" in cause.text


@WAYS
@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("function", [remote.exit_the_program, remote.exit_the_program_in_coroutine])
def test_a_handler_cannot_end_the_program(way: str, function: Callable[[], Any]) -> None:
    for _ in range(2):
        with pytest.raises(bh.RemoteError) as caught:
            attempt("bob", function, way=way)
        assert caught.value.type_name == "builtins.SystemExit"
    assert bh.rpc_sync("bob", remote.whoami) == "bob"
    assert bh.rpc_sync("bob", remote.gather, args=("bob", 2)) == [0, 1]


@WAYS
@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("function", [remote.return_lock, remote.return_lock_later, remote.return_lock_from_coroutine])
def test_a_result_that_cannot_travel(way: str, function: Callable[[], Any]) -> None:
    with pytest.raises(bh.errors.SerializationError) as caught:
        attempt("bob", function, way=way)
    assert caught.value.worker == "bob"
    assert caught.value.path == "result['bad'][0]"
    assert function.__name__ in str(caught.value)
    assert "lock" in str(caught.value)
    assert isinstance(caught.value, TypeError)


def test_an_unknown_worker(workers: list[bh.Worker]) -> None:
    for to, named in (("dave", "dave"), (3, "3"), (-1, "-1"), (bh.WorkerInfo("bob", 2), "bob")):
        for call in (bh.rpc_sync, bh.rpc_async):
            with pytest.raises(bh.errors.UnknownWorkerError) as caught:
                call(to, remote.whoami)
            assert caught.value.worker == named
            assert "alice, bob, carol" in str(caught.value)
    with pytest.raises(bh.errors.UnknownWorkerError):
        bh.get_worker_info("dave")
    for to in (None, 1.0, True, workers[1]):
        with pytest.raises(TypeError):
            bh.rpc_sync(to, remote.whoami)


@pytest.mark.usefixtures("workers")
def test_wrong_arguments_of_a_call() -> None:
    with pytest.raises(TypeError, match="callable"):
        bh.rpc_sync("bob", 5)
    with pytest.raises(ValueError, match="negative"):
        bh.rpc_sync("bob", remote.whoami, timeout=-1)
    with pytest.raises(TypeError, match="combine"):  # as the function itself says, there
        bh.rpc_sync("bob", remote.combine)
    with pytest.raises(TypeError):
        bh.rpc_sync("bob", remote.whoami, kwargs={"unexpected": 1})
    assert bh.rpc_sync("bob", remote.whoami) == "bob"


def test_a_message_beyond_the_limit(endpoints: EndpointFactory) -> None:
    options = bh.Options(limits=bh.Limits(frame_bytes=1 << 16))
    with bh.cluster(2, options=options, endpoints=endpoints):
        for call in (bh.rpc_sync, bh.rpc_async):
            with pytest.raises(bh.errors.FrameTooLargeError) as caught:
                call("worker1", remote.identity, args=(torch.zeros(1 << 15),))
            assert (caught.value.worker, caught.value.limit) == ("worker1", 1 << 16)
            assert caught.value.nbytes > 1 << 17
        with pytest.raises(bh.errors.FrameTooLargeError) as caught:
            bh.rpc_sync("worker1", torch.zeros, args=(1 << 15,))
        assert caught.value.worker == "worker0"
        assert bh.rpc_sync("worker1", remote.whoami) == "worker1"


# Timeouts.


@WAYS
@pytest.mark.usefixtures("workers")
def test_a_call_times_out_and_its_late_reply_does_no_harm(way: str, gate_name: str) -> None:
    ask = functools.partial(attempt, "bob", remote.identity, way=way)
    with pytest.raises(bh.CallTimeoutError) as caught:
        attempt("bob", remote.wait_at, gate_name, "late", way=way, timeout=0.05)
    error = caught.value
    assert isinstance(error, TimeoutError)
    assert (error.worker, error.function, error.timeout) == ("bob", "wait_at", 0.05)
    assert ask("before") == "before"
    remote.open_gate(gate_name)
    assert [ask(n) for n in range(5)] == list(range(5))


def test_a_timeout_of_zero_is_none_and_no_timeout_is_the_default(endpoints: EndpointFactory, gate_name: str) -> None:
    with (
        bh.cluster(2, options=bh.Options(timeout=0.05), endpoints=endpoints),
        ThreadPoolExecutor(1) as thread,
    ):
        worker = bh.current_worker()
        patient = bh.rpc_async("worker1", remote.wait_at, args=(gate_name, "async"), timeout=0)

        def call() -> Any:
            with worker:
                return bh.rpc_sync("worker1", remote.wait_at, args=(gate_name, "sync"), timeout=0)

        patient_thread = thread.submit(call)
        # These start after those, so when they are over a default timeout would have ended those, too.
        with pytest.raises(bh.CallTimeoutError) as caught:
            bh.rpc_async("worker1", remote.wait_at, args=(gate_name,)).wait()
        assert caught.value.timeout == 0.05
        with pytest.raises(bh.CallTimeoutError):
            bh.rpc_sync("worker1", remote.wait_at, args=(gate_name,))
        remote.open_gate(gate_name)
        assert patient.wait() == "async"
        assert patient_thread.result(PATIENCE) == "sync"


def test_the_default_timeout_is_a_minute() -> None:
    assert bh.Options().timeout == 60


# Futures.


class Slow:
    """Takes longer to pickle than its call may take."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __reduce__(self) -> Any:
        time.sleep(self._seconds)
        return str, ()


@WAYS
@pytest.mark.usefixtures("workers")
def test_the_time_of_a_call_begins_when_it_is_sent(way: str, gate_name: str) -> None:
    """A call whose time is over when it goes out never begins; one that has just begun may be too late all the same
    where the machine is busy.
    """
    for timeout in (0.01, 0.1, 1.0, 5.0):
        name = f"{gate_name} {timeout}"
        with pytest.raises(bh.CallTimeoutError):
            attempt("bob", remote.wait_at, name, Slow(2 * timeout), way=way, timeout=timeout)
        if remote.gate(f"{name} reached").wait(1.0):
            break
    else:
        pytest.fail("no call began")


@pytest.mark.usefixtures("workers")
def test_a_future_has_the_surface_of_torchs(gate_name: str) -> None:
    future = bh.rpc_async("bob", remote.wait_at, args=(gate_name, 20))
    assert isinstance(future, torch.futures.Future)
    seen: list[Any] = []
    called = threading.Event()
    doubled = future.then(lambda done: done.value() * 2)
    chained = doubled.then(lambda done: done.wait() + 2)
    future.add_done_callback(lambda done: (seen.append(done.value()), called.set()))
    assert not future.done()
    with pytest.raises(TimeoutError):
        future.wait(0.01)
    assert not future.done()
    remote.open_gate(gate_name)
    assert future.wait() == 20
    assert future.done()
    assert future.value() == 20
    assert (doubled.wait(), chained.wait()) == (40, 42)
    assert called.wait(PATIENCE)
    assert seen == [20]
    assert future.then(lambda done: done.value() + 1).wait() == 21  # already done
    for wrong in (future.then, future.add_done_callback):
        with pytest.raises(TypeError):
            wrong(None)


@pytest.mark.usefixtures("workers")
def test_a_failed_future() -> None:
    future = bh.rpc_async("bob", remote.fail_plainly)
    handled = future.then(lambda done: "handled" if _error_of(done) is PlainError else "not")
    assert handled.wait() == "handled"
    for _ in range(2):
        with pytest.raises(PlainError):
            future.wait()
    with pytest.raises(PlainError):
        future.value()
    assert future.done()
    failing = bh.rpc_async("bob", remote.whoami).then(lambda done: remote.raise_it(PlainError("mine", 1)))
    with pytest.raises(PlainError, match="mine"):
        failing.wait()


def _error_of(future: torch.futures.Future[Any]) -> type[BaseException] | None:
    try:
        future.wait()
    except Exception as error:
        return type(error)
    return None


@pytest.mark.usefixtures("workers")
def test_many_futures_together() -> None:
    futures = [bh.rpc_async(to, remote.identity, args=(n,)) for n in range(50) for to in ("bob", "carol")]
    assert bh.wait_all(futures) == [n for n in range(50) for _ in range(2)]
    assert [done.value() for done in bh.collect_all(futures).wait()] == bh.wait_all(futures)
    assert torch.futures.wait_all(futures) == bh.wait_all(futures)
    assert bh.wait_all([]) == []
    mixed = [bh.rpc_async("bob", remote.identity, args=(1,)), bh.rpc_async("bob", remote.fail_plainly)]
    with pytest.raises(PlainError):
        bh.wait_all(mixed)


@pytest.mark.usefixtures("workers")
def test_a_callback_sees_the_worker_and_the_variables_of_its_maker(gate_name: str) -> None:
    token = remote.variable.set("maker")
    future = bh.rpc_async("bob", remote.wait_at, args=(gate_name,))
    seen = future.then(lambda _: (remote.whoami(), remote.variable.get()))
    nested = future.then(lambda _: bh.rpc_sync("carol", remote.whoami))
    remote.variable.reset(token)
    remote.open_gate(gate_name)
    assert seen.wait() == ("alice", "maker")
    assert nested.wait() == "carol"


@pytest.mark.usefixtures("workers")
def test_awaiting_futures_from_several_tasks(gate_name: str) -> None:
    async def ask(number: int) -> int:
        with bh.current_worker():  # each task has its own
            found = await bh.rpc_async("bob", remote.identity, args=(number,))
            return found + await bh.rpc_async("carol", remote.identity, args=(number,))

    async def main() -> Any:
        shared = bh.rpc_async("bob", remote.wait_at, args=(gate_name, "shared"))
        waiting = [asyncio.create_task(_await(shared)) for _ in range(3)]
        cancelled = asyncio.create_task(_await(shared))
        await asyncio.wait_for(bh.rpc_async("bob", remote.whoami), PATIENCE)
        cancelled.cancel()
        answers = await asyncio.gather(*(ask(n) for n in range(40)))
        failure = await asyncio.gather(_await(bh.rpc_async("bob", remote.fail_plainly)), return_exceptions=True)
        assert not any(task.done() for task in waiting)
        await bh.rpc_async("bob", remote.open_gate, args=(gate_name,))
        return answers, failure, await asyncio.gather(*waiting), cancelled.cancelled(), await shared

    answers, (failure,), shared, cancelled, again = asyncio.run(main())
    assert answers == [2 * n for n in range(40)]
    assert isinstance(failure, PlainError)
    assert shared == ["shared"] * 3
    assert cancelled
    assert again == "shared"


async def _await(future: bh.Future[Any]) -> Any:
    return await future


# Handlers that do not hold a thread.


@WAYS
@pytest.mark.usefixtures("workers")
def test_async_execution(way: str) -> None:
    call = functools.partial(attempt, "bob", way=way)
    assert_same(call(remote.add_through, "carol", torch.ones(2), 3), torch.full((2,), 5.0))
    assert call(remote.torch_future, "torch") == "torch"
    assert call(Counter.double_later, 4) == 8
    assert call(Counter.start_later, 4) == 104
    assert call(LaterCounter.start_later, 4) == 204
    assert call(Counter(5).add_later, 4) == 9
    later = bh.async_execution(lambda to: bh.rpc_async(to, remote.whoami))
    assert call(later, "carol") == "carol"
    for function, args, code in (
        (remote.fail_through, ("carol",), 7),
        (remote.fail_in_then, ("carol",), 9),
        (remote.raise_instead_of_future, (), 10),
    ):
        with pytest.raises(PlainError) as caught:
            call(function, *args)
        assert caught.value.code == code
        assert caught.value.__cause__.worker == "bob"
    with pytest.raises(TypeError, match=r"no_future .* Future"):
        call(remote.no_future)


def test_async_execution_marks_only_functions() -> None:
    for wrong in (None, "whoami", property(remote.whoami)):
        with pytest.raises(TypeError):
            bh.async_execution(wrong)


@WAYS
@pytest.mark.usefixtures("workers")
def test_async_def_handlers(way: str) -> None:
    call = functools.partial(attempt, "bob", way=way)

    async def closure(x: int) -> tuple[str, int]:
        await asyncio.sleep(0)
        return bh.get_worker_info().name, x + OFFSET

    assert call(closure, 1) == ("bob", 6)
    assert call(remote.gather, "carol", 10) == list(range(10))
    assert call(Counter(5).add_async, 4) == 9
    with pytest.raises(PlainError) as caught:
        call(remote.fail_in_coroutine, "carol")
    assert caught.value.__cause__.worker == "bob"
    assert "in fail_in_coroutine" in caught.value.__cause__.text


@pytest.mark.usefixtures("workers")
def test_coroutines_of_one_worker_run_at_once(gate_name: str) -> None:
    together = [bh.rpc_async("bob", remote.rendezvous_of_coroutines, args=(gate_name, 100)) for _ in range(100)]
    assert bh.wait_all(together) == [100] * 100


# Depth and width.


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (remote.bounce, ["bob", "alice"] * 150 + ["bob"]),
        (remote.bounce_by_future, 300),
        (remote.bounce_by_callback, 300),
        (remote.bounce_by_await, 300),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_300_nested_calls_between_two_workers(
    endpoints: EndpointFactory,
    function: Callable[..., Any],
    expected: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with bh.cluster(["alice", "bob"], endpoints=endpoints):
        assert bh.rpc_sync("bob", function, args=(["alice", "bob"], 300)) == expected
    assert caplog.messages == []  # all the threads this took have ended in good order


@pytest.mark.usefixtures("workers")
def test_several_chains_of_nested_calls_at_once() -> None:
    names = ["alice", "bob", "carol"]
    chains = [bh.rpc_async(name, remote.bounce, args=(names, 40)) for name in names * 2]
    for start, chain in zip(names * 2, bh.wait_all(chains), strict=True):
        first = names.index(start)
        assert chain == [names[(first + n) % 3] for n in range(41)]


@pytest.mark.usefixtures("workers")
def test_hundreds_of_threads_call_at_once(gate_name: str) -> None:
    worker, count = bh.current_worker(), 300
    start = threading.Barrier(count)

    def call(number: int) -> Any:
        with worker:
            start.wait(PATIENCE)
            to = ("alice", "bob", "carol")[number % 3]
            return bh.rpc_sync(to, torch.add, args=(torch.full((3,), float(number)), number))

    with ThreadPoolExecutor(count) as threads:
        results = list(threads.map(call, range(count)))
    for number, result in enumerate(results):
        assert_same(result, torch.full((3,), 2.0 * number))


def test_handlers_that_wait_for_each_other_beyond_the_limit(endpoints: EndpointFactory, gate_name: str) -> None:
    with bh.cluster(2, options=bh.Options(threads=2), endpoints=endpoints):
        together = [bh.rpc_async("worker1", remote.meet, args=(gate_name, 20)) for _ in range(20)]
        assert bh.wait_all(together) == [20] * 20


@pytest.mark.usefixtures("workers")
def test_a_long_handler_holds_nobody_up(gate_name: str) -> None:
    long = [bh.rpc_async("bob", remote.wait_at, args=(gate_name, n)) for n in range(40)]
    assert gate(f"{gate_name} reached").wait(PATIENCE)
    assert [bh.rpc_sync("bob", remote.identity, args=(n,)) for n in range(5)] == list(range(5))
    assert not any(future.done() for future in long)
    bh.rpc_sync("bob", remote.open_gate, args=(gate_name,))
    assert bh.wait_all(long) == list(range(40))


def test_connections_open_at_the_first_call(endpoints: EndpointFactory) -> None:
    opened: list[str] = []

    def counting() -> Endpoint:
        made = endpoints()
        connect = made.connect

        def counted(address: str, *, timeout: float) -> Channel:
            opened.append(address)
            return connect(address, timeout=timeout)

        made.connect = counted  # type: ignore[method-assign]
        return made

    with bh.cluster(["alice", "bob", "carol"], endpoints=counting) as (_, bob, carol):
        assert opened == []
        for _ in range(3):
            assert bh.rpc_sync("alice", remote.whoami) == "alice"
        assert opened == []
        for _ in range(3):
            assert bh.rpc_sync("bob", remote.bounce, args=(["alice", "bob"], 3))[-1] == "alice"
        assert opened == list(bob.endpoint.addresses[:1])  # one for both directions
        bh.rpc_sync("carol", remote.whoami)
        assert opened == [bob.endpoint.addresses[0], carol.endpoint.addresses[0]]


def convolution_gradient(weight: torch.Tensor, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    weight = weight.requires_grad_()
    with torch.enable_grad():
        torch.nn.functional.conv1d(x, weight).backward(grad)
    return weight.grad


def test_handlers_use_as_many_threads_as_torch_was_told() -> None:
    """With another number oneDNN adds up in another order. The tests run with one thread."""
    generator = torch.Generator().manual_seed(5)
    shapes = (4, 2, 3), (6, 2, 4), (6, 4, 2)
    weight, x, grad = (torch.randn(*shape, generator=generator) for shape in shapes)
    with torch.no_grad(), bh.cluster(2):
        there = bh.rpc_sync("worker1", convolution_gradient, (weight, x, grad))
    assert torch.equal(there, convolution_gradient(weight, x, grad))
