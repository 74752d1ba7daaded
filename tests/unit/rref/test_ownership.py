"""Ownership, without workers: whatever the order in which messages arrive, a value lives exactly as long as it is
referred to. A small world of workers passes references around; every message waits until the test draws it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul.rref.ownership import Entry, ForkId, Inbox, News, Owned, RRefId

OWNER, WORKERS = 0, (1, 2, 3)
VALUE = RRefId(1 << 48)


class World:
    """The owner of one value, and workers that refer to it. Forks are held by a worker, or on their way to one."""

    def __init__(self) -> None:
        self.owned: Owned[object] = Owned(object)
        self.inboxes = {worker: Inbox() for worker in WORKERS}
        self.told = {worker: itertools.count() for worker in WORKERS}
        self.ids = {worker: itertools.count(1) for worker in (OWNER, *WORKERS)}
        self.held: list[tuple[int, ForkId]] = []
        self.under_way: list[Callable[[], None]] = []
        self.travelling = 0  # forks in messages
        self.handles: list[Entry[object]] = []  # of the owner's own
        self.created: Entry[object] | None = None
        fork = self.new_fork(1)
        self.held.append((1, fork))
        self.under_way.append(lambda: self.create(fork))

    def new_fork(self, worker: int) -> ForkId:
        return ForkId(worker << 48 | next(self.ids[worker]))

    def create(self, fork: ForkId) -> None:
        entry = self.owned.hold(VALUE)
        self.owned.hear([("made", VALUE, fork, 1)])
        self.created = entry
        self.owned.let_go(entry)

    def tell(self, worker: int, news: News) -> None:
        if worker == OWNER:
            self.owned.hear([news])
            return
        number = next(self.told[worker])

        def arrive() -> None:
            self.owned.hear(self.inboxes[worker].take(number, [news]))

        self.under_way.append(arrive)

    def send(self, by: int, to: int, *, lost: bool) -> None:
        """A message with a new fork in it; ``lost``: it is never read, and the receiver notices."""
        fork = self.new_fork(by)
        self.tell(by, ("made", VALUE, fork, to))
        self.travelling += 1

        def arrive() -> None:
            self.travelling -= 1
            if lost:
                self.tell(to, ("gone", VALUE, fork, to))
            elif to == OWNER:
                self.handles.append(self.owned.hold(VALUE))
                self.owned.hear([("gone", VALUE, fork, OWNER)])
            else:
                self.held.append((to, fork))

        self.under_way.append(arrive)

    def drop(self, index: int) -> None:
        worker, fork = self.held.pop(index)
        self.tell(worker, ("gone", VALUE, fork, worker))

    def check(self) -> None:
        """Once it is there, the value is the same as long as somebody refers to it."""
        if self.created is not None and (self.held or self.handles or self.travelling):
            assert self.owned.entries.get(VALUE) is self.created


@settings(max_examples=500)
@given(st.data())
def test_a_value_lives_as_long_as_it_is_referred_to(data: st.DataObject) -> None:
    world = World()

    def choose(count: int) -> int:
        return data.draw(st.integers(0, count - 1))

    for _ in range(choose(40)):
        acts = ["deliver"] * bool(world.under_way) + ["repeat"] * bool(world.under_way)
        acts += ["pass", "drop", "use"] * bool(world.held) + ["pass on", "let go"] * bool(world.handles)
        if not acts:
            break
        act = data.draw(st.sampled_from(acts))
        if act == "deliver":
            world.under_way.pop(choose(len(world.under_way)))()
        elif act == "repeat":
            again = world.under_way[choose(len(world.under_way))]
            if again.__qualname__.startswith("World.tell"):  # the channel broke: was it heard?
                again()
        elif act == "pass":
            by, _ = world.held[choose(len(world.held))]
            world.send(by, data.draw(st.sampled_from((OWNER, *WORKERS))), lost=data.draw(st.booleans()))
        elif act == "drop":
            world.drop(choose(len(world.held)))
        elif act == "use":
            worker, fork = world.held[choose(len(world.held))]
            world.under_way.append(lambda worker=worker, fork=fork: use(world, worker, fork))
        elif act == "pass on":
            world.send(OWNER, data.draw(st.sampled_from(WORKERS)), lost=data.draw(st.booleans()))
        else:
            world.owned.let_go(world.handles.pop())
        world.check()
    while world.held or world.handles or world.under_way:
        if world.under_way:
            world.under_way.pop(choose(len(world.under_way)))()
        elif world.held:
            world.drop(choose(len(world.held)))
        else:
            world.owned.let_go(world.handles.pop())
        world.check()
    assert world.owned.entries == {}
    assert not world.owned._early


def use(world: World, worker: int, fork: ForkId) -> None:
    """A request on the value arrives; the handle lives until the reply, so the fork is still held."""
    if (worker, fork) in world.held:
        world.owned.join(VALUE, fork, worker)


@given(st.permutations(range(8)), st.lists(st.integers(0, 7)))
def test_an_inbox_puts_things_in_order(order: list[int], repeated: list[int]) -> None:
    inbox, heard = Inbox(), []
    messages: list[list[Any]] = [[number, -number] for number in range(8)]
    for number in [*order, *repeated]:
        heard += inbox.take(number, messages[number])
    assert heard == [item for message in messages for item in message]


@pytest.mark.parametrize("first", ["made", "joined"])
def test_a_lost_worker_takes_its_references_with_it(first: str) -> None:
    owned: Owned[object] = Owned(object)
    mine, theirs = ForkId(1 << 48), ForkId(2 << 48)
    if first == "made":
        owned.hear([("made", VALUE, mine, 1), ("made", VALUE, theirs, 2)])
    else:
        owned.join(VALUE, mine, 1)
        owned.join(VALUE, theirs, 2)
    assert owned.lose(1) == []
    assert [entry.id for entry in owned.lose(2)] == [VALUE]
    assert owned.entries == {}


def test_what_a_lost_worker_never_said_is_not_waited_for() -> None:
    owned: Owned[object] = Owned(object)
    owned.hear([("gone", VALUE, ForkId(1 << 48 | 5), 2)])
    owned.lose(1)
    assert not owned._early
