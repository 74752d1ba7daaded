"""Which calls and operations belong to a profile: those at its edges, of handlers that continue, and of others."""

from __future__ import annotations

import threading
import time
from collections import Counter

import torch

import backhaul as bh

from . import programs
from .timelines import check, count_ops, worker_of


def test_a_call_started_before_the_profile_and_one_that_ends_after_it() -> None:
    with bh.cluster(2):
        programs.released.clear()
        before = bh.rpc_async("worker1", programs.wait_until_released)
        with bh.profile() as prof:
            after = bh.rpc_async("worker1", programs.wait_until_released)
            time.sleep(0.01)
        programs.released.set()
        bh.wait_all([before, after])
    check(prof.timeline)
    (call,) = prof.timeline.calls
    assert call.done == -1
    near = next(each for each in prof.timeline.slices if each.id == call.near)
    assert near.end == prof.timeline.end


def test_backward_of_calls_made_before_the_profile() -> None:
    with bh.cluster(3):
        x = torch.ones(programs.SIZE, programs.SIZE, requires_grad=True)
        with bh.context() as context:
            loss = bh.rpc_sync("worker1", programs.outer, args=(x,)).sum()
            with bh.profile() as prof:
                bh.backward(context, [loss])
    check(prof.timeline)
    assert not prof.timeline.calls
    assert count_ops(prof.timeline)["worker2", "aten::mm"] == 2


def test_operations_of_a_handler_after_it_returned_are_recorded() -> None:
    with bh.cluster(3):
        x = torch.eye(programs.SIZE)
        with bh.profile() as prof:
            bh.rpc_sync("worker1", programs.multiply_in_coroutine, args=(x,))
            bh.rpc_sync("worker1", programs.multiply_in_callback, args=(x,))
    check(prof.timeline)
    assert count_ops(prof.timeline)["worker1", "aten::mm"] == 6
    calls = {call.id: call.function for call in prof.timeline.calls}
    owners = Counter(calls[s.call] for s in prof.timeline.slices if s.name == "aten::mm")
    assert owners == {"multiply_in_coroutine": 5, "multiply_in_callback": 1}


def test_operations_of_a_call_that_still_runs_are_recorded() -> None:
    with bh.cluster(2):
        programs.released.clear()
        programs.multiplied.clear()
        with bh.profile() as prof:
            call = bh.rpc_async("worker1", programs.multiply_and_wait, args=(torch.eye(programs.SIZE),))
            assert programs.multiplied.wait(20)
        programs.released.set()
        call.wait()
    check(prof.timeline)
    (found,) = prof.timeline.calls
    served = next(each for each in prof.timeline.slices if each.id == found.far)
    assert served.end == prof.timeline.end
    assert count_ops(prof.timeline)["worker1", "aten::mm"] == 1
    assert "multiply_and_wait" in prof.table()


def test_operations_of_other_workers_of_the_process_are_not_recorded() -> None:
    with bh.cluster(3) as workers:
        x = torch.eye(programs.SIZE)

        def call_as_another_worker() -> None:
            with workers[1]:
                for _ in range(10):
                    bh.rpc_sync("worker2", programs.inner, args=(x,))

        with bh.profile() as prof:
            thread = threading.Thread(target=call_as_another_worker)
            thread.start()
            thread.join()
            x.mm(x)
        with workers[1], bh.profile() as other:
            x.mm(x)
    assert count_ops(prof.timeline) == {("worker0", "aten::mm"): 1}
    assert count_ops(other.timeline) == {("worker1", "aten::mm"): 1}
    assert not prof.timeline.calls


def test_a_step_inside_a_handler_is_counted_once() -> None:
    with bh.cluster(3), bh.profile() as prof:
        bh.rpc_sync("worker1", programs.train)
    check(prof.timeline)
    where = worker_of(prof.timeline)
    serves = [s for s in prof.timeline.slices if s.kind == "serve" and where[s.track] == "worker1"]
    groups = [s for s in prof.timeline.slices if s.kind == "group" and where[s.track] == "worker1"]
    most = sum(s.end - s.start for s in (*serves, *groups) if s.parent < 0) / 1e6
    (row,) = [line.split() for line in prof.table().splitlines() if line.startswith("worker1")]
    value, unit = float(row[3]), row[4]
    assert value * {"us": 1e-3, "ms": 1.0, "s": 1e3}[unit] <= most + 0.01


def test_calls_of_other_threads_while_profiles_start_and_end() -> None:
    with bh.cluster(3) as workers:
        stopped = threading.Event()

        def call_until_stopped() -> None:
            with workers[0]:
                while not stopped.is_set():
                    bh.rpc_sync("worker1", torch.neg, args=(torch.ones(2),))

        threads = [threading.Thread(target=call_until_stopped) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(30):
            with bh.profile(ops=False) as prof:
                bh.rpc_sync("worker2", torch.neg, args=(torch.ones(2),))
            check(prof.timeline)
            assert any(call.callee == 2 for call in prof.timeline.calls)
        stopped.set()
        for thread in threads:
            thread.join()
