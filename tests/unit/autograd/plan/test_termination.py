"""The driver's view of a pass: when it is over, what takes part, and who waits in a circle. Against brute force."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul._autograd.ids import ContextId
from backhaul._autograd.messages import PassSpec, PassTally, Report, in_parts
from backhaul._autograd.plan.plan import Plan, Summary, on_cycles
from backhaul._autograd.plan.termination import Ledger

# The ledger.


@dataclass
class Ran:
    """A group that has run somewhere: what its report says."""

    consumed: set[int] = field(default_factory=set)
    produced: dict[int, int] = field(default_factory=dict)


@st.composite
def passes(draw: st.DrawFn) -> list[Ran]:
    """All groups of a pass: the first consumes the roots, and every message is consumed by a later group."""
    groups = [Ran() for _ in range(draw(st.integers(1, 8)))]
    groups[0].consumed.add(0)
    messages = itertools.count(1)
    for number, group in enumerate(groups[1:], 1):  # each is there because some earlier one sent it something
        for _ in range(draw(st.integers(1, 3))):
            message, worker = next(messages), draw(st.integers(0, 3))
            groups[draw(st.integers(0, number - 1))].produced[message] = worker
            group.consumed.add(message)
    return groups


@given(st.data(), passes())
def test_a_pass_is_over_when_the_last_report_is_there(data: st.DataObject, groups: list[Ran]) -> None:
    """In whatever order they come, some of them repeatedly: never earlier, and never not."""
    reports = data.draw(st.permutations(range(len(groups))))
    repeats = data.draw(st.lists(st.tuples(st.integers(0, 99), st.sampled_from(range(len(groups)))), max_size=6))
    for place, number in repeats:
        reports.insert(place % (len(reports) + 1), number)
    ledger, told = Ledger(), set()
    assert not ledger.over
    assert list(ledger.outstanding) == [0]
    for number in reports:
        ledger.report(groups[number].consumed, groups[number].produced)
        told.add(number)
        assert ledger.over == (len(told) == len(groups))
        produced = {0: -1} | {m: w for n in told for m, w in groups[n].produced.items()}
        consumed = set().union(*(groups[n].consumed for n in told))
        assert ledger.outstanding == {m: w for m, w in produced.items() if m not in consumed}
        assert ledger.workers == {w for w in produced.values() if w >= 0}
    assert not ledger.outstanding


@given(st.data(), passes())
def test_one_report_may_speak_for_many_groups(data: st.DataObject, groups: list[Ran]) -> None:
    ledger, left = Ledger(), data.draw(st.permutations(groups))
    while left:
        count = data.draw(st.integers(1, len(left)))
        together, left = left[:count], left[count:]
        consumed = [message for group in together for message in group.consumed]
        ledger.report(consumed, {m: w for group in together for m, w in group.produced.items()})
        assert ledger.over == (not left)


@given(st.data(), passes(), st.integers(1, 4))
def test_a_report_may_come_in_parts(data: st.DataObject, groups: list[Ran], most: int) -> None:
    """Those of different workers come in any order; those of one as it has sent them."""
    spec, ledger, left = PassSpec(ContextId(1), 0, 1), Ledger(), []
    for group in groups:
        whole = Report(spec, PassTally(tuple(group.consumed), group.produced), lost=5)
        parts = list(in_parts(whole, most))
        assert all(len(part.tally.consumed) + len(part.tally.produced) <= most for part in parts)
        assert [part.lost for part in parts] == [-1] * (len(parts) - 1) + [5]
        left.append(parts)
    while left:
        parts = data.draw(st.sampled_from(left))
        tally = parts.pop(0).tally
        ledger.report(tally.consumed, tally.produced)
        left = [parts for parts in left if any(part.tally != PassTally() for part in parts)]
        assert ledger.over == (not left)


def test_a_message_that_is_consumed_before_it_is_known_to_be_produced() -> None:
    """The report of who got it may overtake that of who sent it."""
    ledger = Ledger()
    ledger.report([5], {6: 2})
    assert not ledger.over
    assert ledger.outstanding == {0: -1, 6: 2}
    ledger.report([6], {})
    assert not ledger.over
    ledger.report([0], {5: 1})
    assert ledger.over


# Plans. A world of messages: who sent each and who got it, and what each source reaches.


@dataclass
class Network:
    """What the workers know together; worker 0 drives."""

    senders: dict[int, int]
    receivers: dict[int, int]
    reach: dict[tuple[int, int], frozenset[int]]  # (worker, source) -> recv nodes
    groups: dict[int, list[list[int]]]  # worker -> groups of sources

    def summary(self, worker: int, goals: Collection[int] = (), shown: Collection[int] | None = None) -> Summary:
        """``goals``: the sources of the driver that reach inputs. ``shown``: the summary covers only these sources."""
        kept = [[s for s in group if shown is None or s in shown] for group in self.groups[worker]]
        groups = tuple({s: self.reach[worker, s] for s in group} for group in kept if group)
        here = {m: self.senders[m] for m, receiver in self.receivers.items() if receiver == worker}
        return Summary(groups, here, goals=frozenset(goals) if worker == 0 else frozenset())

    def active(self) -> set[tuple[int, int]]:
        """The sources that gradients of the roots come to, one by one."""
        found: set[tuple[int, int]] = set()
        todo = [(0, 0)]
        while todo:
            at = todo.pop()
            if at not in found:
                found.add(at)
                todo.extend((self.senders[message], message) for message in self.reach[at])
        return found

    def edges(self) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """From every source to the sources at the other ends of the messages it reaches."""
        for at, messages in self.reach.items():
            for message in messages:
                yield at, (self.senders[message], message)


@st.composite
def networks(draw: st.DrawFn, *, in_time: bool) -> Network:
    """``in_time``: a source reaches only what was received before it was sent, as in every real program."""
    workers = draw(st.integers(1, 4))
    count = draw(st.integers(0, 10))
    anyone = st.integers(0, workers - 1)
    senders = {message: draw(anyone) for message in range(1, count + 1)}
    receivers = {message: draw(anyone) for message in senders}
    reach: dict[tuple[int, int], frozenset[int]] = {}
    groups: dict[int, list[list[int]]] = {}
    for worker in range(workers):
        sources = [message for message, sender in senders.items() if sender == worker]
        sources = [0, *sources] if worker == 0 else sources
        joined = networkx.Graph()
        joined.add_nodes_from(sources)
        for source in sources:
            here = [m for m, r in receivers.items() if r == worker and (not in_time or source == 0 or m < source)]
            reach[worker, source] = frozenset(draw(st.lists(st.sampled_from(here), max_size=3)) if here else ())
            if draw(st.booleans()):  # they share a node that leads nowhere
                joined.add_edge(source, draw(st.sampled_from(sources)))
        for one, other in itertools.combinations(sources, 2):
            if reach[worker, one] & reach[worker, other]:
                joined.add_edge(one, other)
        groups[worker] = [sorted(group) for group in networkx.connected_components(joined)]
    return Network(senders, receivers, reach, groups)


def make_plan(network: Network, order: random.Random, goals: set[int] | None = None, *, in_parts: bool = False) -> Plan:
    """Ask the workers, as the driver does, in any order. ``in_parts``: they show what they are asked for, and perhaps
    some sources besides, as they do outside contexts.
    """
    plan = Plan(0, restricted=goals is not None)
    asked: dict[int, set[int]] = {}
    while missing := plan.missing():
        assert not any(asked.get(worker, set()) >= sources for worker, sources in missing.items())
        for worker in order.sample(sorted(missing), len(missing)):
            sources = asked[worker] = missing[worker]
            shown = None
            if in_parts:
                shown = sources | {s for group in network.groups[worker] for s in group if order.random() < 0.3}
            plan.add(worker, sources, network.summary(worker, goals or (), shown))
    return plan


def pairs(table: Mapping[int, set[int]]) -> set[tuple[int, int]]:
    return {(worker, source) for worker, sources in table.items() for source in sources}


@given(networks(in_time=False), st.randoms(use_true_random=False), st.booleans())
def test_active_is_what_gradients_come_to(network: Network, order: random.Random, in_parts: bool) -> None:
    plan = make_plan(network, order, in_parts=in_parts)
    assert pairs(plan.active) == network.active()
    assert plan.useful is None


@given(networks(in_time=False), st.randoms(use_true_random=False))
def test_only_workers_that_take_part_are_asked(network: Network, order: random.Random) -> None:
    plan, asked = Plan(0), set()
    while missing := plan.missing():
        worker = order.choice(sorted(missing))
        asked.add(worker)
        plan.add(worker, missing[worker], network.summary(worker))
    assert asked == {worker for worker, _ in network.active()}


@given(networks(in_time=False), st.randoms(use_true_random=False), st.booleans())
def test_circular_is_what_lies_on_a_cycle_of_waits(network: Network, order: random.Random, in_parts: bool) -> None:
    """Every group is one node: a gradient waits for all of it, and all it fires waits for all its gradients."""
    plan, active = make_plan(network, order, in_parts=in_parts), network.active()
    waits = networkx.DiGraph()
    several: dict[tuple[int, int], list[int]] = {}
    for worker, groups in network.groups.items():
        for number, group in enumerate(groups):
            here = [source for source in group if (worker, source) in active]
            for source in here:
                waits.add_edge((worker, source), ("group", worker, number))
                for message in network.reach[worker, source]:
                    waits.add_edge(("group", worker, number), (network.senders[message], message))
            if len(here) > 1:
                several[worker, number] = here
    expected = set()
    for component in networkx.strongly_connected_components(waits):
        if len(component) > 1:
            for (worker, number), here in several.items():
                if ("group", worker, number) in component:
                    expected |= {(worker, source) for source in here}
    assert pairs(plan.circular) == expected


@given(networks(in_time=True), st.randoms(use_true_random=False), st.booleans())
@settings(max_examples=300)
def test_with_the_plan_nothing_waits_for_ever(network: Network, order: random.Random, in_parts: bool) -> None:
    """Play the pass: groups wait for all their active sources, circular ones fire what is complete. All arrives."""
    plan, active = make_plan(network, order, in_parts=in_parts), network.active()
    arrived, fired, ran, todo = set(), set(), set(), [(0, 0)]
    while todo:
        worker, source = todo.pop(order.randrange(len(todo)))
        arrived.add((worker, source))
        (number,) = (n for n, group in enumerate(network.groups[worker]) if source in group)
        here = [s for s in network.groups[worker][number] if s in plan.active[worker]]
        complete = all((worker, s) in arrived for s in here)
        circular = any(s in plan.circular.get(worker, ()) for s in here)
        if not circular and not complete:
            continue
        for message in set().union(*(network.reach[worker, s] for s in here)):
            if all((worker, s) in arrived for s in here if message in network.reach[worker, s]):
                if message not in fired:
                    fired.add(message)
                    todo.append((network.senders[message], message))
            else:
                assert circular
        if complete:
            assert (worker, number) not in ran
            ran.add((worker, number))
    assert arrived == active
    assert fired == {source for _, source in active} - {0}


@given(networks(in_time=True), st.data())
def test_useful_is_what_leads_to_the_inputs(network: Network, data: st.DataObject) -> None:
    order = random.Random(data.draw(st.integers(0, 999)))
    own = [source for worker, source in network.reach if worker == 0]
    goals = set(data.draw(st.lists(st.sampled_from(own))))
    plan = make_plan(network, order, goals, in_parts=data.draw(st.booleans()))
    active = network.active()
    graph = networkx.DiGraph(list(network.edges()))
    graph.add_nodes_from(network.reach)
    leads = {at for goal in goals for at in networkx.ancestors(graph, (0, goal)) | {(0, goal)}}
    assert pairs(plan.active) == (leads & active) | {(0, 0)}
    assert plan.useful is not None
    assert {source for _, source in leads & active} == plan.useful & {source for _, source in active}


def test_each_group_alone_would_not_be_enough() -> None:
    """Two groups on two workers, each of which waits for the other; neither reaches itself by true edges alone."""
    # Worker 1 has sources 1 and 2 in one group, worker 2 has 3 and 4. 1 -> 3, 4 -> 2; 2 and 3 lead nowhere.
    network = Network(
        senders={1: 1, 2: 1, 3: 2, 4: 2},
        receivers={1: 0, 4: 0, 3: 1, 2: 2},
        reach={
            (0, 0): frozenset({1, 4}),
            (1, 1): frozenset({3}),
            (1, 2): frozenset(),
            (2, 3): frozenset(),
            (2, 4): frozenset({2}),
        },
        groups={0: [[0]], 1: [[1, 2]], 2: [[3, 4]]},
    )
    plan = make_plan(network, random.Random(0))
    assert pairs(plan.circular) == {(1, 1), (1, 2), (2, 3), (2, 4)}


def test_a_chain_has_no_circles() -> None:
    reach = {(0, 0): frozenset({9})} | {(1, n): frozenset({n - 1}) for n in range(2, 10)} | {(1, 1): frozenset()}
    network = Network(
        senders=dict.fromkeys(range(1, 10), 1),
        receivers={**dict.fromkeys(range(1, 9), 1), 9: 0},
        reach=reach,
        groups={0: [[0]], 1: [[n] for n in range(1, 10)]},
    )
    plan = make_plan(network, random.Random(0))
    assert plan.active == {0: {0}, 1: set(range(1, 10))}
    assert plan.circular == {}


# Cycles.


@given(
    st.dictionaries(st.integers(0, 12), st.lists(st.integers(0, 14), max_size=4), max_size=13),
)
@settings(max_examples=300)
def test_nodes_on_cycles(successors: dict[int, list[int]]) -> None:
    graph = networkx.DiGraph(successors)
    expected = set()
    for component in networkx.strongly_connected_components(graph):
        if len(component) > 1 or any(graph.has_edge(node, node) for node in component):
            expected |= component
    assert on_cycles(successors) == expected


@pytest.mark.parametrize("closed", [True, False])
def test_cycles_longer_than_the_stack(closed: bool) -> None:
    successors: dict[object, list[object]] = {number: [number + 1] for number in range(50_000)}
    successors[50_000] = [0] if closed else []
    assert len(on_cycles(successors)) == (50_001 if closed else 0)
