"""Errors in a pass: they keep their type and name the worker, and the next context works."""

from __future__ import annotations

import functools
import os
import pathlib
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed

import backhaul as bh
from backhaul._autograd.backward import local_pass, pass_graph
from backhaul._autograd.backward.groups import Grouping
from backhaul._rpc.node import Node
from backhaul._transport.sockets.endpoint import SocketEndpoint

from ..cluster.processes import DIED, run_processes
from .worlds import DEADLINE_SECONDS, expect_no_contexts, vector

SOCKETS = functools.partial(SocketEndpoint, secret=b"the tests' own")


class OwnError(Exception):
    """An error that travels with its fields."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text, code)
        self.code = code


class AwkwardError(Exception):
    """An error that cannot be rebuilt from its arguments."""

    def __init__(self, text: str, *, code: int) -> None:
        super().__init__(f"{text} ({code})")
        self.lock = threading.Lock()


class Fail(torch.autograd.Function):
    """Does nothing in forward, and fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: Exception | None) -> torch.Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise_in_backward(ctx.error)
        return grad, None


def raise_in_backward(error: Exception | None) -> None:
    raise error or AwkwardError("awkward", code=7)


def failing(x: torch.Tensor, error: Exception | None, *route: int) -> torch.Tensor:
    """Fails in backward on the last worker of the route."""
    if route:
        return bh.rpc_sync(route[0], failing, args=(x * 2, error, *route[1:])) * 2
    return Fail.apply(x, error)


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def expect_a_working_cluster(workers: list[bh.Worker]) -> None:
    """Nothing of the failed pass is left, and the next one works."""
    expect_no_contexts(workers)
    for worker in workers:
        with worker:
            assert bh.get_debug_info()["num_current_backward_passes"] == 0
    a = vector(1.0, 2.0)
    with bh.context() as ctx:
        y = a * 1
        for worker in workers:
            y = bh.rpc_sync(worker.info, scale, args=(y,))
        ctx.backward(y.sum())
        assert ctx.grads[a].tolist() == [2.0 ** len(workers)] * 2
    expect_no_contexts(workers)


# Failures in backward functions.


@pytest.mark.parametrize("route", [(1,), (1, 2), (1, 2, 0, 3), (0,), (0, 0)])
def test_a_failing_backward_function(route: tuple[int, ...]) -> None:
    with bh.cluster(4) as workers:
        with bh.context() as ctx:
            y = failing(vector(1.0), OwnError("no way", 7), *route)
            with pytest.raises(OwnError) as caught:
                ctx.backward(y.sum(), timeout=DEADLINE_SECONDS)
            assert caught.value.code == 7
            notes = "\n".join(caught.value.__notes__)
            assert f"worker '{workers[route[-1]].name}'" in notes
            assert f"context {int(ctx)}" in notes
            assert "message " in notes
            if route[-1] != 0:
                cause = caught.value.__cause__
                assert isinstance(cause, bh.errors.RemoteTraceback)
                assert cause.worker == workers[route[-1]].name
                assert "raise_in_backward" in cause.text
                assert "OwnError" in cause.text
        expect_a_working_cluster(workers)


def test_a_failure_that_cannot_travel() -> None:
    with bh.cluster(2) as workers:
        with bh.context() as ctx:
            y = bh.rpc_sync(1, failing, args=(vector(1.0), None))
            with pytest.raises(bh.RemoteError) as caught:
                ctx.backward(y.sum(), timeout=DEADLINE_SECONDS)
            assert caught.value.type_name.endswith("AwkwardError")
            assert caught.value.worker == "worker1"
            assert "awkward (7)" in str(caught.value)
            assert "raise_in_backward" in caught.value.__cause__.text
            told = "\n".join([caught.value.__cause__.text, *caught.value.__notes__])
            assert f"context {int(ctx)}" in told
        expect_a_working_cluster(workers)


@pytest.mark.parametrize("gradients", [1, 3])
def test_a_failure_before_anything_runs(monkeypatch: pytest.MonkeyPatch, gradients: int) -> None:
    """Whatever error occurs on a worker that has gradients of a pass, the driver is told."""

    class Broken(Grouping):
        def __init__(self, *args: Any) -> None:
            if bh.get_worker_info().name == "worker1":
                raise OwnError("cannot be looked at", 5)
            super().__init__(*args)

    with bh.cluster(2) as workers:
        with bh.context() as ctx:
            y = torch.stack([bh.rpc_sync(1, scale, args=(vector(1.0),)) for _ in range(gradients)])
            with monkeypatch.context() as patch:
                patch.setattr(pass_graph, "Grouping", Broken)
                patch.setattr(local_pass, "suits", lambda *_: False)  # the native core looks in another way
                with pytest.raises(OwnError) as caught:
                    ctx.backward(y.sum(), timeout=5.0)
            assert "worker 'worker1'" in "\n".join(caught.value.__notes__)
        expect_a_working_cluster(workers)


