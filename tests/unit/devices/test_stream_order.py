"""Every path from one thread's streams to another's has its wait: the clocks find each missing one."""

from __future__ import annotations

import gc
import threading
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul._devices.stream_order import StreamOrder
from backhaul._devices.tensor_walk import tensors_in
from tests.unit.devices.clocks import Cell, FakeCuda, FakeEvent, RaceError, Threads


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def stream_order(cuda: FakeCuda) -> StreamOrder:
    return StreamOrder(cuda)


class TestTheClocks:
    """The clocks find the races that the other tests look for."""

    def test_a_missing_wait(self, cuda: FakeCuda, threads: Threads) -> None:
        cell = Cell(cuda)
        cell.write()
        threads.run("t", lambda: cuda.use(cuda.fresh(0)))
        for act in (cell.read, cell.write):
            with pytest.raises(RaceError):
                threads.run("t", act)

    def test_a_write_over_a_read(self, cuda: FakeCuda, threads: Threads) -> None:
        cell = Cell(cuda)
        cell.read()
        threads.run("t", lambda: cuda.use(cuda.fresh(0)))
        threads.run("t", cell.read)
        with pytest.raises(RaceError):
            threads.run("t", cell.write)

    def test_what_is_done_is_done(self, cuda: FakeCuda, threads: Threads) -> None:
        cell = Cell(cuda)
        cell.write()
        threads.run("t", lambda: cuda.use(cuda.fresh(0)))
        cuda.finish()
        threads.run("t", cell.write)

    def test_an_event_is_of_one_device(self) -> None:
        cuda = FakeCuda(2)
        event = FakeEvent(cuda)
        cuda.record(event, cuda.default(0))
        with pytest.raises(AssertionError):
            cuda.record(event, cuda.default(1))


class TestMessages:
    def test_who_gets_one_comes_after_who_sent_it(
        self, cuda: FakeCuda, stream_order: StreamOrder, threads: Threads
    ) -> None:
        cell = Cell(cuda)
        for name in ("a", "b"):
            threads.run(name, stream_order.enter)
        threads.run("a", cell.write)
        threads.run("a", stream_order.depart)
        with pytest.raises(RaceError):
            threads.run("b", cell.read)
        threads.run("b", stream_order.arrive)
        threads.run("b", cell.write)
        threads.run("b", stream_order.depart)
        stream_order.arrive()
        cell.read()

    def test_without_departing_there_is_no_order(
        self, cuda: FakeCuda, stream_order: StreamOrder, threads: Threads
    ) -> None:
        cell = Cell(cuda)
        for name in ("a", "b"):
            threads.run(name, stream_order.enter)
        threads.run("a", cell.write)
        threads.run("b", stream_order.arrive)
        with pytest.raises(RaceError):
            threads.run("b", cell.read)

    def test_the_default_stream_is_followed_anyway(
        self, cuda: FakeCuda, stream_order: StreamOrder, threads: Threads
    ) -> None:
        cell = Cell(cuda)
        cell.write()
        threads.run("a", stream_order.enter)
        threads.run("a", stream_order.arrive)
        threads.run("a", cell.read)

    def test_one_handler_sees_what_another_did_before(
        self, cuda: FakeCuda, stream_order: StreamOrder, threads: Threads
    ) -> None:
        parameter = Cell(cuda)
        for name in ("a", "b", "c"):
            threads.run(name, stream_order.enter)
        for name in ("a", "b", "c", "a"):
            threads.run(name, stream_order.arrive)
            threads.run(name, parameter.write)
            threads.run(name, stream_order.depart)

    def test_a_stream_of_the_users(self, cuda: FakeCuda, stream_order: StreamOrder, threads: Threads) -> None:
        cell = Cell(cuda)
        for make in (cuda.fresh, cuda.external):
            cuda.use(make(0))
            stream_order.arrive()
            cell.write()
            stream_order.depart()
            threads.run("a", stream_order.enter)
            threads.run("a", stream_order.arrive)
            threads.run("a", cell.write)
            threads.run("a", stream_order.depart)

    def test_several_devices(self, threads: Threads) -> None:
        cuda = FakeCuda(3)
        stream_order, cells = StreamOrder(cuda), [Cell(cuda, device) for device in range(3)]
        for name in ("a", "b"):
            threads.run(name, stream_order.enter)
        for name in ("a", "b", "a"):
            threads.run(name, stream_order.arrive)
            for cell in cells:
                threads.run(name, cell.write)
            threads.run(name, stream_order.depart)

    def test_what_is_idle_costs_nothing(self, cuda: FakeCuda, stream_order: StreamOrder, threads: Threads) -> None:
        cell = Cell(cuda)
        threads.run("a", stream_order.enter)
        threads.run("a", cell.write)
        threads.run("a", stream_order.depart)
        assert cuda.events == 1
        cuda.finish()
        threads.run("a", stream_order.depart)
        stream_order.arrive()
        assert cuda.default(0).waits == 0
        assert cuda.events == 1
        cell.read()

    def test_one_event_for_each_stream(self, cuda: FakeCuda, stream_order: StreamOrder, threads: Threads) -> None:
        cell = Cell(cuda)
        threads.run("a", stream_order.enter)
        for _ in range(5):
            threads.run("a", cell.write)
            threads.run("a", stream_order.depart)
        assert cuda.events == 1
        stream_order.arrive()
        assert cuda.default(0).waits == 1
        cell.read()

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.tuples(st.sampled_from("abcm"), st.lists(st.integers(0, 3), max_size=3), st.booleans())))
    def test_whatever_goes_from_hand_to_hand(self, steps: list[tuple[str, list[int], bool]]) -> None:
        cuda, threads = FakeCuda(2), Threads()
        stream_order, cells = StreamOrder(cuda), [Cell(cuda, number % 2) for number in range(4)]
        try:
            for name, used, finish in steps:
                if name != "m":
                    threads.run(name, stream_order.enter)
                threads.run(name, stream_order.arrive)
                for number in used:
                    threads.run(name, cells[number].write if number % 2 else cells[number].read)
                if finish:
                    cuda.finish()
                threads.run(name, stream_order.depart)
        finally:
            threads.close()


