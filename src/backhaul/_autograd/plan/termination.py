"""Backward passes as the driver sees them. Pure: no I/O, no threads, no torch.

``Ledger`` knows when a pass is over: when every gradient message that was produced has been consumed. ``Plan`` says
which sources of which groups take part, and which groups wait in a circle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


class Ledger:
    """Which gradient messages are under way. A message counts as consumed when the group it entered has run and its
    leaf gradients are added; the report that says so also names all that the group produced. So the two sets are equal
    exactly when nothing is under way: reports may come in any order, and repeatedly.

    Example:
        >>> ledger = Ledger()
        >>> ledger.report(consumed=[0], produced={7: 1})  # the roots have run, message 7 went to worker 1
        >>> ledger.over, ledger.outstanding
        (False, {7: 1})
        >>> ledger.report(consumed=[7], produced={})
        >>> ledger.over
        True
    """

    def __init__(self) -> None:
        self._produced: dict[int, int] = {0: -1}  # message -> worker that has to consume it; 0: the roots
        self._consumed: set[int] = set()

    def report(self, consumed: Iterable[int], produced: Mapping[int, int]) -> None:
        """A worker consumed these messages, and produced those on the way."""
        self._consumed.update(consumed)
        self._produced.update(produced)

    @property
    def over(self) -> bool:
        """Whether nothing is under way."""
        return len(self._produced) == len(self._consumed) and self._produced.keys() == self._consumed

    @property
    def outstanding(self) -> dict[int, int]:
        """Messages produced and not consumed, with the worker each is at."""
        return {m: worker for m, worker in self._produced.items() if m not in self._consumed}

    @property
    def workers(self) -> set[int]:
        """All workers that gradients went to."""
        return {worker for worker in self._produced.values() if worker >= 0}


@dataclass(frozen=True, slots=True)
class Summary:
    """One worker's graph in a pass: for each group, what each of its sources reaches.

    Attributes:
        groups: For each group: source -> the recv nodes it reaches.
        senders: For each of these recv nodes: the worker that sent its message.
        foreign: The sources that reach a recv node of another context.
    """

    groups: tuple[Mapping[int, frozenset[int]], ...]
    senders: Mapping[int, int]
    foreign: frozenset[int] = frozenset()


class Plan:
    """Collects summaries from worker to worker until all that the roots reach is known.

    Args:
        driver: The worker of the roots.
        goals: Where inputs were given: the driver's sources that reach them.

    Attributes:
        active: worker -> sources that take part.
        circular: worker -> those of them whose group waits in a circle.
        useful: Where inputs were given: the messages whose gradients lead to them.
    """

    def __init__(self, driver: int, goals: Iterable[int] | None = None) -> None:
        self.active: dict[int, set[int]] = {driver: {0}}
        self.circular: dict[int, set[int]] = {}
        self.useful: set[int] | None = None if goals is None else set(goals)
        self._summaries: dict[int, Summary] = {}

    def missing(self) -> set[int]:
        """Workers whose summary is needed next."""
        return self.active.keys() - self._summaries.keys()

    def add(self, worker: int, summary: Summary) -> None:
        """Take a worker's summary in. When none is missing, the plan is complete."""
        self._summaries[worker] = summary
        self._spread()
        if not self.missing():
            self._prune()
            self._find_circles()

    def _reached(self, worker: int) -> dict[int, frozenset[int]]:
        summary = self._summaries[worker]
        return {source: reach for group in summary.groups for source, reach in group.items()}

    def _spread(self) -> None:
        """Follow the reachable recv nodes as far as the summaries go."""
        reached = {worker: self._reached(worker) for worker in self._summaries}
        todo = [(worker, source) for worker in self._summaries for source in self.active.get(worker, ())]
        seen = set(todo)
        while todo:
            worker, source = todo.pop()
            for message in reached[worker].get(source, ()):
                sender = self._summaries[worker].senders[message]
                self.active.setdefault(sender, set()).add(message)
                if sender in reached and (sender, message) not in seen:
                    seen.add((sender, message))
                    todo.append((sender, message))

    def _prune(self) -> None:
        """Keep only what leads to the inputs: a message is useful if its source reaches one, or a useful message. One
        that reaches another context may lead there: it is kept, so that its gradient is refused where it arrives.
        """
        if self.useful is None:
            return
        self.useful.update(*(summary.foreign for summary in self._summaries.values()))
        causes: dict[int, list[int]] = {}
        for summary in self._summaries.values():
            for group in summary.groups:
                for source, reach in group.items():
                    for message in reach:
                        causes.setdefault(message, []).append(source)
        todo = list(self.useful)
        while todo:
            for source in causes.get(todo.pop(), ()):
                if source not in self.useful:
                    self.useful.add(source)
                    todo.append(source)
        for worker, sources in self.active.items():
            self.active[worker] = {source for source in sources if source in self.useful or source == 0}

    def _find_circles(self) -> None:
        """A group is circular when it lies on a cycle of the message graph in which every group of several sources
        is one node between all its active sources and all their recv nodes: then some source of it cannot come
        before the group has fired a recv node.
        """
        successors: dict[object, list[object]] = {}
        several: list[tuple[int, object, list[int]]] = []
        for worker, summary in self._summaries.items():
            for index, group in enumerate(summary.groups):
                sources = [source for source in group if source in self.active.get(worker, ())]
                recvs: set[int] = set().union(*(group[source] for source in sources))
                hub: object = ("group", worker, index)
                for source in sources:
                    # Message ids are unique in the cluster; only the roots' 0 is not a message.
                    successors[source] = [hub]
                successors[hub] = list(recvs)
                if len(sources) > 1:
                    several.append((worker, hub, sources))
        cyclic = on_cycles(successors)
        self.circular = {}
        for worker, hub, sources in several:
            if hub in cyclic:
                self.circular.setdefault(worker, set()).update(sources)


def on_cycles(successors: Mapping[object, Iterable[object]]) -> set[object]:
    """The nodes of a graph that lie on a cycle (Tarjan's strongly connected components, without recursion).

    >>> sorted(on_cycles({1: [2], 2: [3], 3: [2], 4: [1, 4]}))
    [2, 3, 4]
    """
    index: dict[object, int] = {}
    low: dict[object, int] = {}
    stack: list[object] = []
    on_stack: set[object] = set()
    found: set[object] = set()
    for start in successors:
        if start in index:
            continue
        work = [(start, iter(successors.get(start, ())))]
        index[start] = low[start] = len(index)
        stack.append(start)
        on_stack.add(start)
        while work:
            node, rest = work[-1]
            for following in rest:
                if following not in index:
                    index[following] = low[following] = len(index)
                    stack.append(following)
                    on_stack.add(following)
                    work.append((following, iter(successors.get(following, ()))))
                    break
                if following in on_stack:
                    low[node] = min(low[node], index[following])
            else:
                work.pop()
                if work:
                    above = work[-1][0]
                    low[above] = min(low[above], low[node])
                if low[node] == index[node]:
                    component = []
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        component.append(member)
                        if member == node:
                            break
                    if len(component) > 1 or node in successors.get(node, ()):
                        found.update(component)
    return found
