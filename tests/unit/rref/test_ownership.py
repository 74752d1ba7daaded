"""Ownership without workers: in whatever order messages arrive, a value lives exactly as long as somebody refers to it.
A small world of workers passes references around, loses channels and restarts. Every message waits until the test
draws it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul._rref.notices import NoticeInbox, NoticeOutbox
from backhaul._rref.ownership import ForkId, Identity, Owned, OwnerEntry, RRefId, Update, is_of, maker_of
from backhaul._types import first_number

OWNER, ASKER, WORKERS = 0, 1, (1, 2, 3)
OWN: Identity = (OWNER, "owner")


@dataclass(eq=False)
class UnderWay:
    """A message; ``kind`` is ``notice``, ``fork``, ``question``, ``asking``, ``use`` or ``loss``."""

    kind: str
    sender: Identity
    receiver: Identity
    arrive: Callable[[], None]
    cut: bool = False  # its channel is lost, but it may have arrived and be read later


@dataclass(eq=False)
class Loan:
    """A call of the owner with a fork that is lent. It keeps a reference of the owner until it is over."""

    fork: ForkId
    receiver: Identity
    kept: OwnerEntry[object]


class World:
    """The owner of one value, and workers that refer to it. Forks are held by a worker, or on their way to one."""

    def __init__(self) -> None:
        self.identities: dict[int, Identity] = {OWNER: OWN} | {worker: (worker, f"{worker}.0") for worker in WORKERS}
        self.restarts = itertools.count(1)
        self.owned: Owned[object] = Owned(object, OWN, self.is_present)
        self.known: dict[int, Identity] = dict(self.identities)  # the identities that the owner knows
        self.over: set[Identity] = set()  # identities that the owner knows to be over
        self.inboxes: dict[Identity, NoticeInbox] = {}
        self.outboxes = {identity: NoticeOutbox() for identity in self.identities.values()}
        self.ids = {identity: itertools.count(first_number(identity[1])) for identity in self.identities.values()}
        self.value = RRefId(self.new_id(self.identities[ASKER]))
        self.held: dict[ForkId, Identity] = {}
        self.refused: set[ForkId] = set()
        self.under_way: list[UnderWay] = []
        self.handles: list[OwnerEntry[object]] = []  # references of the owner itself
        self.loans: list[Loan] = []  # calls that have not failed and have no reply
        self.serving: list[Loan] = []  # calls that have arrived and are not answered, also if they have failed
        self.lent: dict[ForkId, Identity] = {}  # forks that a call has brought, and that were not announced
        self.created: OwnerEntry[object] | None = None
        self.certain = True  # no worker that had something to tell has died or was given up
        asker = self.identities[ASKER]
        fork = ForkId(self.new_id(asker))
        notice = self.outboxes[asker].add([("created", self.value, fork, asker)])
        self.held[fork] = asker
        self.creation = fork, notice
        self.ask_for_it()
        self.post("notice", asker, OWN, lambda: self.take(asker, *notice))

    def is_present(self, number: RRefId) -> bool:
        identity = self.known.get(maker_of(number))
        return identity is not None and is_of(number, identity)

    def new_id(self, identity: Identity) -> int:
        return identity[0] << 48 | next(self.ids[identity])

    def post(self, kind: str, sender: Identity, receiver: Identity, arrive: Callable[[], None]) -> None:
        self.under_way.append(UnderWay(kind, sender, receiver, arrive))

    def ask_for_it(self) -> None:
        """Ask for the value. There may be several attempts, and late ones."""
        asker, (fork, notice) = self.identities[ASKER], self.creation

        def arrive() -> None:
            entry = self.owned.hold(self.value)
            self.take(asker, *notice)
            if asker not in self.over and not self.inboxes[asker].has_received(notice[0]):
                entry.early_uses[fork] = asker
            if fork in entry.forks or fork in entry.early_uses:
                self.created = entry
            self.owned.release(entry)

        self.post("asking", asker, OWN, arrive)

    def take(self, sender: Identity, number: int, updates: list[Update]) -> None:
        if sender not in self.over:
            self.apply(sender, self.inboxes.setdefault(sender, NoticeInbox()).receive(number, updates))

    def apply(self, sender: Identity, updates: list[Update]) -> None:
        self.owned.apply(sender, updates)
        for what, _, _, holder in updates:
            if what == "forked" and holder in self.over:
                self.owned.lose(holder)
        self.ask_suspects()

    def ask_suspects(self) -> None:
        suspects, self.owned.suspects = self.owned.suspects, {}
        for holder, forks in suspects.items():

            def arrive(holder: Identity = holder, forks: tuple[ForkId, ...] = tuple(forks)) -> None:
                for fork in forks:
                    if self.lent.get(fork) == holder:
                        self.held[fork] = self.lent.pop(fork)
                    if self.held.get(fork) != holder:
                        self.refused.add(fork)
                        self.tell(holder, ("absent", self.value, fork, holder))

            self.post("question", OWN, holder, arrive)

    def tell(self, sender: Identity, update: Update) -> None:
        if sender == OWN:
            self.apply(OWN, [update])
            return
        notice = self.outboxes[sender].add([update])
        self.post("notice", sender, OWN, lambda: self.take(sender, *notice))

    def send(self, sender: Identity, receiver: Identity, *, unread: bool) -> None:
        """Send a message with a new fork. ``unread``: the receiver discards the message."""
        fork = ForkId(self.new_id(sender))
        self.tell(sender, ("forked", self.value, fork, receiver))

        def arrive() -> None:
            if fork in self.refused:
                return
            if unread:
                self.tell(receiver, ("released", self.value, fork, receiver))
            elif receiver == OWN:
                if self.value in self.owned.entries or self.owned.expects(self.value):
                    self.handles.append(self.owned.hold(self.value))
                self.apply(OWN, [("released", self.value, fork, OWN)])
            else:
                self.held[fork] = receiver

        self.post("fork", sender, receiver, arrive)

    def lend(self, receiver: Identity, *, unread: bool) -> None:
        """The owner calls a worker. ``unread``: the worker cannot read the request."""
        loan = Loan(ForkId(self.new_id(OWN)), receiver, self.owned.hold(self.value))
        self.loans.append(loan)

        def arrive() -> None:
            self.serving.append(loan)
            if not (unread or loan.fork in self.refused):
                self.lent[loan.fork] = receiver

        self.post("lend", OWN, receiver, arrive)

    def reply(self, loan: Loan) -> None:
        """A worker replies to a call. It announces a lent fork that it still has, in the same channel."""
        self.serving.remove(loan)
        notice: tuple[int, list[Update]] | None = None
        if loan.fork in self.lent:
            self.held[loan.fork] = self.lent.pop(loan.fork)
            told = notice = self.outboxes[loan.receiver].add([("forked", self.value, loan.fork, loan.receiver)])
            self.post("notice", loan.receiver, OWN, lambda: self.take(loan.receiver, *told))

        def arrive() -> None:
            if notice is not None:
                self.take(loan.receiver, *notice)
            self.end(loan)

        self.post("reply", loan.receiver, OWN, arrive)

    def fail(self, loan: Loan) -> None:
        """The owner does not know what the worker that it called has."""
        if loan in self.loans and loan.receiver not in self.over:
            self.owned.ask_for([(self.value, loan.fork)], loan.receiver)
            self.ask_suspects()
        self.end(loan)

    def end(self, loan: Loan) -> None:
        if loan in self.loans:
            self.loans.remove(loan)
            self.owned.release(loan.kept)

    def visit(self, fork: ForkId) -> None:
        """Call the owner with the reference itself."""
        holder = self.holder(fork)

        def arrive() -> None:
            if holder not in self.over and self.owned.use(self.value, fork, holder) is not None:
                self.handles.append(self.owned.hold(self.value))

        self.post("use", holder, OWN, arrive)

    def holder(self, fork: ForkId) -> Identity:
        return self.held[fork] if fork in self.held else self.lent[fork]

    def drop(self, fork: ForkId) -> None:
        if fork in self.lent:
            del self.lent[fork]
            return
        holder = self.held.pop(fork)
        self.tell(holder, ("released", self.value, fork, holder))

    def use(self, fork: ForkId) -> None:
        """Call the value. The call may arrive after the handle is deleted."""
        holder = self.holder(fork)

        def arrive() -> None:
            if holder not in self.over:
                self.owned.use(self.value, fork, holder)

        self.post("use", holder, OWN, arrive)

    def deliver(self, message: UnderWay) -> None:
        self.under_way.remove(message)
        if message.receiver in self.identities.values():
            message.arrive()

    def cut(self, one: Identity, other: Identity, arrives: Callable[[], bool]) -> None:
        """Lose the channel between two workers. Notices and questions are repeated until they arrive."""
        for sender, receiver in ((one, other), (other, one)):
            found = [message for message in self.under_way if (message.sender, message.receiver) == (sender, receiver)]
            for message in found:
                message.cut = message.kind == "fork"
                if message.kind in ("fork", "asking", "use", "lend", "reply") and not arrives():
                    self.under_way.remove(message)
            self.tell(sender, ("lost", RRefId(-1), ForkId(-1), receiver))
        for loan in self.loans:
            if OWN in (one, other) and loan.receiver in (one, other):
                self.post("failure", OWN, OWN, functools.partial(self.fail, loan))

    def restart(self, worker: int, arrives: Callable[[], bool]) -> None:
        """A worker dies, and another takes its place. The owner learns of it later."""
        old, new = self.identities[worker], (worker, f"{worker}.{next(self.restarts)}")
        self.identities[worker] = new
        self.outboxes[new], self.ids[new] = NoticeOutbox(), itertools.count(first_number(new[1]))
        self.held = {fork: holder for fork, holder in self.held.items() if holder != old}
        self.lent = {fork: holder for fork, holder in self.lent.items() if holder != old}
        for loan in self.loans:
            if loan.receiver == old:
                self.post("failure", OWN, OWN, functools.partial(self.fail, loan))
        self.serving = [loan for loan in self.serving if loan.receiver != old]
        for message in [message for message in self.under_way if message.sender == old]:
            message.cut = True
            if message.kind == "notice" or worker == ASKER:
                self.certain = False
            if not arrives():
                self.under_way.remove(message)

        def arrive() -> None:
            self.over.add(old)
            self.inboxes.pop(old, None)
            if self.known[worker] == old:
                self.known[worker] = self.identities[worker]
            self.owned.lose(old)
            self.ask_suspects()

        self.post("loss", OWN, OWN, arrive)

    def give_up(self, identity: Identity) -> None:
        """The owner cannot reach a worker that still runs."""
        self.certain = False
        self.owned.lose(identity, for_good=False)
        self.ask_suspects()

    def check(self) -> None:
        """Once the value was made, it stays the same as long as somebody refers to it."""
        there = self.identities.values()  # messages to an identity that is over do not arrive
        travelling = any(one.kind == "fork" and not one.cut and one.receiver in there for one in self.under_way)
        if self.created is not None and self.certain and (self.held or self.lent or self.handles or travelling):
            assert self.owned.entries.get(self.value) is self.created


@settings(max_examples=300)
@given(st.data())
def test_a_value_lives_as_long_as_it_is_referred_to(data: st.DataObject) -> None:
    world = World()

    def choose(items: Any) -> Any:
        return data.draw(st.sampled_from(list(items)))

    def toss() -> bool:
        return data.draw(st.booleans())

    for _ in range(data.draw(st.integers(0, 50))):
        acts = ["cut", "restart", "give up"]
        acts += ["deliver"] * 3 * bool(world.under_way) + ["repeat"] * bool(world.under_way)
        acts += ["pass", "drop", "use", "visit"] * bool(world.held or world.lent)
        acts += ["pass on", "lend", "let go"] * bool(world.handles)
        acts += ["reply"] * bool(world.serving) + ["give up a call"] * bool(world.loans)
        acts += ["ask again"] * (world.held.get(world.creation[0]) == world.identities[ASKER])
        act = choose(acts)
        if act == "deliver":
            world.deliver(choose(world.under_way))
        elif act == "repeat":
            again = choose(world.under_way)
            if again.kind == "notice":  # the sender repeats it, since it does not know whether it arrived
                again.arrive()
        elif act == "pass":
            holder = world.holder(choose([*world.held, *world.lent]))
            world.send(holder, choose(world.identities.values()), unread=toss())
        elif act == "drop":
            world.drop(choose([*world.held, *world.lent]))
        elif act == "use":
            world.use(choose([*world.held, *world.lent]))
        elif act == "visit":
            world.visit(choose([*world.held, *world.lent]))
        elif act == "lend":
            world.lend(choose([world.identities[worker] for worker in WORKERS]), unread=toss())
        elif act == "reply":
            world.reply(choose(world.serving))
        elif act == "give up a call":
            world.fail(choose(world.loans))
        elif act == "ask again":
            world.ask_for_it()
        elif act == "pass on":
            world.send(OWN, choose([world.identities[worker] for worker in WORKERS]), unread=toss())
        elif act == "let go":
            world.owned.release(world.handles.pop())
        elif act == "cut":
            one, other = data.draw(st.permutations(list(world.identities.values())))[:2]
            world.cut(one, other, toss)
        elif act == "restart":
            world.restart(choose(WORKERS), toss)
        else:
            world.give_up(world.known[choose(WORKERS)])  # it may be dead by now
        world.check()
    while world.held or world.lent or world.handles or world.under_way or world.loans or world.serving:
        if world.under_way:
            world.deliver(choose(world.under_way))
        elif world.serving:
            world.reply(choose(world.serving))
        elif world.loans:
            world.fail(world.loans[0])
        elif world.held or world.lent:
            world.drop(choose([*world.held, *world.lent]))
        else:
            world.owned.release(world.handles.pop())
        world.check()
    assert world.owned.entries == {}
    assert not world.owned.suspects


@given(st.permutations(range(8)), st.lists(st.integers(0, 7)))
def test_an_inbox_puts_things_in_order(order: list[int], repeated: list[int]) -> None:
    inbox, heard = NoticeInbox(), []
    messages: list[list[Any]] = [[number, -number] for number in range(8)]
    for number in [*order, *repeated]:
        heard += inbox.receive(number, messages[number])
    assert heard == [item for message in messages for item in message]


ALICE, BOB = (1, "alice"), (2, "bob")
VALUE = RRefId(1 << 48 | first_number("alice"))


def fork_of(identity: Identity, count: int = 1) -> ForkId:
    return ForkId(identity[0] << 48 | first_number(identity[1]) + count)


@pytest.mark.parametrize("first", ["forked", "used"])
def test_a_lost_worker_takes_its_references_with_it(first: str) -> None:
    owned: Owned[object] = Owned(object, OWN)
    mine, theirs = fork_of(ALICE), fork_of(BOB)
    if first == "forked":
        owned.apply(ALICE, [("created", VALUE, mine, ALICE), ("forked", VALUE, theirs, BOB)])
        assert owned.lose(ALICE) == []
    else:
        owned.use(VALUE, theirs, BOB)
    assert [entry.id for entry in owned.lose(BOB)] == [VALUE]
    assert owned.entries == {}


def test_what_a_lost_worker_never_said_is_not_waited_for() -> None:
    owned: Owned[object] = Owned(object, OWN)
    owned.apply(BOB, [("released", VALUE, fork_of(ALICE), BOB)])
    owned.lose(ALICE)
    assert not owned._released_early


def test_a_restarted_worker_is_another() -> None:
    owned: Owned[object] = Owned(object, OWN)
    again = (BOB[0], "bob again")
    owned.apply(ALICE, [("forked", VALUE, fork_of(ALICE, 1), BOB), ("forked", VALUE, fork_of(ALICE, 2), again)])
    owned.apply(
        ALICE, [("released", VALUE, fork_of(again), ALICE)]
    )  # a fork of the new incarnation, which the owner does not know yet
    assert owned.lose(BOB) == []
    assert list(owned.entries[VALUE].forks.values()) == [again]
    assert owned._released_early == {fork_of(again)}


def test_forks_on_a_channel_that_is_lost_are_asked_for() -> None:
    owned: Owned[object] = Owned(object, OWN)
    mine, passed = fork_of(ALICE), fork_of(ALICE, 2)
    owned.apply(
        ALICE, [("created", VALUE, mine, ALICE), ("forked", VALUE, passed, BOB), ("released", VALUE, mine, ALICE)]
    )
    owned.apply(ALICE, [("lost", RRefId(-1), ForkId(-1), BOB)])
    assert owned.suspects == {BOB: {passed: VALUE}}
    assert [entry.id for entry in owned.apply(BOB, [("absent", VALUE, passed, BOB)])] == [VALUE]
    assert owned.apply(BOB, [("absent", VALUE, passed, BOB)]) == []
    assert not owned._released_early


def test_what_was_given_up_is_not_there_when_its_holder_comes_back() -> None:
    owned: Owned[object] = Owned(object, OWN)
    mine = fork_of(ALICE)
    owned.apply(ALICE, [("created", VALUE, mine, ALICE)])
    owned.lose(ALICE, for_good=False)
    assert owned.use(VALUE, mine, ALICE) is None
    assert owned.apply(ALICE, [("released", VALUE, mine, ALICE)]) == []
    assert not owned.entries
    assert not owned._released_early
    assert not owned._given_up


def test_a_value_is_expected_until_it_was_asked_for() -> None:
    owned: Owned[object] = Owned(object, OWN)
    mine = fork_of(ALICE)
    assert owned.use(VALUE, fork_of(ALICE, 2), BOB) is owned.entries[VALUE]
    owned.apply(ALICE, [("created", VALUE, mine, ALICE)])
    owned.apply(ALICE, [("released", VALUE, mine, ALICE)])
    assert owned.use(VALUE, fork_of(ALICE, 2), BOB) is None
    assert owned.use(RRefId(VALUE + 8), fork_of(ALICE, 2), BOB) is not None


def test_a_lent_fork_of_a_call_that_has_failed_is_asked_for() -> None:
    owned: Owned[object] = Owned(object, OWN)
    value, lent = RRefId(first_number(OWN[1])), ForkId(first_number(OWN[1]) + 1)
    entry = owned.hold(value)
    owned.ask_for([(value, lent)], BOB)
    assert owned.suspects == {BOB: {lent: value}}
    assert owned.release(entry) == []
    assert owned.apply(BOB, [("absent", value, lent, BOB)]) == [entry]
