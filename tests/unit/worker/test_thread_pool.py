"""The pool runs no more than it may, always listens, and ends when told, whatever its tasks do.

Time stands still unless a test moves it, so nothing here depends on how fast the machine is: ``Stage.settle`` waits
until every thread of the pool either polls or is held by the test.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from backhaul._runtime.runtime import Runtime
from backhaul._transport.base import Channel, Endpoint, Event
from backhaul._transport.inproc import InprocEndpoint
from backhaul._wire.frames import Frame
from backhaul._worker.thread_pool import Task, ThreadPool

ETERNITY = 1e6  # longer than any time for which the pool polls
FAILSAFE = 30.0  # seconds after which a test that waits gives up


class Stage(Runtime):
    """A clock that the test moves, threads that are counted."""

    def __init__(self) -> None:
        self.changed = threading.Condition()  # guards everything of the stage, the endpoint and the jobs
        self.time = 1024.0
        self.alive = 0  # threads that were started and have not ended
        self.deadlines: dict[int, float] = {}  # of the threads that poll
        self.held = 0  # threads that wait in a job
        self.over = False
        self.refuse_threads = False

    def now(self) -> float:
        with self.changed:
            return self.time

    def advance(self, seconds: float) -> None:
        with self.changed:
            self.time += seconds
            self.changed.notify_all()

    def spawn(self, target: Callable[[], None], *, name: str) -> threading.Thread:
        with self.changed:
            if self.refuse_threads:
                raise RuntimeError("can't start new thread")
            self.alive += 1

        def run() -> None:
            try:
                target()
            finally:
                with self.changed:
                    self.alive -= 1
                    self.changed.notify_all()

        return super().spawn(run, name=name)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, FAILSAFE), (
                f"never came about: {self.alive} threads, {len(self.deadlines)} in poll, {self.held} held"
            )

    @property
    def listening(self) -> int:
        with self.changed:
            return len(self.deadlines)


class StagedEndpoint(Endpoint):
    """Delivers what the test says, keeps to the stage's time."""

    addresses = ("staged:",)

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.events: collections.deque[Any] = collections.deque()
        self.wakes = 0
        self.woken = 0  # how often somebody was, ever
        self.polls = 0  # how often a thread began to wait, ever
        self.parked: set[Any] = set()

    def poll(self, timeout: float | None) -> Event | None:
        stage, me = self.stage, threading.get_ident()
        with stage.changed:
            deadline = stage.time + (ETERNITY if timeout is None else timeout)
            stage.deadlines[me] = deadline
            self.polls += 1
            stage.changed.notify_all()
            stage.wait_for(lambda: bool(self.events) or self.wakes > 0 or stage.time >= deadline)
            del stage.deadlines[me]
            if self.events:
                return self.events.popleft()  # type: ignore[no-any-return]
            if self.wakes:
                self.wakes -= 1
            return None

    def wake(self) -> None:
        with self.stage.changed:
            self.wakes += 1
            self.woken += 1
            self.stage.changed.notify_all()

    def emit(self, event: Any) -> None:
        with self.stage.changed:
            self.events.append(event)
            self.stage.changed.notify_all()

    def unpark(self) -> None:
        with self.stage.changed:
            self.parked.clear()
            self.stage.changed.notify_all()

    def connect(self, address: str, *, timeout: float) -> Channel:
        raise NotImplementedError

    def close(self) -> None: ...


