"""The scheduler of simulations: one task runs at a time, in an order drawn from a seed, in virtual time."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from backhaul._sim.runtime import SimOneShotEvent, SimRuntime
from backhaul._sim.scheduler import DeadlockError, Scheduler
from backhaul._sim.tasks import Killed


def several(scheduler: Scheduler, *targets: Callable[[], None]) -> None:
    """Run functions concurrently and wait for them."""
    threads = [
        scheduler.spawn(target, name=f"t{number}", process=scheduler.outside) for number, target in enumerate(targets)
    ]
    for thread in threads:
        scheduler.join(thread.task, None)


def interleaving(seed: int) -> tuple[list[int], str]:
    order: list[int] = []
    with Scheduler(seed) as scheduler:

        def work(number: int) -> Callable[[], None]:
            def run() -> None:
                for _ in range(5):
                    order.append(number)
                    scheduler.give_way(always=True)

            return run

        several(scheduler, *map(work, range(4)))
        return order, scheduler.trace.digest


def test_a_seed_gives_one_order() -> None:
    assert interleaving(1) == interleaving(1)


def test_seeds_give_different_orders() -> None:
    assert len({tuple(interleaving(seed)[0]) for seed in range(10)}) == 10


def test_one_task_runs_at_a_time() -> None:
    running, most = [0], [0]
    with Scheduler(1) as scheduler:

        def run() -> None:
            for _ in range(50):
                running[0] += 1
                most[0] = max(most[0], running[0])
                running[0] -= 1
                scheduler.give_way(always=True)

        several(scheduler, *[run] * 4)
    assert most == [1]


def test_time_jumps_where_nothing_can_run() -> None:
    begun = time.monotonic()
    with Scheduler(1) as scheduler:
        assert not scheduler.wait("nothing", 1e6)
        assert scheduler.now >= 1e6
    assert time.monotonic() - begun < 1e3


def test_timers_go_off_in_order() -> None:
    seen: list[str] = []
    with Scheduler(1) as scheduler:
        for seconds, name in ((3.0, "c"), (1.0, "a"), (2.0, "b")):
            scheduler.after(seconds, lambda name=name: seen.append(name))
        scheduler.wait("them", 2.5)
        assert seen == ["a", "b"]


def test_a_deadlock_says_who_waits_where() -> None:
    with Scheduler(1) as scheduler:
        gate = SimOneShotEvent(scheduler)
        scheduler.spawn(lambda: gate.wait() and None, name="somebody", process=scheduler.outside)
        with pytest.raises(DeadlockError, match="somebody waits for a one-shot event"):
            scheduler.wait("Godot")


def test_taking_too_long_is_noticed() -> None:
    with Scheduler(1) as scheduler:
        scheduler.limit = 10.0
        scheduler.after(20.0, lambda: None)
        with pytest.raises(TimeoutError, match="Godot"):
            scheduler.wait("Godot")


class TestGate:
    def test_lets_all_through_once_it_is_open(self) -> None:
        passed: list[bool] = []
        with Scheduler(1) as scheduler:
            gate = SimOneShotEvent(scheduler)
            several(scheduler, *[lambda: passed.append(gate.wait())] * 3, gate.open)
        assert passed == [True] * 3

    def test_gives_up_after_its_time(self) -> None:
        with Scheduler(1) as scheduler:
            assert not SimOneShotEvent(scheduler).wait(5.0)
            assert scheduler.now >= 5.0


class TestLock:
    def test_may_be_held_across_waits(self) -> None:
        inside, most = [0], [0]
        with Scheduler(1) as scheduler:
            lock = SimRuntime(scheduler, scheduler.outside).lock()

            def run() -> None:
                with lock:
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    scheduler.wait("a while", 1.0)
                    inside[0] -= 1

            several(scheduler, *[run] * 3)
            assert scheduler.now >= 3.0
        assert most == [1]

    def test_gives_up_after_its_time(self) -> None:
        with Scheduler(1) as scheduler:
            lock = SimRuntime(scheduler, scheduler.outside).lock()
            assert lock.acquire()
            assert not lock.acquire(timeout=2.0)
            assert not lock.acquire(blocking=False)
            lock.release()
            assert lock.acquire()


class TestQueue:
    def test_may_be_filled_by_destructors(self) -> None:
        class Dying:
            def __del__(self) -> None:
                queue.put("dead")

        with Scheduler(1) as scheduler:
            queue = SimRuntime(scheduler, scheduler.outside).queue()
            thing = Dying()
            found: list[str] = []
            reader = scheduler.spawn(lambda: found.append(queue.get()), name="reader", process=scheduler.outside)
            scheduler.wait("a while", 1.0)
            assert not found
            del thing
            scheduler.join(reader.task, None)
        assert found == ["dead"]


class TestHomes:
    def test_a_paused_home_stands_still(self) -> None:
        ticks: list[float] = []
        with Scheduler(1) as scheduler:
            process = scheduler.new_process("one")

            def tick() -> None:
                while True:
                    scheduler.wait("a tick", 1.0)
                    ticks.append(scheduler.now)

            scheduler.spawn(tick, name="ticker", process=process)
            scheduler.wait("a while", 3.5)
            scheduler.pause(process)
            scheduler.wait("a while", 10.0)
            assert len(ticks) == 3
            scheduler.resume(process)
            scheduler.wait("a while", 2.5)
            assert len(ticks) >= 5

    def test_a_killed_home_does_nothing_more(self) -> None:
        seen: list[str] = []
        with Scheduler(1) as scheduler:
            process = scheduler.new_process("one")

            def stubborn() -> None:
                while True:
                    try:
                        scheduler.wait("a while", 1.0)
                        seen.append("ran")
                    except BaseException:
                        seen.append("caught")
                        try:
                            scheduler.wait("more", 1.0)
                        finally:
                            seen.append("unwound")

            thread = scheduler.spawn(stubborn, name="stubborn", process=process)
            scheduler.wait("a while", 2.5)
            scheduler.kill(process)
            assert seen == ["ran", "ran", "caught", "unwound"]
            assert thread.task.done
            with pytest.raises(Killed):
                scheduler.spawn(stubborn, name="late", process=process)
            scheduler.wait("a while", 5.0)
        assert len(seen) == 4

    def test_a_task_that_has_not_run_never_does(self) -> None:
        seen: list[str] = []
        with Scheduler(1) as scheduler:
            process = scheduler.new_process("one")
            scheduler.spawn(lambda: seen.append("ran"), name="new", process=process)
            scheduler.kill(process)
        assert not seen


def test_nothing_is_left() -> None:
    class Thing: ...

    before = threading.active_count()
    thing = Thing()
    died = weakref.ref(thing)
    with Scheduler(1) as scheduler:

        def hold(thing: Thing = thing) -> None:
            scheduler.wait("for ever")

        scheduler.spawn(hold, name="holder", process=scheduler.outside)
        scheduler.wait("a while", 1.0)
        del hold, thing
    gc.collect()
    assert died() is None
    assert threading.active_count() == before
