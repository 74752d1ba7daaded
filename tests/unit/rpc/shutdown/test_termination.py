"""No worker may exit while a call is under way, and in the end all workers may.

A model simulates all workers: messages between two of them keep their order and take any time, handlers make further
calls, and Hypothesis decides what happens next. ``TerminationDetector`` sees what a leader sees.
"""

from __future__ import annotations

import collections
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul._rpc.shutdown.termination import AllowExit, RequestTallies, TerminationDetector

LEADER = 0


class Participant:
    """What one worker does and counts. It is idle while it serves no call and waits for no reply."""

    def __init__(self) -> None:
        self.ready = False
        self.sent = 0
        self.served = 0
        self.pending: dict[int, int] = {}  # number of a call -> the worker that serves it
        self.serving: dict[int, int] = {}  # number of a call -> the worker that made it
        self.asked: list[int] = []  # waves to answer when idle
        self.left = False

    @property
    def idle(self) -> bool:
        return not self.pending and not self.serving


class World:
    """All workers and all messages under way. The messages that a lost worker has not delivered are lost with it."""

    def __init__(self, chance: random.Random, size: int, calls: int, losses: int, breaks: int = 0) -> None:
        self.chance = chance
        self.calls = calls  # calls that may still be made
        self.losses = losses  # losses of workers that may still happen
        self.breaks = breaks  # losses of channels that may still happen
        self.alive = {who: Participant() for who in range(size)}
        self.channels: dict[tuple[int, int], collections.deque[tuple[Any, ...]]] = collections.defaultdict(
            collections.deque
        )
        self.speeds = {ends: chance.choice([0.1, 1, 10]) for ends in itertools.product(range(size), repeat=2)}
        self.termination = TerminationDetector(range(size))
        self.numbers = itertools.count()

    # What may happen next, and how likely it is.

    def steps(self) -> dict[Callable[[], None], float]:
        steps: dict[Callable[[], None], float] = {}
        for who, worker in self.alive.items():
            if not worker.ready:
                steps[functools.partial(self.become_ready, who)] = 1
            if self.calls and (worker.serving or not worker.ready):
                steps[functools.partial(self.call, who)] = 1
            for number in worker.serving:
                steps[functools.partial(self.finish, who, number)] = 1
        for ends, waiting in self.channels.items():
            if waiting:
                steps[functools.partial(self.deliver, *ends)] = self.speeds[ends]
        if self.losses and len(self.alive) > 1 and not self.termination.over:
            steps[self.lose] = 0.1
        if self.breaks and len(self.alive) > 1:
            steps[self.break_a_channel] = 0.3
        return steps

    def run(self) -> None:
        while steps := self.steps():
            (step,) = self.chance.choices(list(steps), list(steps.values()))
            step()
            for who, worker in self.alive.items():
                if worker.idle:
                    for wave in worker.asked:
                        self.send(who, LEADER, "tally", wave, worker.sent, worker.served)
                    worker.asked.clear()

    def send(self, source: int, to: int, *message: Any) -> None:
        unaware = ("broken",) in self.channels[to, source]  # the channel is broken, and the sender does not know it
        if to in self.alive and not unaware:
            self.channels[source, to].append(message)

    def become_ready(self, who: int) -> None:
        self.alive[who].ready = True
        self.send(who, LEADER, "ready")

    def call(self, who: int) -> None:
        to, number = self.chance.choice(list(self.alive)), next(self.numbers)
        self.calls -= 1
        self.alive[who].sent += 1
        self.alive[who].pending[number] = to
        self.send(who, to, "request", number)

    def finish(self, who: int, number: int) -> None:
        caller = self.alive[who].serving.pop(number)
        self.alive[who].served += 1
        self.send(who, caller, "reply", number)

    def lose(self) -> None:
        self.losses -= 1
        lost = self.chance.choice([who for who in self.alive if who != LEADER])
        del self.alive[lost]
        for ends in list(self.channels):
            if lost in ends:
                del self.channels[ends]
        for other in self.alive:
            self.channels[lost, other].append(("lost",))

    def break_a_channel(self) -> None:
        self.breaks -= 1
        one, other = self.chance.sample(list(self.alive), 2)
        for ends in ((one, other), (other, one)):
            self.channels[ends].clear()
            self.channels[ends].append(("broken",))

    # What a worker does with a message.

    def deliver(self, source: int, to: int) -> None:
        kind, *content = self.channels[source, to].popleft()
        worker = self.alive[to]
        if kind == "request":
            worker.serving[content[0]] = source
        elif kind == "reply":
            worker.pending.pop(content[0], None)
        elif kind == "count":
            worker.asked.append(content[0])
        elif kind == "leave":
            worker.left = True
        elif kind == "ready":
            self.carry_out(self.termination.ready(source))
        elif kind == "tally":
            self.carry_out(self.termination.counted(source, *content))
        elif kind == "lost":
            worker.pending = {number: whom for number, whom in worker.pending.items() if whom != source}
            if to == LEADER:
                self.carry_out(self.termination.gone(source))
        elif kind == "broken":
            worker.pending = {number: whom for number, whom in worker.pending.items() if whom != source}
            if source == LEADER and worker.ready:
                self.send(to, LEADER, "ready")
            elif to == LEADER:
                self.carry_out(self.termination.again(source))

    def carry_out(self, order: RequestTallies | AllowExit | None) -> None:
        if isinstance(order, RequestTallies):
            assert all(worker.ready for worker in self.alive.values()), "asked before all were ready"
            for who in order.to:
                self.send(LEADER, who, "count", order.wave)
        elif isinstance(order, AllowExit):
            assert self.under_way() == []
            for who in order.to:
                self.send(LEADER, who, "leave")

    def under_way(self) -> list[str]:
        found = [f"{who} waits for {worker.pending}" for who, worker in self.alive.items() if worker.pending]
        found += [f"{who} serves {worker.serving}" for who, worker in self.alive.items() if worker.serving]
        for (source, to), waiting in self.channels.items():
            found += [f"{source} has called {to}" for message in waiting if message[0] == "request"]
        return found