class TestThreads:
    def test_each_has_its_own_stream(self, cuda: FakeCuda, stream_order: StreamOrder, threads: Threads) -> None:
        streams = []
        for name in ("a", "b", "a"):
            threads.run(name, stream_order.enter)
            streams.append(threads.run(name, lambda: cuda.current(0)))
        assert streams[0] is streams[2]
        assert streams[0] is not streams[1]
        assert cuda.default(0) not in streams

    def test_what_a_handler_has_left_is_put_right(
        self, cuda: FakeCuda, stream_order: StreamOrder, threads: Threads
    ) -> None:
        threads.run("a", stream_order.enter)
        own = threads.run("a", lambda: cuda.current(0))
        threads.run("a", lambda: cuda.use(cuda.fresh(0)))
        threads.run("a", stream_order.enter)
        assert threads.run("a", lambda: cuda.current(0)) is own


class TestMarks:
    def test_a_value_comes_after_what_it_came_of(
        self, cuda: FakeCuda, stream_order: StreamOrder, threads: Threads
    ) -> None:
        cell = Cell(cuda)
        threads.run("a", stream_order.enter)
        threads.run("a", cell.write)
        mark = threads.run("a", stream_order.mark)
        with pytest.raises(RaceError):
            cell.read()
        stream_order.join(mark)
        cell.read()

    def test_only_after_that(self, cuda: FakeCuda, stream_order: StreamOrder, threads: Threads) -> None:
        cell = Cell(cuda)
        threads.run("a", stream_order.enter)
        threads.run("a", Cell(cuda).write)
        mark = threads.run("a", stream_order.mark)
        threads.run("a", cell.write)
        stream_order.join(mark)
        with pytest.raises(RaceError):
            cell.read()

    def test_where_nothing_is_under_way_there_is_nothing_to_wait_for(
        self, cuda: FakeCuda, stream_order: StreamOrder, threads: Threads
    ) -> None:
        threads.run("a", stream_order.enter)
        threads.run("a", Cell(cuda).write)
        mark = threads.run("a", stream_order.mark)
        assert len(mark.pending) == 1
        cuda.finish()
        assert mark.pending == []
        stream_order.join(mark)
        stream_order.join(threads.run("a", stream_order.mark))
        assert cuda.default(0).waits == 0

    def test_without_devices_there_is_none(self) -> None:
        assert StreamOrder(FakeCuda(0)).mark() is None

    def test_the_latest_of_each_stream(self, cuda: FakeCuda, stream_order: StreamOrder, threads: Threads) -> None:
        first, second, mark = Cell(cuda), Cell(cuda), None
        for name, cell in (("a", first), ("b", second), ("a", first), ("a", first)):
            threads.run(name, stream_order.enter)
            threads.run(name, cell.write)
            mark = threads.run(name, lambda mark=mark: stream_order.mark(mark))
        assert mark is not None
        assert len(mark.pending) == 2
        stream_order.join(mark)
        first.read()
        second.read()

    def test_through_several_threads(self, cuda: FakeCuda, stream_order: StreamOrder, threads: Threads) -> None:
        cell = Cell(cuda)
        mark = None
        for name in ("a", "b", "c", "a"):
            threads.run(name, stream_order.enter)
            if mark is not None:
                threads.run(name, lambda mark=mark: stream_order.join(mark))
            threads.run(name, cell.write)
            mark = threads.run(name, stream_order.mark)


