"""A one-shot event opens once, for all waiters and for good. Threads of the runtime keep no process alive."""

from __future__ import annotations

import sys
import threading

import pytest

from backhaul._runtime.runtime import OneShotEvent, Runtime


class TestOneShotEvent:
    def test_is_not_open_at_first(self) -> None:
        assert OneShotEvent().wait(0) is False

    @pytest.mark.parametrize("timeout", [0, 0.0, -1.0, -1e300, 1e-9])
    def test_does_not_wait_longer_than_asked(self, timeout: float) -> None:
        assert OneShotEvent().wait(timeout) is False

    @pytest.mark.parametrize("timeout", [None, 0, -1.0, 5.0, 1e300, float("inf"), threading.TIMEOUT_MAX])
    def test_once_open_it_stays_open(self, timeout: float | None) -> None:
        event = OneShotEvent()
        event.open()
        assert [event.wait(timeout) for _ in range(3)] == [True, True, True]

    def test_may_be_opened_again(self) -> None:
        event = OneShotEvent()
        event.open()
        event.open()
        assert event.wait(0)
        event.open()
        assert event.wait(0)

    def test_a_wait_that_timed_out_changes_nothing(self) -> None:
        event = OneShotEvent()
        assert not event.wait(0)
        assert not event.wait(0)
        event.open()
        assert event.wait(0)

    @pytest.mark.parametrize("timeout", [None, 60.0, 1e300, float("inf")])
    def test_lets_all_waiters_through(self, timeout: float | None) -> None:
        event = OneShotEvent()
        passed: list[bool] = []
        about_to_wait = threading.Semaphore(0)

        def wait() -> None:
            about_to_wait.release()
            passed.append(event.wait(timeout))

        threads = [threading.Thread(target=wait) for _ in range(8)]
        for thread in threads:
            thread.start()
        for _ in threads:
            about_to_wait.acquire()
        assert passed == []
        event.open()
        for thread in threads:
            thread.join()
        assert passed == [True] * 8

    @pytest.mark.parametrize("turn", range(20))
    def test_many_openers_and_waiters(self, turn: int) -> None:
        event = OneShotEvent()
        passed: list[bool] = []
        threads = [threading.Thread(target=event.open) for _ in range(4)]
        threads[turn % 4 : turn % 4] = [
            threading.Thread(target=lambda: passed.append(event.wait(60))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert passed == [True] * 4

    def test_an_open_event_is_open_to_all_threads(self) -> None:
        """A thread whose wait ends must not close the event for other threads, not even for a moment."""
        event = OneShotEvent()
        event.open()
        refused: list[int] = []

        def check(number: int) -> None:
            refused.extend(number for _ in range(5000) if not event.wait(0))

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            threads = [threading.Thread(target=check, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        assert len(refused) == 0


class TestRuntime:
    def test_the_clock_never_goes_back(self) -> None:
        runtime = Runtime()
        times = [runtime.now() for _ in range(1000)]
        assert times == sorted(times)

    def test_events_are_not_open_and_independent(self) -> None:
        runtime = Runtime()
        first, second = runtime.one_shot(), runtime.one_shot()
        first.open()
        assert first.wait(0)
        assert not second.wait(0)

    def test_spawn_runs_on_a_named_thread_that_is_a_daemon(self) -> None:
        seen: list[threading.Thread] = []
        thread = Runtime().spawn(lambda: seen.append(threading.current_thread()), name="a name")
        thread.join()
        assert seen == [thread]
        assert thread.name == "a name"
        assert thread.daemon
        assert thread is not threading.current_thread()


class TestRuntimeObjects:
    def test_a_lock_can_be_waited_for_in_vain(self) -> None:
        lock = Runtime().lock()
        with lock:
            assert not lock.acquire(timeout=0.001)
        assert lock.acquire(blocking=False)

    def test_a_queue_keeps_order(self) -> None:
        queue = Runtime().queue()
        assert queue.empty()
        for item in (1, 2, None):
            queue.put(item)
        assert [queue.get() for _ in range(3)] == [1, 2, None]

    def test_join_says_whether_the_thread_has_ended(self) -> None:
        runtime, event = Runtime(), OneShotEvent()
        thread = runtime.spawn(lambda: event.wait() and None, name="a name")
        assert not runtime.join(thread, 0.001)
        event.open()
        assert runtime.join(thread)