def test_a_failing_hook() -> None:
    with bh.cluster(2) as workers:
        with bh.context() as ctx:
            y = bh.rpc_sync(1, hook_fails, args=(vector(1.0),))
            with pytest.raises(OwnError) as caught:
                ctx.backward(y.sum(), timeout=DEADLINE_SECONDS)
            assert "in fail_in_a_hook" in caught.value.__cause__.text
        expect_a_working_cluster(workers)


def hook_fails(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(fail_in_a_hook)
    return y * 2


def fail_in_a_hook(grad: torch.Tensor) -> None:
    raise OwnError("in a hook", 3)


def around(x: torch.Tensor, error: Exception | None) -> torch.Tensor:
    """A circle, in which something fails."""
    y = bh.rpc_sync(2, scale, args=(x,)) * 1
    z = bh.rpc_sync(2, scale, args=(Fail.apply(y, error),))
    return z * y


@pytest.mark.parametrize("home", [0, 1])
def test_a_failure_in_a_circle(home: int) -> None:
    with bh.cluster(3) as workers:
        with bh.context() as ctx:
            y = bh.rpc_sync(home, around, args=(vector(1.0), OwnError("no way", 7)))
            with pytest.raises(OwnError) as caught:
                ctx.backward(y.sum(), timeout=DEADLINE_SECONDS)
            assert f"worker 'worker{home}'" in "\n".join(caught.value.__notes__)
        expect_a_working_cluster(workers)


def test_many_failures_at_once() -> None:
    """The first error is raised; the others are dropped."""
    with bh.cluster(4) as workers:
        with bh.context() as ctx:
            results = [failing(vector(1.0), OwnError("no way", n), 1 + n % 3, n % 4) for n in range(12)]
            with pytest.raises(OwnError):
                ctx.backward(torch.stack(results).sum(), timeout=DEADLINE_SECONDS)
        expect_a_working_cluster(workers)


def test_a_failed_pass_is_aborted_everywhere() -> None:
    """A worker that waits for gradients that will not come is told; later messages do nothing."""
    with bh.cluster(3) as workers:
        with bh.context() as ctx:
            held, failed = bh.rpc_sync(1, wait_for_both, args=(vector(1.0),))
            with pytest.raises(OwnError):
                ctx.backward((held * failed).sum(), timeout=DEADLINE_SECONDS)
            wait_until_all_runs_failed(workers, ctx)
        expect_a_working_cluster(workers)


def wait_for_both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two sends of one group: worker 1 waits for the gradients of both, and one of them never comes."""
    common = x * 2
    return bh.rpc_sync(2, scale, args=(common,)), bh.rpc_sync(2, failing, args=(common, OwnError("no way", 7)))


def wait_until_all_runs_failed(workers: list[bh.Worker], ctx: bh.ContextHandle) -> None:
    """An abort arrives asynchronously: ask until it is there."""
    for _ in range(2000):
        shares = ctx.describe()["workers"].values()
        passes = [going for share in shares for going in share["passes"]]
        if all(going["failed"] for going in passes):
            assert not any(going.get("outstanding") for going in passes)
            return
    raise AssertionError(f"not aborted: {passes}")


def test_after_a_failure_the_context_can_be_used_on() -> None:
    """With values that the failed pass did not touch, and with new ones."""
    a = vector(1.0, 2.0)
    with bh.cluster(3) as workers:
        with bh.context() as ctx:
            bad = bh.rpc_sync(1, failing, args=(a, OwnError("no way", 7), 2))
            good = bh.rpc_sync(1, scale, args=(a,))
            with pytest.raises(OwnError):
                ctx.backward(bad.sum(), timeout=DEADLINE_SECONDS)
            ctx.backward(good.sum(), timeout=DEADLINE_SECONDS)
            ctx.backward(bh.rpc_sync(2, scale, args=(a,)).sum(), timeout=DEADLINE_SECONDS)
            assert ctx.grads[a].tolist() == [4.0, 4.0]
        expect_a_working_cluster(workers)


def test_failures_of_other_contexts_do_not_matter() -> None:
    with bh.cluster(2) as workers:
        with bh.context() as ctx:
            y = failing(vector(1.0), OwnError("no way", 7), 1)
            with workers[1], bh.context() as other:
                a = vector(1.0, 2.0)
                z = bh.rpc_sync(0, scale, args=(a,))
                with workers[0], pytest.raises(OwnError):
                    ctx.backward(y.sum(), timeout=DEADLINE_SECONDS)
                other.backward(z.sum(), timeout=DEADLINE_SECONDS)
                assert other.grads[a].tolist() == [2.0, 2.0]
        expect_a_working_cluster(workers)


def test_gradients_that_cannot_travel() -> None:
    """A gradient larger than the other worker accepts: the driver raises, and nothing hangs."""
    with bh.cluster(2, options=bh.Options(limits=bh.Limits(frame_bytes=1 << 16))) as workers:
        with bh.context() as ctx:
            x = vector(1.0)
            y = bh.rpc_sync(1, scale, args=(x,))
            wide = y.expand(1).repeat(1 << 14)
            z = bh.rpc_sync(1, total, args=(y, 1 << 14))
            del wide
            ctx.backward(z.sum(), timeout=DEADLINE_SECONDS)
        expect_a_working_cluster(workers)


def total(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.expand(count).sum()


# Arguments that make no sense.


@pytest.fixture
def recorded() -> Any:
    """A context with one call in it: (context, leaf, result)."""
    with bh.cluster(2) as workers:
        with bh.context() as ctx:
            a = vector(1.0, 2.0)
            yield ctx, a, bh.rpc_sync(1, scale, args=(a,))
        expect_no_contexts(workers)


def test_roots_that_do_not_require_grad(recorded: Any) -> None:
    ctx, _, y = recorded
    with pytest.raises(ValueError, match=r"roots\[1\] does not require grad"):
        bh.backward(ctx, [y.sum(), torch.ones(())])


@pytest.mark.parametrize("roots", [None, 5, "loss", object(), {"loss": 1}])
def test_roots_that_are_no_list(recorded: Any, roots: Any) -> None:
    with pytest.raises(TypeError):
        bh.backward(recorded[0], roots)


@pytest.mark.parametrize("root", [None, 5, "loss", [1.0], bh.WorkerInfo("worker1", 1)])
def test_a_root_that_is_not_a_tensor(recorded: Any, root: Any) -> None:
    with pytest.raises(TypeError, match=r"roots\[1\]"):
        bh.backward(recorded[0], [recorded[2].sum(), root])


def test_no_roots(recorded: Any) -> None:
    with pytest.raises(ValueError, match="at least one root"):
        bh.backward(recorded[0], [])


def test_roots_that_are_no_numbers(recorded: Any) -> None:
    ctx, _, y = recorded
    with pytest.raises(ValueError, match="grad_tensors"):
        ctx.backward(y)
    with pytest.raises(ValueError, match="grad_tensors"):
        ctx.backward([y, y.sum()], grad_tensors=[torch.ones(2)])
    with pytest.raises(ValueError, match="grad_tensors"):
        ctx.backward(y, grad_tensors=torch.ones(3))


def test_inputs_that_make_no_sense(recorded: Any) -> None:
    ctx, a, y = recorded
    for wrong in ([], [torch.ones(1)], ["a"], [a, None]):
        with pytest.raises(ValueError, match="inputs"):
            ctx.backward(y.sum(), inputs=wrong)


def test_options_that_make_no_sense(recorded: Any) -> None:
    ctx, _, y = recorded
    for wrong in ({"mode": "slow"}, {"accumulate": "gradient"}, {"timeout": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ctx.backward(y.sum(), **wrong)


def test_refused_arguments_leave_the_graph_as_it_was(recorded: Any) -> None:
    ctx, a, y = recorded
    with pytest.raises(ValueError):
        ctx.backward([y.sum(), torch.ones(())])
    ctx.backward(y.sum())
    assert ctx.grads[a].tolist() == [2.0, 2.0]


def test_an_unknown_context(recorded: Any) -> None:
    _, _, y = recorded
    for call in (lambda: bh.backward(12345, [y.sum()]), lambda: bh.get_gradients(12345)):
        with pytest.raises(bh.errors.UnknownContextError, match="not known") as caught:
            call()
        assert caught.value.context == 12345
        assert isinstance(caught.value, LookupError)


def test_a_released_context() -> None:
    with bh.cluster(2):
        with bh.context() as ctx:
            y = bh.rpc_sync(1, scale, args=(vector(1.0),)).sum()
        for call in (lambda: ctx.backward(y), lambda: ctx.grads, ctx.describe):
            with pytest.raises(bh.errors.UnknownContextError, match="released") as caught:
                call()
            assert caught.value.context == ctx


def test_the_context_of_another_worker_that_has_not_come_here() -> None:
    with bh.cluster(2) as workers, bh.context() as ctx, workers[1], pytest.raises(bh.errors.UnknownContextError):
        bh.get_gradients(ctx)


def test_a_loss_of_a_released_context() -> None:
    """The context has not reached the worker that computed it: backward raises at once and does not wait."""
    with bh.cluster(2) as workers:
        with bh.context():
            y = bh.rpc_sync(1, scale, args=(vector(1.0),)).sum()
        with bh.context() as another:
            with pytest.raises(bh.errors.ContextError) as caught:
                another.backward(y, timeout=3.0)
            assert not isinstance(caught.value, bh.errors.BackwardTimeoutError)
            assert caught.value.context == another
        expect_a_working_cluster(workers)


def test_a_loss_of_another_context() -> None:
    """Its messages belong to another context: backward raises and does not wait."""
    with bh.cluster(2) as workers:
        with bh.context():
            y = bh.rpc_sync(1, scale, args=(vector(1.0),)).sum()
            with workers[1], bh.context() as other, pytest.raises(bh.errors.ContextError) as caught:
                other.backward(y, timeout=DEADLINE_SECONDS)
            assert caught.value.context == other
            assert caught.value.message
        expect_a_working_cluster(workers)


# Plain autograd on a graph of ours.


def test_plain_backward_runs_into_a_recv_node(recorded: Any) -> None:
    ctx, a, y = recorded
    for run in (y.sum().backward, lambda: torch.autograd.backward([y.sum()])):
        with pytest.raises(RuntimeError, match=r"backhaul\.backward\(context"):
            run()
    assert a.grad is None
    ctx.backward(y.sum(), retain_graph=True)
    with pytest.raises(RuntimeError, match=r"backhaul\.backward\(context"):
        y.sum().backward()  # also after the first pass


def test_plain_grad_runs_into_a_recv_node(recorded: Any) -> None:
    """``inputs`` lie behind the received tensor."""
    ctx, _, y = recorded
    if not y.grad_fn.next_functions:
        pytest.skip("the native core makes recv nodes with nothing behind them")
    anchor = y.grad_fn.next_functions[0][0].variable
    with pytest.raises(RuntimeError, match=r"backhaul\.backward\(context"):
        torch.autograd.grad(y.sum(), [anchor])
    ctx.backward(y.sum())


def test_plain_grad_of_what_is_behind_a_call(recorded: Any) -> None:
    """torch itself finds no path there, and raises."""
    ctx, a, y = recorded
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(y.sum(), [a])
    ctx.backward(y.sum())


def test_plain_autograd_on_this_side_of_a_recv_node(recorded: Any) -> None:
    """A local gradient that does not go through the received tensor is computed as usual."""
    _, _, y = recorded
    b = vector(3.0, 4.0)
    (grad,) = torch.autograd.grad((y * b).sum(), [b])
    assert grad.tolist() == [2.0, 4.0]
    (grad,) = torch.autograd.grad((y * b).sum(), [y])
    assert grad.tolist() == [3.0, 4.0]


def test_plain_backward_on_the_remote_side() -> None:
    with bh.cluster(2) as workers:
        with bh.context(), pytest.raises(RuntimeError, match=r"backhaul\.backward\(context") as caught:
            bh.rpc_sync(1, plain_backward, args=(vector(1.0),))
        assert caught.value.__cause__.worker == "worker1"
        expect_a_working_cluster(workers)


def plain_backward(x: torch.Tensor) -> None:
    x.sum().backward()


# Deadlines.


def wait_in_backward(gate: str, x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(lambda _: (gates[gate].wait(DEADLINE_SECONDS), None)[1])
    return y


def wait_far_away(gate: str, to: list[int], x: torch.Tensor) -> torch.Tensor:
    if not to:
        return wait_in_backward(gate, x)
    return bh.rpc_sync(to[0], wait_far_away, args=(gate, to[1:], x * 2)) * 2


def test_a_worker_that_is_stuck_far_away_is_named() -> None:
    """What the workers in between have done travels with the gradients; the driver asks them when time is up, and they
    pass on that the pass is over.
    """
    a, gate = vector(1.0, 2.0), "far away"
    gates[gate] = threading.Event()
    with bh.cluster(4) as workers:
        with bh.context() as ctx:
            y = bh.rpc_sync(1, wait_far_away, args=(gate, [2, 3], a))
            with pytest.raises(bh.errors.BackwardTimeoutError) as caught:
                ctx.backward(y.sum(), timeout=0.3)
            assert list(caught.value.outstanding.values()) == ["worker3"]
            gates[gate].set()
            wait_until_all_runs_failed(workers, ctx)
        expect_a_working_cluster(workers)


def test_fast_mode_with_a_call_that_does_not_take_part() -> None:
    """It waits for the gradient of a message that gets none. The timeout error names the outstanding messages."""
    a = vector(1.0, 2.0)
    with bh.cluster(2) as workers:
        with bh.context() as ctx:
            used = bh.rpc_sync(1, two_sends, args=(a,))
            with pytest.raises(bh.errors.BackwardTimeoutError) as caught:
                ctx.backward(used.sum(), mode="fast", timeout=0.3)
            error = caught.value
            assert isinstance(error, TimeoutError)
            assert (error.context, error.worker) == (ctx, "worker0")
            assert error.outstanding
            assert set(error.outstanding.values()) == {"worker1"}
            for message in error.outstanding:
                assert f"message {message} at worker 'worker1'" in str(error)
            wait_until_all_runs_failed(workers, ctx)
        expect_a_working_cluster(workers)


def two_sends(x: torch.Tensor) -> torch.Tensor:
    """Two messages of one group; one of them is never used."""
    common = x * 2
    bh.rpc_sync(0, scale, args=(common,))
    return bh.rpc_sync(0, scale, args=(common,))


gates: dict[str, threading.Event] = {}


def slow_in_backward(x: torch.Tensor, gate: str) -> torch.Tensor:
    y = x * 2
    y.register_hook(lambda _: (gates[gate].wait(DEADLINE_SECONDS), None)[1])
    return y


@pytest.mark.parametrize("timeout", [0.2, None])
def test_a_backward_function_that_takes_too_long(timeout: float | None) -> None:
    """The timeout of the call or of the worker. Messages after it do nothing."""
    a, gates["slow"] = vector(1.0), threading.Event()
    with bh.cluster(2, options=bh.Options(backward_timeout=0.2)) as workers:
        try:
            with bh.context() as ctx:
                y = bh.rpc_sync(1, slow_in_backward, args=(a, "slow"))
                with pytest.raises(bh.errors.BackwardTimeoutError) as caught:
                    ctx.backward(y.sum(), timeout=timeout)
                assert list(caught.value.outstanding.values()) == ["worker1"]
                assert "0.2 s" in str(caught.value)
        finally:
            gates["slow"].set()
        expect_no_contexts(workers)
        with bh.context() as ctx:
            ctx.backward(bh.rpc_sync(1, scale, args=(a,)).sum(), timeout=0)
            assert ctx.grads[a].tolist() == [2.0]


# Workers that are lost.


def leave_in_backward(x: torch.Tensor) -> torch.Tensor:
    """The worker exits silently when the gradient arrives."""
    y = x * 2
    node = bh.current_worker().part(Node)
    y.register_hook(lambda _: node.shutdown(graceful=False, timeout=1.0))
    return y


def leave_in_backward_on(to: int, x: torch.Tensor) -> torch.Tensor:
    return bh.rpc_sync(to, leave_in_backward, args=(x,)) * 2


@pytest.mark.parametrize("direct", [True, False])
def test_a_worker_that_leaves_in_the_middle_of_a_pass(direct: bool) -> None:
    """A worker that the driver called, or one that it never called."""
    a = vector(1.0)
    with bh.cluster(3, endpoints=SOCKETS) as workers:
        with bh.context() as ctx:
            y = leave_in_backward_on(2, a) if direct else bh.rpc_sync(1, leave_in_backward_on, args=(2, a))
            with pytest.raises(bh.PeerLostError) as caught:
                ctx.backward(y.sum(), timeout=DEADLINE_SECONDS)
            assert caught.value.worker == "worker2"
            assert caught.value.context == ctx
            assert caught.value.pass_number
            assert caught.value.messages
            assert all(str(message) in str(caught.value) for message in caught.value.messages)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not workers[2].closed:  # its channels are closed before it is
            assert time.monotonic() < deadline
        expect_a_working_cluster(workers[:2])


def test_a_worker_that_is_gone_before_its_gradients_come() -> None:
    a = vector(1.0)
    with bh.cluster(3, endpoints=SOCKETS) as workers:
        with bh.context() as ctx:
            y = bh.rpc_sync(1, pass_on, args=(2, a))
            workers[2].part(Node).shutdown(graceful=False, timeout=1.0)
            with pytest.raises(bh.PeerLostError) as caught:
                ctx.backward(y.sum(), timeout=DEADLINE_SECONDS)
            assert caught.value.worker == "worker2"
        expect_a_working_cluster(workers[:2])


def pass_on(to: int, x: torch.Tensor) -> torch.Tensor:
    return bh.rpc_sync(to, scale, args=(x,)) * 2


def test_a_worker_that_is_lost_while_a_group_waits_for_it() -> None:
    """Worker 1 has asked the driver and has one gradient of two; the worker that left had the other."""
    a = vector(1.0)
    with bh.cluster(3, endpoints=SOCKETS) as workers:
        with bh.context() as ctx:
            y, z = bh.rpc_sync(1, both_ways, args=(a,))
            with pytest.raises(bh.PeerLostError) as caught:
                ctx.backward((y * z).sum(), timeout=DEADLINE_SECONDS)
            assert caught.value.worker == "worker2"
        expect_a_working_cluster(workers[:2])


def both_ways(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    common = x * 2
    return bh.rpc_sync(0, scale, args=(common,)), bh.rpc_sync(2, leave_in_backward, args=(common,))


def die_in_backward(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(lambda _: os._exit(3))
    return y


def die_far_away(to: int, x: torch.Tensor) -> torch.Tensor:
    return bh.rpc_sync(to, die_in_backward, args=(x,)) * 2


def lose_a_process(rank: int, folder: str, direct: bool) -> Any:
    bh.init(f"worker{rank}", rank=rank, world_size=3, store=torch.distributed.FileStore(f"{folder}/store", 3))
    found = None
    if rank == 0:
        a = vector(1.0)
        with bh.context() as ctx:
            y = bh.rpc_sync(2, die_in_backward, args=(a,)) if direct else bh.rpc_sync(1, die_far_away, args=(2, a))
            try:
                ctx.backward(y.sum(), timeout=DEADLINE_SECONDS)
            except bh.BackhaulError as error:
                found = type(error).__name__, error.worker
        with bh.context() as ctx:
            ctx.backward(bh.rpc_sync(1, scale, args=(a,)).sum())
            assert ctx.grads[a].tolist() == [2.0]
    bh.shutdown(timeout=DEADLINE_SECONDS)
    return found


@pytest.mark.parametrize("direct", [True, False])
def test_a_process_that_dies_in_the_middle_of_a_pass(tmp_path: pathlib.Path, direct: bool) -> None:
    found = run_processes(lose_a_process, 3, str(tmp_path), direct, patience=3 * DEADLINE_SECONDS)
    assert found == [("PeerLostError", "worker2"), None, DIED]


def count_contexts() -> int:
    return bh.get_debug_info()["num_autograd_contexts"]


def lose_the_middle(rank: int, folder: str) -> Any:
    bh.init(f"worker{rank}", rank=rank, world_size=3, store=torch.distributed.FileStore(f"{folder}/store", 3))
    found = None
    if rank == 0:
        with bh.context():
            bh.rpc_sync(1, pass_on, args=(2, vector(1.0)))
            assert bh.rpc_sync(2, count_contexts) == 1
            with pytest.raises(bh.PeerLostError):
                bh.rpc_sync(1, os._exit, args=(3,))
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (found := bh.rpc_sync(2, count_contexts)) and time.monotonic() < deadline:
            time.sleep(0.01)
    bh.shutdown(timeout=DEADLINE_SECONDS)
    return found


def test_a_context_is_released_behind_a_worker_that_is_gone(tmp_path: pathlib.Path) -> None:
    """Worker 2 knew the context only through worker 1."""
    found = run_processes(lose_the_middle, 3, str(tmp_path), patience=3 * DEADLINE_SECONDS)
    assert found == [0, DIED, None]