class TestDrain:
    def test_memory_is_used_again_after_all_that_used_it(
        self, cuda: FakeCuda, stream_order: StreamOrder, threads: Threads
    ) -> None:
        slot, sender = Cell(cuda), cuda.fresh(0)
        for name in ("a", "b"):
            threads.run(name, stream_order.enter)
            threads.run(name, slot.read)
        slot.read()  # on the default stream
        done, order = FakeEvent(cuda), list[str]()
        threads.run("a", lambda: stream_order.slot_order.record_behind_all(done, 0, lambda: order.append("free")))
        assert order == ["free"]
        with pytest.raises(RaceError):
            slot.write_on(sender)
        cuda.wait(sender, done)
        slot.write_on(sender)

    def test_nobody_waits_for_another(self, cuda: FakeCuda, stream_order: StreamOrder, threads: Threads) -> None:
        for name in ("a", "b"):
            threads.run(name, stream_order.enter)
            threads.run(name, Cell(cuda).write)
        stream_order.slot_order.record_behind_all(FakeEvent(cuda), 0, lambda: None)
        assert threads.run("a", lambda: cuda.current(0)).waits == 0
        assert threads.run("b", lambda: cuda.current(0)).waits == 0
        assert cuda.default(0).waits == 0

    def test_a_stream_that_may_be_gone_is_not_asked(
        self, cuda: FakeCuda, stream_order: StreamOrder, threads: Threads
    ) -> None:
        threads.run("a", lambda: cuda.use(cuda.external(0)))
        threads.run("a", stream_order.depart)
        stream = threads.run("a", lambda: cuda.current(0))
        stream.query = None  # gone
        stream_order.slot_order.record_behind_all(FakeEvent(cuda), 0, lambda: None)
        assert not stream_order.trouble