worlds = st.builds(World, st.randoms(use_true_random=False), st.integers(1, 4), st.integers(0, 12), losses=st.just(0))
dangerous_worlds = st.builds(
    World, st.randoms(use_true_random=False), st.integers(2, 5), st.integers(0, 12), losses=st.integers(1, 2)
)


def assert_all_have_left(world: World) -> None:
    assert world.termination.over, f"waiting for {world.termination.waiting_for}"
    assert all(worker.left for worker in world.alive.values())


@given(worlds)
def test_workers_exit_when_nothing_is_under_way_and_not_before(world: World) -> None:
    world.run()
    assert_all_have_left(world)


@given(dangerous_worlds)
def test_lost_workers_are_not_waited_for(world: World) -> None:
    world.run()
    assert_all_have_left(world)


@pytest.mark.parametrize("start", range(0, 3000, 1000))
def test_many_random_worlds(start: int) -> None:
    for seed in range(start, start + 1000):
        chance = random.Random(seed)
        world = World(chance, chance.randint(2, 5), chance.randint(0, 25), losses=0)
        world.run()
        assert_all_have_left(world)


@pytest.mark.parametrize("start", range(0, 3000, 1000))
def test_many_random_worlds_with_lost_workers(start: int) -> None:
    for seed in range(start, start + 1000):
        chance = random.Random(seed)
        world = World(chance, chance.randint(2, 5), chance.randint(0, 25), losses=chance.randint(1, 3))
        world.run()
        assert_all_have_left(world)


@pytest.mark.parametrize("start", range(0, 3000, 1000))
def test_many_random_worlds_with_lost_channels(start: int) -> None:
    for seed in range(start, start + 1000):
        chance = random.Random(seed)
        losses, breaks = chance.randint(0, 1), chance.randint(1, 6)
        world = World(chance, chance.randint(2, 5), chance.randint(0, 25), losses, breaks)
        world.run()
        assert_all_have_left(world)


# Single steps.


def asked(termination: TerminationDetector, order: RequestTallies | AllowExit | None, wave: int) -> None:
    assert isinstance(order, RequestTallies)
    assert order.wave == wave
    assert order.to == termination.waiting_for
    assert not termination.over


def test_one_worker_alone() -> None:
    termination = TerminationDetector([5])
    asked(termination, termination.ready(5), 1)
    asked(termination, termination.counted(5, 1, 0, 0), 2)
    assert termination.counted(5, 2, 0, 0) == AllowExit(frozenset({5}))
    assert termination.over


def test_nobody_is_asked_before_all_are_ready() -> None:
    termination = TerminationDetector([0, 1, 2])
    assert termination.ready(1) is None
    assert termination.ready(1) is None
    assert termination.waiting_for == {0, 2}
    assert termination.ready(0) is None
    asked(termination, termination.ready(2), 1)


def test_a_change_between_two_tallies_requires_another() -> None:
    termination = TerminationDetector([0, 1])
    termination.ready(0)
    asked(termination, termination.ready(1), 1)
    assert termination.counted(0, 1, 3, 4) is None
    assert termination.waiting_for == {1}
    asked(termination, termination.counted(1, 1, 4, 3), 2)
    assert termination.counted(1, 2, 4, 4) is None
    asked(termination, termination.counted(0, 2, 3, 4), 3)
    assert termination.counted(0, 3, 3, 4) is None
    assert termination.counted(1, 3, 4, 4) == AllowExit(frozenset({0, 1}))


def test_a_call_from_one_to_the_other_and_back_is_a_change() -> None:
    """The sums over all workers could be the same."""
    termination = TerminationDetector([0, 1])
    termination.ready(0)
    termination.ready(1)
    termination.counted(0, 1, 1, 0)
    asked(termination, termination.counted(1, 1, 0, 1), 2)
    termination.counted(0, 2, 0, 1)
    asked(termination, termination.counted(1, 2, 1, 0), 3)


