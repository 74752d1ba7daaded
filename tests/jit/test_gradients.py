"""Gradients through calls that scripts make, compared with the same functions under local autograd."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import backhaul as bh
from backhaul._autograd.forward.recording import enter, leave
from backhaul._autograd.ids import PLAIN

from . import functions
from .functions import blend, script

Leaves = tuple[Tensor, Tensor]

pytestmark = pytest.mark.usefixtures("workers")


def check(remote: Callable[..., Tensor], plain: Callable[..., Tensor], leaves: Leaves) -> None:
    """Check that both functions have the same value and the same gradients."""
    expected = plain(*leaves)
    wanted = torch.autograd.grad(expected.sum(), leaves)
    with bh.context() as ctx:
        value = remote(*leaves)
        torch.testing.assert_close(value, expected)
        bh.backward(ctx, [value.sum()])
        grads = bh.get_gradients(ctx)
        assert len(grads) == len(leaves)
        for leaf, grad in zip(leaves, wanted, strict=True):
            torch.testing.assert_close(grads[leaf], grad)


def recorded() -> int:
    """How many messages were recorded in contexts, on all workers."""
    contexts = [context for worker in bh._worker.worker.running_workers() for context in contexts_of(worker)]
    return sum(len(context.sends) for context in contexts if context.id != PLAIN)


def recorded_outside() -> int:
    """How many messages were recorded outside contexts, on all workers."""
    return sum(worker.counters["num_plain_records"]() for worker in bh._worker.worker.running_workers())


def contexts_of(worker: bh.Worker) -> list[Any]:
    from backhaul._autograd.backward.engine import Engine

    return worker.part(Engine).container.select(lambda _: True)


@pytest.mark.parametrize("caller", ["sync", "async_", "remote"])
def test_each_kind_of_call(caller: str, leaves: Leaves) -> None:
    check(lambda a, b: getattr(functions, caller)("worker1", a, b), blend, leaves)


def test_two_hops(leaves: Leaves) -> None:
    def plain(a: Tensor, b: Tensor) -> Tensor:
        inner = blend(a, b)
        return inner * blend(b, inner)

    check(lambda a, b: functions.two_hops("worker1", "worker2", a, b), plain, leaves)


def test_forks(leaves: Leaves) -> None:
    check(lambda a, b: functions.forked("worker1", "worker2", a, b), lambda a, b: blend(a, b) * blend(b, a), leaves)


def test_forks_of_forks(leaves: Leaves) -> None:
    check(
        lambda a, b: functions.forked_twice("worker1", "worker2", a, b),
        lambda a, b: blend(a, b) * blend(b, a) + blend(b, b),
        leaves,
    )


def test_many_forks(leaves: Leaves) -> None:
    @script
    def remote(a: Tensor, b: Tensor, n: int) -> Tensor:
        futures = [torch.jit.fork(functions.async_, "worker1" if i % 2 == 0 else "worker2", a * i, b) for i in range(n)]
        made = a * 0
        for future in futures:
            made = made + future.wait()
        return made

    check(lambda a, b: remote(a, b, 20), lambda a, b: sum((blend(a * i, b) for i in range(20)), a * 0), leaves)


def test_after_a_wait(leaves: Leaves) -> None:
    """The context is still current after a wait, so later calls are recorded too."""

    def plain(a: Tensor, b: Tensor) -> Tensor:
        first = blend(a, b)
        second = blend(b, first)
        return first + second + blend(second, a)

    check(lambda a, b: sum(functions.after_wait("worker1", a, b), a * 0), plain, leaves)
    with bh.context():
        functions.after_wait("worker1", *leaves)
        assert recorded() == 6  # a request and a reply each


def test_forked_in_a_handler(leaves: Leaves) -> None:
    """A script forks on a worker that the context reached by a call."""
    check(
        lambda a, b: bh.rpc_sync("worker1", functions.forked_twice, ("worker2", "worker0", a, b)),
        lambda a, b: blend(a, b) * blend(b, a) + blend(b, b),
        leaves,
    )


def test_called_by_python_that_script_calls(leaves: Leaves) -> None:
    def through_python(a: Tensor, b: Tensor) -> Tensor:
        return bh.rpc_sync("worker1", blend, (a, b))

    ignored = torch.jit.ignore(through_python)

    @script
    def call(a: Tensor, b: Tensor) -> Tensor:
        return ignored(a, b)

    @script
    def remote(a: Tensor, b: Tensor) -> Tensor:
        return torch.jit.fork(call, a, b).wait()

    check(remote, blend, leaves)


def test_no_context_no_recording(leaves: Leaves) -> None:
    with bh.context():
        functions.after_wait("worker1", *leaves)
    functions.after_wait("worker1", *leaves)
    functions.forked("worker1", "worker2", *leaves)
    assert recorded() == 0


def test_no_grad(leaves: Leaves) -> None:
    with bh.context(), torch.no_grad():
        made = functions.forked("worker1", "worker2", *leaves)
        assert recorded() == 0
    with torch.no_grad():
        functions.forked("worker1", "worker2", *leaves)
    assert recorded_outside() == 0
    assert not made.requires_grad


def test_one_context_after_the_other(leaves: Leaves) -> None:
    """A script leaves nothing in the state of its thread."""
    for _ in range(3):
        check(lambda a, b: functions.forked("worker1", "worker2", a, b), lambda a, b: blend(a, b) * blend(b, a), leaves)


def test_contexts_of_threads(leaves: Leaves) -> None:
    failures: list[BaseException] = []

    def run(worker: bh.Worker) -> None:
        try:
            own = leaves[0].detach().clone().requires_grad_(), leaves[1].detach().clone().requires_grad_()
            with worker:
                check(
                    lambda a, b: functions.forked_twice("worker1", "worker2", a, b),
                    lambda a, b: blend(a, b) * blend(b, a) + blend(b, b),
                    own,
                )
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(bh.current_worker(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_contexts_of_tasks(leaves: Leaves) -> None:
    """Of two tasks on one thread, only one has a context."""

    async def without() -> None:
        functions.forked("worker1", "worker2", *leaves)
        assert recorded() == 0

    async def run() -> None:
        bare = asyncio.get_running_loop().create_task(without())
        with bh.context():
            functions.forked("worker1", "worker2", *leaves)
            inside = recorded()
            assert inside
        await bare

    asyncio.run(run())


def test_workers_of_one_process(workers: list[bh.Worker], leaves: Leaves) -> None:
    """The current worker of forked code is the worker that forked it."""
    for worker in workers:
        with worker:
            assert script(names_on_all_threads)("worker1") == worker.name


def current_name(_: int) -> str:
    return bh.get_worker_info().name


ignored_current_name = torch.jit.ignore(current_name)


@script
def name(_: int) -> str:
    return ignored_current_name(_)


def names_on_all_threads(to: str) -> str:
    forked = torch.jit.fork(name, 0).wait()
    callee = bh.rpc_sync(to, name, (0,))
    after_wait = name(0)
    assert forked == after_wait
    assert callee == to
    return after_wait


# Python code that a forked script calls changes what is current on its thread.


def enter_context(a: Tensor, b: Tensor) -> list[Tensor]:
    with bh.context() as ctx:
        loss = sum(functions.after_wait("worker1", a, b), a * 0).sum()
        bh.backward(ctx, [loss])
        grads = bh.get_gradients(ctx)
        return [grads[a], grads[b]]


def enter_worker(name: str) -> list[str]:
    (worker,) = [worker for worker in bh._worker.worker.running_workers() if worker.name == name]
    with worker:
        return [script(names_on_all_threads)("worker1"), current_name(0)]


def enter_no_context(a: Tensor) -> list[int]:
    """How many messages are recorded with no current context, and afterwards."""
    counts = []
    token = enter(None)
    functions.forked("worker1", "worker2", a, a)
    counts.append(recorded())
    leave(token)
    functions.sync("worker1", a, a)
    return [*counts, recorded()]


ignored_context = torch.jit.ignore(enter_context)
ignored_worker = torch.jit.ignore(enter_worker)
ignored_no_context = torch.jit.ignore(enter_no_context)


@script
def call_context(a: Tensor, b: Tensor) -> list[Tensor]:
    return ignored_context(a, b)


@script
def call_worker(name: str) -> list[str]:
    return ignored_worker(name)


@script
def call_no_context(a: Tensor) -> list[int]:
    return ignored_no_context(a)


@script
def fork_context(a: Tensor, b: Tensor) -> list[Tensor]:
    return torch.jit.fork(call_context, a, b).wait()


@script
def fork_worker(name: str) -> list[str]:
    return torch.jit.fork(call_worker, name).wait()


@script
def fork_no_context(a: Tensor) -> list[int]:
    return torch.jit.fork(call_no_context, a).wait()


@script
def fork_name(_: int) -> str:
    return torch.jit.fork(name, 0).wait()


def test_a_context_entered_on_a_forked_thread(leaves: Leaves) -> None:
    """The context is current on that thread, and on threads where a script continues that is called inside it."""
    first = blend(*leaves)
    second = blend(leaves[1], first)
    wanted = torch.autograd.grad((first + second + blend(second, leaves[0])).sum(), leaves)
    for _ in range(10):
        torch.testing.assert_close(tuple(fork_context(*leaves)), wanted)


@pytest.mark.parametrize("name", ["worker0", "worker2"])
def test_a_worker_entered_on_a_forked_thread(name: str) -> None:
    for _ in range(10):
        assert fork_worker(name) == [name, name]
        assert fork_name(0) == "worker0"


def test_no_context_on_a_forked_thread(leaves: Leaves) -> None:
    """A thread may have no current context, as for the calls that Backhaul itself makes."""
    with bh.context():
        assert fork_no_context(leaves[0]) == [0, 2]


def test_scripts_of_several_tasks_in_turns(workers: list[bh.Worker]) -> None:
    """The current worker of a script is that of the task that calls it, not the last one entered on the thread."""

    async def act_as(worker: bh.Worker) -> None:
        with worker:
            for _ in range(3):
                await asyncio.sleep(0)
                assert fork_name(0) == worker.name

    async def run() -> None:
        await asyncio.gather(*map(act_as, workers))

    asyncio.run(run())


# Operators.


def test_operators_in_the_graph() -> None:
    text = str(functions.differentiate.graph)
    assert "Dict(Tensor, Tensor) = backhaul::get_gradients" in text
    assert "backhaul::dist_backward" in text


def test_backward_and_gradients_in_script(leaves: Leaves) -> None:
    a, b = leaves
    wanted = torch.autograd.grad(blend(a, b).sum(), leaves)
    with bh.context() as ctx:
        loss = bh.rpc_sync("worker1", blend, (a, b)).sum()
        grads = functions.differentiate(ctx, loss)
        assert grads.keys() == {a, b}
        torch.testing.assert_close((grads[a], grads[b]), wanted)
        again = functions.differentiate(ctx, loss)  # the graph was kept, and passes accumulate
        torch.testing.assert_close((again[a], again[b]), tuple(2 * grad for grad in wanted))


def test_a_whole_step_in_script(leaves: Leaves) -> None:
    a, b = leaves
    wanted = torch.autograd.grad((blend(a, b) * blend(b, a)).sum(), leaves)
    with bh.context() as ctx:
        grads = functions.step(ctx, "worker1", a, b)
        torch.testing.assert_close((grads[a], grads[b]), wanted)


def test_a_released_context(leaves: Leaves) -> None:
    with bh.context() as ctx:
        pass
    with pytest.raises(RuntimeError, match="was released"):
        functions.differentiate(ctx, leaves[0].sum())