class TestMemory:
    @pytest.mark.filterwarnings("ignore:Sparse")
    def test_parts_of_sparse_tensors_are_adopted(
        self, cuda: FakeCuda, stream_order: StreamOrder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        adopted: list[torch.Tensor] = []
        monkeypatch.setattr(cuda, "adopt", lambda tensor, stream: adopted.append(tensor))
        monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda", 0))
        dense = torch.eye(2)
        values = [
            dense,
            dense.to_sparse(),
            *(dense.to_sparse(layout=layout) for layout in (torch.sparse_csr, torch.sparse_csc)),
        ]
        stream_order.adopt(values)
        assert [tuple(tensor.shape) for tensor in adopted] == [(2, 2), (2, 2), (2,), (3,), (2,), (2,), (3,), (2,), (2,)]

    def test_memory_does_not_go_back_while_a_stream_cannot_be_asked(
        self, cuda: FakeCuda, stream_order: StreamOrder, threads: Threads
    ) -> None:
        threads.run("a", stream_order.enter)
        threads.run("a", Cell(cuda).write)
        threads.run("a", stream_order.depart)
        lane, freed, done = threads.run("a", lambda: cuda.current(0)), [], FakeEvent(cuda)

        def query() -> bool:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

        lane.query = query
        stream_order.slot_order.record_behind_all(done, 0, lambda: freed.append(1))
        assert (done.records, freed) == (0, [])
        waits = cuda.default(0).waits
        stream_order.arrive()
        assert cuda.default(0).waits > waits, "who goes on waits all the same"
        assert (done.records, freed) == (0, [])
        del lane.query
        stream_order.arrive()
        assert (done.records, freed) == (1, [1])
        assert not stream_order.trouble


class TestTrouble:
    def test_a_device_that_has_failed_fails_no_message(
        self, cuda: FakeCuda, stream_order: StreamOrder, caplog: pytest.LogCaptureFixture
    ) -> None:
        Cell(cuda).write()
        mark = stream_order.mark()
        assert mark is not None
        cuda.broken = True
        freed: list[int] = []
        stream_order.depart()
        stream_order.arrive()
        stream_order.enter()
        stream_order.join(mark)
        stream_order.slot_order.record_behind_all(FakeEvent(cuda), 0, lambda: freed.append(1))
        assert stream_order.mark() is None
        assert "device-side assert" in stream_order.trouble
        assert len(caplog.records) == 1
        assert freed == [1]

    def test_a_graph_that_is_made_is_left_alone(self, cuda: FakeCuda, stream_order: StreamOrder) -> None:
        cell = Cell(cuda)
        cell.write()
        cuda.capture = True
        freed: list[int] = []
        stream_order.depart()
        stream_order.arrive()
        assert stream_order.mark() is None
        done = FakeEvent(cuda)
        stream_order.slot_order.record_behind_all(done, 0, lambda: freed.append(1))
        assert (cuda.events, done.records, freed) == (0, 0, [])
        cuda.capture = False
        stream_order.arrive()
        assert (done.records, freed) == (1, [1])


def test_tensors_are_found_in_values() -> None:
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    assert [len(t) for t in tensors_in([one, {"a": (two, "x")}, None, 3, [[three]]])] == [1, 2, 3]
    deep: list[object] = [one]
    for _ in range(50):
        deep = [deep]
    assert list(tensors_in(deep)) == []
    held = types.SimpleNamespace(inner=types.SimpleNamespace(tensor=two), name="x")
    assert [len(t) for t in tensors_in((held, torch.nn.Linear(1, 3)))] == [2, 3, 3]
    held.itself = [held] * 10
    assert [len(t) for t in tensors_in(held)] == [2]
    assert list(tensors_in((torch, torch.nn.Linear, test_tensors_are_found_in_values))) == []


class TestFailures:
    def test_what_passes_is_no_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda = FakeCuda()
        stream_order = StreamOrder(cuda)
        Cell(cuda).write()

        def no_memory(device: int) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(cuda, "event", no_memory)
            stream_order.depart()
        assert not stream_order.failed()
        cuda.broken = True
        stream_order.depart()
        assert stream_order.failed()
        assert "device-side assert" in stream_order.trouble
        assert not stream_order.slot_order.is_quiet()

    def test_a_thread_that_ends_leaves_its_streams_to_the_next(self) -> None:
        cuda = FakeCuda()
        stream_order = StreamOrder(cuda)
        seen = set()

        def enter() -> None:
            stream_order.enter()
            seen.add(cuda.current(0).number)

        for _ in range(5):
            thread = threading.Thread(target=enter)
            thread.start()
            thread.join()
            gc.collect()
        assert len(seen) == 1