def test_answers_to_earlier_waves_and_of_unknown_workers_are_ignored() -> None:
    termination = TerminationDetector([0, 1])
    assert termination.counted(0, 0, 0, 0) is None
    termination.ready(0)
    termination.ready(1)
    termination.counted(0, 1, 0, 0)
    asked(termination, termination.counted(1, 1, 0, 0), 2)
    assert termination.counted(0, 1, 9, 9) is None
    assert termination.counted(7, 2, 0, 0) is None
    assert termination.counted(0, 3, 0, 0) is None
    assert termination.waiting_for == {0, 1}


def test_a_worker_that_never_got_ready_may_be_lost() -> None:
    termination = TerminationDetector([0, 1, 2])
    termination.ready(0)
    termination.ready(1)
    asked(termination, termination.gone(2), 1)
    assert termination.waiting_for == {0, 1}


def test_a_worker_that_owes_an_answer_may_be_lost() -> None:
    termination = TerminationDetector([0, 1])
    termination.ready(0)
    termination.ready(1)
    termination.counted(0, 1, 2, 2)
    order = termination.gone(1)
    assert isinstance(order, RequestTallies)
    assert order.to == {0}


def test_a_repeated_loss_and_unknown_workers_change_nothing() -> None:
    termination = TerminationDetector([0, 1, 2])
    assert termination.gone(9) is None
    assert termination.gone(2) is None
    assert termination.gone(2) is None
    termination.ready(0)
    asked(termination, termination.ready(1), 1)
    assert termination.ready(2) is None
    assert termination.counted(2, 1, 0, 0) is None


def test_tallies_of_lost_workers_do_not_matter() -> None:
    termination = TerminationDetector([0, 1])
    termination.ready(0)
    termination.ready(1)
    termination.counted(1, 1, 100, 0)
    termination.counted(0, 1, 0, 1)
    order = termination.gone(1)
    if order is None:
        order = termination.counted(0, 2, 0, 1)
    waves = 0
    while isinstance(order, RequestTallies):
        waves += 1
        order = termination.counted(0, order.wave, 0, 1)
    assert order == AllowExit(frozenset({0}))
    assert waves <= 2


def test_all_may_be_lost() -> None:
    termination = TerminationDetector([0, 1])
    assert termination.gone(0) is None
    assert termination.gone(1) == AllowExit(frozenset())
    assert termination.over


def test_what_is_over_stays_over() -> None:
    termination = TerminationDetector([0, 1])
    termination.ready(0)
    termination.ready(1)
    for wave in (1, 2):
        termination.counted(0, wave, 0, 0)
        order = termination.counted(1, wave, 0, 0)
    assert isinstance(order, AllowExit)
    assert termination.counted(0, 2, 1, 1) is None
    assert termination.gone(1) is None
    assert termination.ready(1) is None
    assert termination.ready(0) == AllowExit(frozenset({0}))  # it has not received the first AllowExit
    assert termination.over


def test_a_worker_lost_with_a_call_under_way_does_not_hide_it() -> None:
    """Worker 1 called worker 2, which called worker 0 and was lost before its tally. Worker 0 gave its tally before
    that call reached it.
    """
    termination = TerminationDetector([0, 1, 2])
    for who in range(3):
        termination.ready(who)
    termination.counted(0, 1, 0, 0)
    termination.counted(2, 1, 0, 0)
    asked(termination, termination.counted(1, 1, 1, 0), 2)
    assert termination.counted(0, 2, 0, 0) is None
    assert termination.counted(1, 2, 1, 0) is None
    assert isinstance(termination.gone(2), RequestTallies)  # worker 0 is asked again: it may serve the call of worker 2


def test_a_worker_that_joins_during_a_wave() -> None:
    """All are asked once more. Once, the leader waited for the answer to a question that it had not asked."""
    termination = TerminationDetector([0, 1])
    termination.ready(0)
    asked(termination, termination.ready(1), 1)
    termination.joined(2)
    assert termination.ready(2) is None  # the answers to the first question come first
    assert termination.counted(0, 1, 0, 0) is None
    for wave in (2, 3):
        order = termination.counted(1, wave - 1, 0, 0)
        assert order == RequestTallies(wave, frozenset({0, 1, 2}))
        assert termination.counted(0, wave, 0, 0) is None
        assert termination.counted(2, wave, 0, 0) is None
    assert isinstance(termination.counted(1, 3, 0, 0), AllowExit)


def test_a_worker_that_came_back_need_not_say_ready_again() -> None:
    """Seeds 119 and 179: its channel was opened again after it had said READY."""
    termination = TerminationDetector([0, 1])
    termination.ready(1)
    termination.joined(1)
    assert termination.ready(0) == RequestTallies(1, frozenset({0, 1}))


def test_a_request_lost_with_a_channel_is_repeated() -> None:
    termination = TerminationDetector([0, 1])
    assert termination.again(1) is None
    termination.ready(0)
    termination.ready(1)
    assert termination.again(1) == termination.ready(1) == RequestTallies(1, frozenset({1}))
    termination.counted(1, 1, 0, 0)
    assert termination.again(1) is None
    termination.counted(0, 1, 0, 0)
    termination.counted(0, 2, 0, 0)
    assert termination.counted(1, 2, 0, 0) == AllowExit(frozenset({0, 1}))
    assert termination.again(1) == termination.ready(1) == AllowExit(frozenset({1}))
    assert termination.again(7) is None