class Job:
    """A task that holds its thread until the test lets it go on; if it ``blocks``, three times: before, in, after."""

    def __init__(self, staged: StagedPool, *, blocks: bool = False) -> None:
        self.staged = staged
        self.stage = staged.stage
        self.blocks = blocks
        self.started = self.blocking = self.done = False
        self.inside: list[bool] = []
        self.held = False

    def __call__(self) -> None:
        self._mark(started=True)
        self._hold()
        if self.blocks:
            with self.staged.thread_pool.blocking():
                self._mark(blocking=True)
                self._hold()
            self._mark(blocking=False)
            self._hold()
        self._mark(done=True)

    def _mark(self, **flags: bool) -> None:
        self.inside.append(self.staged.thread_pool.inside)
        with self.stage.changed:
            vars(self).update(flags)
            self.stage.changed.notify_all()

    def _hold(self) -> None:
        stage = self.stage
        with stage.changed:
            self.held = True
            stage.held += 1
            stage.changed.notify_all()
            stage.wait_for(lambda: not self.held or stage.over)
            if self.held:
                self.held = False
                stage.held -= 1

    def go_on(self) -> None:
        """Let it leave the hold it is in."""
        with self.stage.changed:
            self.stage.wait_for(lambda: self.held)
            self.held = False
            self.stage.held -= 1
            self.stage.changed.notify_all()


class StagedPool:
    """A pool with a staged runtime and endpoint."""

    def __init__(self, limit: int) -> None:
        self.stage = Stage()
        self.endpoint = StagedEndpoint(self.stage)
        self.delivered: list[Any] = []
        self.thread_pool = ThreadPool(self.stage, self.endpoint, self.deliver, limit=limit, name="pool")
        self.wait_for = self.stage.wait_for
        self.thread_pool.start()
        self.settle()

    def deliver(self, event: Any) -> Iterable[Task]:
        self.delivered.append(event)
        if isinstance(event, BaseException):
            raise event
        return event  # type: ignore[no-any-return]

    def settle(self) -> None:
        """Wait until nothing more happens unless the test makes it happen."""
        stage, endpoint = self.stage, self.endpoint
        self.wait_for(
            lambda: (
                not endpoint.events
                and not endpoint.wakes
                and all(deadline > stage.time for deadline in stage.deadlines.values())
                and len(stage.deadlines) + stage.held == stage.alive
            )
        )

    def submit(self, *jobs: Task) -> None:
        for job in jobs:
            self.thread_pool.submit(job)
        self.settle()

    def advance(self, seconds: float) -> None:
        self.stage.advance(seconds)
        self.settle()

    def fill(self) -> None:
        """Let so much time pass without a task's end that all threads that may join do."""
        self.advance(0.01)

    def end(self) -> None:
        with self.stage.changed:
            self.stage.over = True
            self.stage.changed.notify_all()
        assert self.thread_pool.close(timeout=ETERNITY) == []
        self.wait_for(lambda: self.stage.alive == 0)


@pytest.fixture
def pool_for() -> Iterator[Callable[[int], StagedPool]]:
    """Makes pools, each with a pool of the limit given; ends them."""
    made: list[StagedPool] = []

    def make(limit: int) -> StagedPool:
        made.append(StagedPool(limit))
        return made[-1]

    yield make
    for staged in made:
        staged.end()


def finish(staged: StagedPool, *jobs: Job) -> None:
    for job in jobs:
        while not job.done:
            job.go_on()
            staged.settle()


