"""Profiles of real programs, in several processes and in one, compared with the same program under local autograd."""

from __future__ import annotations

import json
import pathlib
import threading
from collections import Counter

import pytest
import torch

import backhaul as bh
from backhaul.profiler.model import Timeline

from ..cluster.processes import DIED, run_processes
from . import programs
from .timelines import OPS, check, count_ops


@pytest.fixture(scope="module")
def two_steps() -> tuple[Timeline, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The timeline and the results of two steps in three processes."""
    found = bh.launch(programs.profile_steps, 3, args=(3, 2), start_method="forkserver", timeout=90)
    assert found[0] is not None
    return found[0]


def test_a_profile_contains_every_worker_that_served_a_call(two_steps: tuple[Timeline, object]) -> None:
    timeline, _ = two_steps
    check(timeline)
    assert [row.name for row in timeline.workers] == ["worker0", "worker1", "worker2"]
    assert len({row.pid for row in timeline.workers}) == 3
    names = Counter(call.name for call in timeline.calls)
    assert names == {
        "rpc_async#outer(worker0 -> worker1)": 6,
        "rpc_sync#inner(worker1 -> worker2)": 6,
        "rpc_sync#inner(worker0 -> worker2)": 2,
    }
    kinds = Counter(arrow.kind for arrow in timeline.arrows)
    assert kinds["request"] == kinds["reply"] == 14
    # One gradient for every request and every reply, except for the leaves of ``worker2`` itself.
    assert kinds["gradient"] == 28


def test_operations_are_those_of_local_autograd(two_steps: tuple[Timeline, object]) -> None:
    timeline, _ = two_steps
    with torch.profiler.profile(acc_events=True) as plain:
        for _ in range(2):
            programs.local_step(3)
    expected = Counter(event.name for event in plain.events() if event.name in OPS)
    found = count_ops(timeline)
    assert sum(found.values()) == sum(expected.values())
    total: Counter[str] = Counter()
    for (_, name), count in found.items():
        total[name] += count
    assert total == expected
    assert found["worker0", "aten::mm"] == 0
    assert found["worker1", "aten::mm"] == 2 * 3 * 3  # two steps, three calls, one forward and two backward
    assert found["worker2", "aten::mm"] == 2 * 4 * 3


def test_a_profiled_step_has_correct_results(
    two_steps: tuple[Timeline, list[tuple[torch.Tensor, torch.Tensor]]],
) -> None:
    _, results = two_steps
    loss, grad = programs.local_step(3)
    for found_loss, found_grad in results:
        torch.testing.assert_close(found_loss, loss)
        torch.testing.assert_close(found_grad, grad)


def test_calls_nest(two_steps: tuple[Timeline, object]) -> None:
    timeline, _ = two_steps
    calls = {call.id: call for call in timeline.calls}
    for call in timeline.calls:
        parent = calls.get(call.parent)
        if call.caller == 1:
            assert parent is not None
            assert parent.name == "rpc_async#outer(worker0 -> worker1)"
            assert parent.start <= call.start + timeline.workers[1].error
        else:
            assert parent is None


def test_the_path_accounts_for_most_of_the_time(two_steps: tuple[Timeline, object]) -> None:
    timeline, _ = two_steps
    spent: Counter[str] = Counter()
    for segment in timeline.path:
        spent[segment.kind] += segment.end - segment.start
    assert spent["idle"] < timeline.end / 2
    assert spent["wire"] > 0
    assert {segment.worker for segment in timeline.path} == {0, 1, 2}


def test_clocks_of_one_host_agree(two_steps: tuple[Timeline, object]) -> None:
    timeline, _ = two_steps
    for row in timeline.workers[1:]:
        assert (row.offset, row.error) == (0, 0), "the processes of one host share a clock"


def test_events_are_named_by_call() -> None:
    with bh.cluster(3), bh.profile() as prof:
        programs.step(1)
    check(prof.timeline)
    events = prof.events()
    names = {event.name for event in events}
    assert "rpc_async#outer(worker0 -> worker1)" in names
    assert "rpc_async#outer(worker0 -> worker1)#remote_op: aten::mm" in names
    nested = "rpc_async#outer(worker0 -> worker1)#remote_op: rpc_sync#inner(worker1 -> worker2)"
    assert nested in names
    assert f"{nested}#remote_op: aten::mm" in names
    assert "backward(worker0 -> worker2)#remote_op: aten::mm" in names
    for event in events:
        assert event.is_remote == (event.node_id != 0)
        if event.is_remote:
            assert "(worker0 -> " in event.name
    mm = next(event for event in events if event.name == f"{nested}#remote_op: aten::mm")
    assert mm.node_id == 2
    averages = {average.key: average.count for average in prof.key_averages()}
    assert averages["backward(worker0 -> worker2)#remote_op: aten::mm"] == 4


def test_all_kinds_of_handlers_and_calls() -> None:
    with bh.cluster(3):
        ones = torch.ones(programs.SIZE, programs.SIZE)
        with bh.profile() as prof:
            bh.rpc_sync("worker1", programs.return_future, args=(ones,))
            bh.rpc_sync("worker1", programs.coroutine, args=(ones,))
            rref = bh.remote("worker1", programs.inner, args=(ones,))
            rref.to_here()
            rref.rpc_sync().sum()
            with pytest.raises(KeyError):
                bh.rpc_sync("worker1", programs.fail, args=(ones,))
            with pytest.raises(bh.errors.SerializationError):
                bh.rpc_sync("worker1", programs.fail, args=(threading.Lock(),))
            bh.rpc_sync("worker0", programs.inner, args=(ones,))
    timeline = prof.timeline
    check(timeline)
    found = {call.name: call for call in timeline.calls}
    assert set(found) == {
        "rpc_sync#return_future(worker0 -> worker1)",
        "rpc_async#inner(worker1 -> worker2)",
        "rpc_sync#coroutine(worker0 -> worker1)",
        "remote#inner(worker0 -> worker1)",
        "rpc_sync#to_here(worker0 -> worker1)",
        "rpc_sync#sum(worker0 -> worker1)",
        "rpc_sync#fail(worker0 -> worker1)",
        "rpc_sync#inner(worker0 -> worker0)",
    }
    failed = [call.failed for call in timeline.calls if call.function == "fail"]
    assert failed == ["KeyError", "SerializationError"]
    assert all(call.failed or call.done > 0 for call in timeline.calls)
    parent = found["rpc_sync#return_future(worker0 -> worker1)"]
    assert found["rpc_async#inner(worker1 -> worker2)"].parent == parent.id
    coroutine = found["rpc_sync#coroutine(worker0 -> worker1)"]
    assert coroutine.ran < coroutine.replied, "the coroutine ran after its function had returned"


def test_workers_stop_recording_when_a_profile_ends() -> None:
    with bh.cluster(3) as workers:
        with bh.profile():
            programs.step()
            assert all(worker.observer is not None for worker in workers)
        assert all(worker.observer is None for worker in workers)
        assert [bh.rpc_sync(worker.name, programs.profiles_open) for worker in workers] == [0, 0, 0]
        assert not torch._C._autograd._profiler_enabled()


def test_profiles_at_the_same_time_and_one_after_another() -> None:
    with bh.cluster(3) as workers:
        outer = bh.profile()
        outer.start()
        programs.step(1)
        with bh.profile(ops=False) as without_ops:
            programs.step(1)
        with workers[1], bh.profile() as other:
            programs.outer(torch.ones(programs.SIZE, programs.SIZE))
        outer.stop()
        with bh.profile() as again:
            programs.step(1)
    for prof in (outer, without_ops, other, again):
        check(prof.timeline)
    assert len(outer.timeline.calls) == 6  # without the call that the program of worker1 made
    assert len(without_ops.timeline.calls) == 3
    assert not count_ops(without_ops.timeline)
    assert [call.name for call in other.timeline.calls] == ["rpc_sync#inner(worker1 -> worker2)"]
    assert other.timeline.owner == 1
    assert count_ops(again.timeline) == count_ops_of_one_step()


def count_ops_of_one_step() -> Counter[tuple[str, str]]:
    """One call to worker1 and two to worker2, with one product each, and two products each in the backward pass."""
    products = {("worker1", "aten::mm"): 3, ("worker2", "aten::mm"): 6}
    return Counter(products | {("worker2", "aten::relu"): 2, ("worker2", "aten::threshold_backward"): 2})


def test_results_can_be_read_when_the_profile_has_ended() -> None:
    with bh.cluster(1):
        prof = bh.profile()
        with pytest.raises(bh.BackhaulError, match="not started"):
            prof.stop()
        with prof, pytest.raises(bh.BackhaulError, match="still open"):
            prof.table()
        assert prof.timeline.path
        with pytest.raises(bh.BackhaulError, match="create another"):
            prof.start()


def test_a_profile_has_results_after_an_exception() -> None:
    with bh.cluster(2):
        prof = bh.profile()
        with pytest.raises(KeyError), prof:
            bh.rpc_sync("worker1", programs.fail, args=(torch.ones(1),))
    assert [call.failed for call in prof.timeline.calls] == ["KeyError"]


def test_a_lost_worker_is_reported_as_missing(tmp_path: pathlib.Path) -> None:
    timeline, *others = run_processes(programs.lose_a_worker, 3, str(tmp_path))
    assert others == [None, DIED]
    check(timeline)
    assert {row.name: bool(row.missing) for row in timeline.workers} == {
        "worker0": False,
        "worker1": False,
        "worker2": True,
    }
    assert any(call.failed == "PeerLostError" for call in timeline.calls)


def test_a_profile_whose_owner_died_is_dropped(tmp_path: pathlib.Path) -> None:
    assert run_processes(programs.outlive_a_profile, 3, str(tmp_path)) == [DIED, 0, 0]
    assert [(tmp_path / f"open{number}").read_text() for number in (1, 2)] == ["1", "1"]


def test_the_table_counts_calls() -> None:
    with bh.cluster(3), bh.profile() as prof:
        programs.step(2)
    lines = {line.split()[0]: line for line in prof.table().splitlines() if line.strip()}
    assert lines["rpc_async#outer(worker0"].split()[3] == "2"
    assert lines["worker2"].split()[1:3] == ["0", "3"]
    assert "the time went to" in prof.table()


def test_the_trace_has_the_format_of_viewers(tmp_path: pathlib.Path) -> None:
    with bh.cluster(3), bh.profile() as prof:
        programs.step(2)
    prof.export(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "worker0", 1: "worker1", 2: "worker2"}
    slices = [event for event in events if event["ph"] == "X"]
    flows = {"s": [], "f": []}
    for event in events:
        if event["ph"] in flows:
            flows[event["ph"]].append(event)
            inside = [
                each
                for each in slices
                if (each["pid"], each["tid"]) == (event["pid"], event["tid"])
                and each["ts"] <= event["ts"] <= each["ts"] + each["dur"] + 1e-6
            ]
            assert inside, "a flow belongs to a slice"
    assert sorted(event["id"] for event in flows["s"]) == sorted(event["id"] for event in flows["f"])
    assert Counter(event["name"] for event in flows["s"])["request"] == 5
    assert set(trace["otherData"]["clocks"]) == {"worker0", "worker1", "worker2"}
    assert {event["cat"] for event in slices} >= {"call", "serve", "run", "queue", "wait", "group", "encode", "op"}


def test_bytes_of_gradients_are_counted() -> None:
    with bh.cluster(2), bh.profile(ops=False) as prof:
        x = torch.ones(1 << 18, requires_grad=True)
        with bh.context() as context:
            bh.backward(context, [bh.rpc_sync("worker1", torch.neg, args=(x,)).pow(2).sum()])
    lines = [line for line in prof.table().splitlines() if line.startswith(("worker0", "worker1"))]
    assert [" 2.0 MiB " in line for line in lines] == [True, True], prof.table()


def test_an_inner_profile_records_shapes() -> None:
    with bh.cluster(2), bh.profile() as outer:
        x = torch.eye(programs.SIZE)
        x.mm(x)
        with bh.profile(record_shapes=True) as inner:
            x.mm(x)
    assert [s.args["shapes"] for s in inner.timeline.slices if s.name == "aten::mm"] == [[[programs.SIZE] * 2] * 2]
    assert count_ops(outer.timeline)["worker0", "aten::mm"] == 2
