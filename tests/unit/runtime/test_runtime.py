"""A gate opens once, for everyone and for good; threads of the runtime keep no process alive."""

from __future__ import annotations

import sys
import threading

import pytest

from backhaul._runtime.runtime import OneShotEvent, Runtime


class TestGate:
    def test_is_shut_at_first(self) -> None:
        assert OneShotEvent().wait(0) is False

    @pytest.mark.parametrize("timeout", [0, 0.0, -1.0, -1e300, 1e-9])
    def test_does_not_wait_longer_than_asked(self, timeout: float) -> None:
        assert OneShotEvent().wait(timeout) is False

    @pytest.mark.parametrize("timeout", [None, 0, -1.0, 5.0, 1e300, float("inf"), threading.TIMEOUT_MAX])
    def test_once_open_it_stays_open(self, timeout: float | None) -> None:
        gate = OneShotEvent()
        gate.open()
        assert [gate.wait(timeout) for _ in range(3)] == [True, True, True]

    def test_may_be_opened_again(self) -> None:
        gate = OneShotEvent()
        gate.open()
        gate.open()
        assert gate.wait(0)
        gate.open()
        assert gate.wait(0)

    def test_a_wait_that_timed_out_changes_nothing(self) -> None:
        gate = OneShotEvent()
        assert not gate.wait(0)
        assert not gate.wait(0)
        gate.open()
        assert gate.wait(0)

    @pytest.mark.parametrize("timeout", [None, 60.0, 1e300, float("inf")])
    def test_lets_all_waiters_through(self, timeout: float | None) -> None:
        gate = OneShotEvent()
        passed: list[bool] = []
        about_to_wait = threading.Semaphore(0)

        def wait() -> None:
            about_to_wait.release()
            passed.append(gate.wait(timeout))

        threads = [threading.Thread(target=wait) for _ in range(8)]
        for thread in threads:
            thread.start()
        for _ in threads:
            about_to_wait.acquire()
        assert passed == []
        gate.open()
        for thread in threads:
            thread.join()
        assert passed == [True] * 8

    @pytest.mark.parametrize("turn", range(20))
    def test_many_openers_and_waiters(self, turn: int) -> None:
        gate = OneShotEvent()
        passed: list[bool] = []
        threads = [threading.Thread(target=gate.open) for _ in range(4)]
        threads[turn % 4 : turn % 4] = [threading.Thread(target=lambda: passed.append(gate.wait(60))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert passed == [True] * 4

    def test_an_open_gate_is_open_to_all_at_the_same_time(self) -> None:
        """Those who pass must not shut it for each other, not even for a moment."""
        gate = OneShotEvent()
        gate.open()
        refused: list[int] = []

        def look(number: int) -> None:
            refused.extend(number for _ in range(5000) if not gate.wait(0))

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            threads = [threading.Thread(target=look, args=(number,)) for number in range(4)]
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

    def test_gates_are_shut_and_their_own(self) -> None:
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
        runtime, gate = Runtime(), OneShotEvent()
        thread = runtime.spawn(lambda: gate.wait() and None, name="a name")
        assert not runtime.join(thread, 0.001)
        gate.open()
        assert runtime.join(thread)