class TestLimit:
    def test_tasks_run(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(1)
        job = Job(staged)
        staged.submit(job)
        assert job.started
        finish(staged, job)
        assert job.done

    @pytest.mark.parametrize("limit", [1, 2, 5])
    def test_no_more_run_at_once_than_allowed(self, pool_for: Callable[[int], StagedPool], limit: int) -> None:
        staged = pool_for(limit)
        jobs = [Job(staged) for _ in range(limit + 3)]
        staged.submit(*jobs)
        staged.fill()
        assert [job.started for job in jobs] == [True] * limit + [False] * 3

    def test_a_place_that_is_free_is_taken_by_the_next_in_line(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(2)
        jobs = [Job(staged) for _ in range(5)]
        staged.submit(*jobs)
        staged.fill()
        for index in range(3):
            finish(staged, jobs[index])
            staged.fill()
            assert [job.started for job in jobs] == [True] * (index + 3) + [False] * (2 - index)
        finish(staged, *jobs[3:])
        assert all(job.done for job in jobs)

    def test_tasks_of_events_count_too(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(2)
        jobs = [Job(staged) for _ in range(4)]
        staged.endpoint.emit(jobs[:3])
        staged.settle()
        staged.submit(jobs[3])
        staged.fill()
        assert [job.started for job in jobs] == [True, True, False, False]
        finish(staged, jobs[1])
        staged.fill()
        assert [job.started for job in jobs] == [True, True, True, False]
        finish(staged, *jobs)

    def test_a_task_that_fails_frees_its_place(
        self, pool_for: Callable[[int], StagedPool], caplog: pytest.LogCaptureFixture
    ) -> None:
        staged = pool_for(1)

        def fail() -> None:
            raise SystemExit("a task must not end its thread")

        with caplog.at_level(logging.CRITICAL, "backhaul"):
            staged.submit(fail, fail, fail)
        job = Job(staged)
        staged.submit(job)
        assert job.started
        finish(staged, job)

    def test_a_task_is_run_whatever_fails_before_it(
        self, pool_for: Callable[[int], StagedPool], caplog: pytest.LogCaptureFixture
    ) -> None:
        staged = pool_for(1)

        def fail() -> None:
            raise OSError("no stream")

        staged.thread_pool.prepare = fail
        job = Job(staged)
        with caplog.at_level(logging.CRITICAL, "backhaul"):
            staged.submit(job)
            finish(staged, job)
        assert job.done


class TestCompany:
    def test_short_tasks_have_one_thread(self, pool_for: Callable[[int], StagedPool]) -> None:
        """As long as they end, nobody joins."""
        staged = pool_for(8)
        jobs = [Job(staged) for _ in range(6)]
        staged.submit(*jobs)
        for index, job in enumerate(jobs):
            assert [other.started for other in jobs] == [True] * (index + 1) + [False] * (5 - index)
            staged.advance(0.0005)
            finish(staged, job)

    def test_long_tasks_have_many(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(8)

        def work() -> None:
            start = time.thread_time()
            while time.thread_time() < start + 0.002:
                pass

        for _ in range(12):
            staged.submit(work)
        jobs = [Job(staged) for _ in range(8)]
        staged.submit(*jobs)
        assert all(job.started for job in jobs)
        finish(staged, *jobs)


class TestRow:
    """Tasks that wait are run by one thread that does nothing else in between."""

    def test_one_thread_runs_them_in_order_and_polls_once(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(8)
        ran: list[tuple[int, int]] = []
        polls = staged.endpoint.polls
        staged.endpoint.emit([functools.partial(lambda n: ran.append((n, threading.get_ident())), n) for n in range(9)])
        staged.wait_for(lambda: len(ran) == 9)
        staged.settle()
        assert [number for number, _ in ran] == list(range(9))
        assert len({thread for _, thread in ran}) == 1
        assert staged.endpoint.polls - polls <= 3  # its own, and those of the threads in its place

    def test_an_alarm_rings_during_a_row(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(8)
        rang: list[bool] = []
        staged.thread_pool.call_at(staged.stage.now() + 0.0004, lambda: rang.append(True))
        jobs = [Job(staged) for _ in range(3)]
        staged.submit(*jobs)
        finish(staged, jobs[0])
        staged.advance(0.0005)
        staged.wait_for(lambda: bool(rang))
        assert not jobs[1].done
        finish(staged, *jobs[1:])

    def test_a_task_that_waits_leaves_the_rest_to_others(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(1)
        first, blocker, last = Job(staged), Job(staged, blocks=True), Job(staged)
        staged.endpoint.emit([first, blocker, last])
        staged.settle()
        finish(staged, first)
        blocker.go_on()
        staged.settle()
        assert blocker.blocking
        assert last.started
        finish(staged, last, blocker)

    def test_a_task_that_waits_unnoticed_does_so_too(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(8)
        first, stuck, last = Job(staged), Job(staged), Job(staged)
        staged.endpoint.emit([first, stuck, last])
        staged.settle()
        finish(staged, first)
        staged.fill()
        assert stuck.started
        assert last.started
        finish(staged, last, stuck)


class TestParking:
    """Channels are parked only while tasks wait and go on."""

    @pytest.fixture
    def staged(self, pool_for: Callable[[int], StagedPool]) -> StagedPool:
        staged = pool_for(8)
        staged.endpoint.parked.add("a channel")
        return staged

    def test_they_go_on_when_the_row_is_over(self, staged: StagedPool) -> None:
        jobs = [Job(staged) for _ in range(2)]
        staged.endpoint.emit(jobs)
        staged.settle()
        assert staged.endpoint.parked
        finish(staged, *jobs)
        staged.wait_for(lambda: not staged.endpoint.parked)

    def test_they_go_on_when_a_task_waits(self, staged: StagedPool) -> None:
        jobs = [Job(staged, blocks=True), Job(staged)]
        staged.endpoint.emit(jobs)
        staged.settle()
        jobs[0].go_on()
        staged.wait_for(lambda: not staged.endpoint.parked)
        finish(staged, *jobs)

    def test_they_go_on_after_a_while_in_any_case(self, staged: StagedPool) -> None:
        jobs = [Job(staged) for _ in range(20)]
        staged.endpoint.emit(jobs)
        staged.settle()
        for _ in range(4):
            staged.advance(0.001)
        assert not staged.endpoint.parked
        finish(staged, *jobs)


class TestBlocking:
    def test_frees_a_place_and_takes_one_again(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(1)
        blocker, second, third = Job(staged, blocks=True), Job(staged), Job(staged)
        staged.submit(blocker, second, third)
        assert not second.started
        blocker.go_on()
        staged.settle()
        assert blocker.blocking
        assert second.started
        assert not third.started
        blocker.go_on()  # blocks no more: it runs beside the second, and the third must wait for both
        staged.settle()
        finish(staged, second)
        assert not third.started
        finish(staged, blocker)
        assert third.started
        finish(staged, third)

    def test_any_number_may_block(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(1)
        jobs = [Job(staged, blocks=True) for _ in range(10)]
        staged.submit(*jobs)
        for job in jobs:
            assert job.started
            job.go_on()
            staged.settle()
        assert all(job.blocking for job in jobs)
        assert staged.stage.listening >= 1
        finish(staged, *jobs)
        assert all(job.done for job in jobs)

    def test_twice_is_once(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(1)
        job = Job(staged, blocks=True)
        others = [Job(staged) for _ in range(2)]

        def nested() -> None:
            with staged.thread_pool.blocking():
                job()

        staged.submit(nested, *others)
        assert job.started
        assert [other.started for other in others] == [True, False]
        job.go_on()
        staged.settle()
        assert [other.started for other in others] == [True, False]
        job.go_on()
        staged.settle()
        finish(staged, job)
        assert [other.started for other in others] == [True, False]
        finish(staged, *others)

    def test_is_left_by_an_exception_too(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(1)

        def fail_while_blocking() -> None:
            with contextlib.suppress(ValueError), staged.thread_pool.blocking():
                raise ValueError

        jobs = [Job(staged), Job(staged)]
        staged.submit(fail_while_blocking)
        staged.submit(*jobs)
        assert [job.started for job in jobs] == [True, False]
        finish(staged, *jobs)

    def test_means_nothing_to_other_threads(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(1)
        jobs = [Job(staged), Job(staged)]
        with staged.thread_pool.blocking():
            assert not staged.thread_pool.inside
            staged.submit(*jobs)
            assert [job.started for job in jobs] == [True, False]
        finish(staged, *jobs)

    def test_inside_is_known_to_the_task(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(1)
        job = Job(staged, blocks=True)
        staged.submit(job)
        finish(staged, job)
        assert job.inside == [True, False, True, True]
        assert not staged.thread_pool.inside


class TestOverdue:
    def test_a_task_that_has_waited_long_runs_beyond_the_limit(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(1)
        first, second = Job(staged), Job(staged)
        staged.submit(first, second)
        assert not second.started
        staged.advance(1)
        assert second.started
        finish(staged, first, second)

    def test_not_while_others_end(self, pool_for: Callable[[int], StagedPool]) -> None:
        """A task may wait for long because there are many: that is no reason to run them all at once."""
        staged = pool_for(2)
        jobs = [Job(staged) for _ in range(9)]
        staged.submit(*jobs)
        staged.fill()
        for job in jobs[:6]:
            staged.advance(0.03)
            assert sum(job.started and not job.done for job in jobs) == 2
            finish(staged, job)
        staged.fill()
        finish(staged, *jobs)

    def test_all_that_are_overdue_run(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(1)
        jobs = [Job(staged) for _ in range(10)]
        staged.submit(*jobs)
        assert sum(job.started for job in jobs) == 1
        staged.advance(1)
        assert all(job.started for job in jobs)
        assert staged.stage.listening >= 1
        finish(staged, *jobs)


class TestListening:
    @pytest.mark.parametrize("limit", [1, 3])
    def test_one_thread_polls_however_many_run(self, pool_for: Callable[[int], StagedPool], limit: int) -> None:
        staged = pool_for(limit)
        jobs = [Job(staged, blocks=True) for _ in range(8)]
        for job in jobs:
            staged.submit(job)
            assert staged.stage.listening >= 1
        for job in jobs:
            job.go_on()
            staged.settle()
            assert staged.stage.listening >= 1
        seen = len(staged.delivered)
        staged.endpoint.emit([])
        staged.wait_for(lambda: len(staged.delivered) == seen + 1)
        finish(staged, *jobs)
        assert staged.stage.listening >= 1

    def test_events_are_delivered_once_and_in_order(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(1)
        ran: list[int] = []
        for number in range(50):
            staged.endpoint.emit([lambda number=number: ran.append(number)])
        staged.wait_for(lambda: not staged.endpoint.events)
        staged.settle()
        assert len(staged.delivered) == 50
        assert sorted(ran) == list(range(50))

    def test_the_tasks_of_one_event_run_side_by_side(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(4)
        early = [Job(staged) for _ in range(4)]
        staged.submit(*early)
        staged.fill()
        finish(staged, *early)
        assert staged.stage.listening > 1  # so that there are threads to be woken, and none has to be added
        jobs = [Job(staged) for _ in range(4)]
        staged.endpoint.emit(jobs)
        staged.settle()
        staged.fill()
        assert all(job.started for job in jobs)
        finish(staged, *jobs)

    def test_a_delivery_that_fails_is_not_the_end(
        self, pool_for: Callable[[int], StagedPool], caplog: pytest.LogCaptureFixture
    ) -> None:
        staged = pool_for(1)
        with caplog.at_level(logging.CRITICAL, "backhaul"):
            staged.endpoint.emit(ValueError("bad event"))
            staged.settle()
        job = Job(staged)
        staged.submit(job)
        assert job.started
        finish(staged, job)

    def test_idle_threads_end_but_not_all(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(20)
        jobs = [Job(staged) for _ in range(10)]
        staged.submit(*jobs)
        staged.fill()
        busy = staged.stage.alive
        assert busy > 10
        finish(staged, *jobs)
        for _ in range(busy):
            staged.advance(100)
        assert 1 <= staged.stage.alive < 5
        assert staged.stage.listening == staged.stage.alive
        job = Job(staged)
        staged.submit(job)
        assert job.started
        finish(staged, job)

    def test_goes_on_with_the_threads_it_has(
        self, pool_for: Callable[[int], StagedPool], caplog: pytest.LogCaptureFixture
    ) -> None:
        staged = pool_for(5)
        staged.stage.refuse_threads = True
        first, second = Job(staged), Job(staged)
        with caplog.at_level(logging.CRITICAL, "backhaul"):
            staged.thread_pool.submit(first)
            staged.thread_pool.submit(second)
            staged.wait_for(lambda: first.started)
        first.go_on()
        staged.wait_for(lambda: second.started)
        staged.stage.refuse_threads = False
        second.go_on()
        staged.wait_for(lambda: second.done)
        staged.settle()
        last = Job(staged)
        staged.submit(last)
        assert last.started
        assert staged.stage.listening >= 1
        finish(staged, last)


class TestAlarms:
    def test_ring_when_their_time_has_come(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(1)
        rung: list[str] = []
        start = staged.stage.now()
        staged.thread_pool.call_at(start + 20, lambda: rung.append("second"))
        staged.thread_pool.call_at(start + 10, lambda: rung.append("first"))
        staged.thread_pool.call_at(start + 30, lambda: rung.append("third"))
        staged.settle()
        assert rung == []
        staged.advance(9.5)
        assert rung == []
        staged.advance(1)
        assert rung == ["first"]
        staged.advance(100)
        assert len(rung) == 3
        assert rung == ["first", "second", "third"]

    def test_of_the_past_ring_at_once(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(1)
        rung: list[str] = []
        for when in (0.0, float("-inf"), staged.stage.now()):
            staged.thread_pool.call_at(when, lambda when=when: rung.append(when))
        staged.wait_for(lambda: len(rung) == 3)

    def test_of_the_same_moment_ring_in_turn(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(1)
        rung: list[int] = []
        when = staged.stage.now() + 1
        for number in range(20):
            staged.thread_pool.call_at(when, lambda number=number: rung.append(number))
        staged.advance(2)
        staged.wait_for(lambda: len(rung) == 20)
        assert rung == list(range(20))

    def test_ring_while_all_places_are_taken(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(1)
        job = Job(staged)
        staged.submit(job)
        rung: list[int] = []
        staged.thread_pool.call_at(staged.stage.now() + 1, lambda: rung.append(1))
        staged.advance(2)
        staged.wait_for(lambda: rung == [1])
        staged.settle()
        assert not job.done
        finish(staged, job)

    def test_ring_in_time_whoever_gets_busy(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(8)
        warm_up = [Job(staged) for _ in range(3)]
        staged.submit(*warm_up)
        finish(staged, *warm_up)
        rung: list[int] = []
        when = staged.stage.now() + 1
        staged.thread_pool.call_at(when, lambda: rung.append(1))
        jobs = []
        for _ in range(6):
            staged.settle()
            with staged.stage.changed:
                assert min(staged.stage.deadlines.values()) <= when, "nobody would wake up for the alarm"
            jobs.append(Job(staged))
            staged.submit(jobs[-1])
        staged.advance(1)
        staged.wait_for(lambda: rung == [1])
        finish(staged, *jobs)

    def test_ahead_wake_nobody_for_each_task(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(8)
        warm_up = [Job(staged) for _ in range(3)]
        staged.submit(*warm_up)
        finish(staged, *warm_up)
        staged.thread_pool.call_at(staged.stage.now() + 1, lambda: None)
        staged.settle()
        woken = []
        for _ in range(4):
            job = Job(staged)
            staged.endpoint.emit([job])
            staged.wait_for(lambda job=job: job.started)  # type: ignore[misc]
            staged.settle()
            finish(staged, job)
            woken.append(staged.endpoint.woken)
        assert len(set(woken)) == 1, "after the first, two threads know of the alarm"

    def test_that_fail_do_no_harm(
        self, pool_for: Callable[[int], StagedPool], caplog: pytest.LogCaptureFixture
    ) -> None:
        staged = pool_for(1)
        rung: list[int] = []

        def fail() -> None:
            raise ValueError("an alarm")

        with caplog.at_level(logging.CRITICAL, "backhaul"):
            staged.thread_pool.call_at(0, fail)
            staged.thread_pool.call_at(0, lambda: rung.append(1))
            staged.wait_for(lambda: rung == [1])

    def test_may_submit_and_set_more(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(1)
        job = Job(staged)
        staged.thread_pool.call_at(0, lambda: staged.thread_pool.call_at(0, lambda: staged.thread_pool.submit(job)))
        staged.wait_for(lambda: job.started)
        staged.settle()
        finish(staged, job)


class TestClose:
    def test_ends_all_threads(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(4)
        jobs = [Job(staged) for _ in range(6)]
        staged.submit(*jobs)
        finish(staged, *jobs)
        assert staged.thread_pool.close(ETERNITY) == []
        staged.wait_for(lambda: staged.stage.alive == 0)

    def test_lets_running_tasks_end_but_starts_no_more(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(1)
        running, waiting = Job(staged), Job(staged)
        rung: list[int] = []
        staged.submit(running, waiting)
        staged.thread_pool.call_at(staged.stage.now() + 1, lambda: rung.append(1))
        left: list[list[str]] = []
        closer = threading.Thread(target=lambda: left.append(staged.thread_pool.close(ETERNITY)))
        closer.start()
        try:
            staged.wait_for(lambda: staged.stage.alive == 1)  # all but the one that runs have ended
            staged.stage.advance(10)
            running.go_on()
        finally:
            staged.end()
            closer.join()
        assert left == [[]]
        assert running.done
        assert not waiting.started
        assert rung == []

    def test_names_the_threads_that_did_not_end(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(2)
        names: list[str] = []
        stuck = Job(staged)
        staged.submit(lambda: (names.append(threading.current_thread().name), stuck()))
        assert names[0] in staged.thread_pool.close(0)
        staged.end()
        assert stuck.done

    def test_may_be_called_by_a_task(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(3)
        results: list[list[str]] = []
        staged.thread_pool.submit(lambda: results.append(staged.thread_pool.close(ETERNITY)))
        staged.wait_for(lambda: staged.stage.alive == 0)
        assert results == [[]]

    def test_may_be_called_again_and_before_anything_ran(self, pool_for: Callable[[int], StagedPool]) -> None:
        staged = pool_for(1)
        assert staged.thread_pool.close(ETERNITY) == []
        assert staged.thread_pool.close(0) == []
        job = Job(staged)
        staged.thread_pool.submit(job)
        staged.thread_pool.call_at(0, job)
        assert not job.started


def test_over_a_real_transport() -> None:
    """Requests answered by nested requests, on one place each, with the clock and threads there really are."""
    near, far = InprocEndpoint(), InprocEndpoint()
    answers: list[bytes] = []
    finished = threading.Event()

    def serve(event: Event) -> Iterable[Task]:
        frames = getattr(event, "frames", [])
        if frames:
            event.channel.release()
        replies = [Frame(4, frame.number, bytes(frame.body) * 2) for frame in frames]
        return [functools.partial(event.channel.send, reply) for reply in replies]

    def collect(event: Event) -> Iterable[Task]:
        frames = getattr(event, "frames", [])
        answers.extend(bytes(frame.body) for frame in frames)
        if frames:
            event.channel.release()
        if len(answers) == 100:
            finished.set()
        return ()

    pools = [
        ThreadPool(Runtime(), far, serve, limit=1, name="far"),
        ThreadPool(Runtime(), near, collect, limit=1, name="near"),
    ]
    for thread_pool in pools:
        thread_pool.start()
    channel = near.connect(far.addresses[0], timeout=30)
    for number in range(100):
        channel.send(Frame(3, number, b"%d," % number))
    assert finished.wait(FAILSAFE)
    assert sorted(answers) == sorted(b"%d,%d," % (number, number) for number in range(100))
    for thread_pool in pools:
        assert thread_pool.close(FAILSAFE) == []
    for endpoint in (near, far):
        endpoint.close()
