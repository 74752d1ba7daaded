"""The plan of a pass: which sources take part, which groups wait in a circle. Pure: no I/O, no threads, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """One worker's graph in a pass: for each group, what each of its sources reaches.

    Attributes:
        groups: For each group: source -> the recv nodes it reaches.
        senders: For each of these recv nodes: the worker that sent its message.
        foreign: The sources that reach a recv node of another context.
        goals: The sources that reach one of the inputs, on the driver of a pass that is restricted to inputs.
        calls: The outermost calls that these recv nodes belong to. Outside contexts, a summary covers only sources that
            take part or belong to these calls. So other workers can be asked for all of them at once.
    """

    groups: tuple[Mapping[int, frozenset[int]], ...]
    senders: Mapping[int, int]
    foreign: frozenset[int] = frozenset()
    goals: frozenset[int] = frozenset()
    calls: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Orders:
    """What the plan says about one worker.

    Attributes:
        active: Sources that take part.
        circular: Those of them whose group waits in a circle.
        useful: Recv nodes that lead to the inputs, if the user gave inputs.
    """

    active: frozenset[int]
    circular: frozenset[int]
    useful: frozenset[int] | None = None


class Plan:
    """Collects summaries from worker to worker until everything that the roots reach is known.

    Args:
        driver: The worker of the roots.
        restricted: Whether the user gave inputs.

    Attributes:
        active: worker -> sources that take part.
        circular: worker -> those of them whose group waits in a circle.
        useful: If the user gave inputs: the messages whose gradients lead to them.
    """

    def __init__(self, driver: int, *, restricted: bool = False) -> None:
        self.active: dict[int, set[int]] = {driver: {0}}
        self.circular: dict[int, set[int]] = {}
        self.useful: set[int] | None = set() if restricted else None
        self._summaries: dict[int, Summary] = {}
        self._asked: dict[int, set[int]] = {}  # worker -> sources that it was asked for

    def missing(self) -> dict[int, set[int]]:
        """The workers whose summary is needed next, and all sources there that take part as far as the plan knows."""
        return {
            worker: set(sources)
            for worker, sources in self.active.items()
            if worker not in self._summaries or not sources <= self._asked[worker]
        }

    @property
    def calls(self) -> set[int]:
        """The calls that take part, as far as the plan knows; see ``Summary``."""
        return set().union(*(summary.calls for summary in self._summaries.values()))

    def add(self, worker: int, asked: Iterable[int], summary: Summary) -> None:
        """Add a worker's summary, which takes the place of its earlier one. It covers the sources that it was ``asked``
        for, as far as they exist. When no summary is missing, the plan is complete.
        """
        self._summaries[worker] = summary
        self._asked[worker] = {*asked, *(source for group in summary.groups for source in group)}
        self._spread()
        if not self.missing():
            self._prune()
            self._find_circles()

    def orders_for(self, worker: int) -> Orders:
        """What a complete plan says about ``worker``."""
        return Orders(
            frozenset(self.active.get(worker, ())),
            frozenset(self.circular.get(worker, ())),
            None if self.useful is None else frozenset(self.useful),
        )

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
        """Keep only what leads to the inputs. A message is useful if its source reaches an input or a useful message. A
        source that reaches another context may lead to an input there. It is kept, so that the worker where its
        gradient arrives refuses it.
        """
        if self.useful is None:
            return
        for summary in self._summaries.values():
            self.useful |= summary.foreign | summary.goals
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
        """Find the groups that wait in a circle.

        The message graph has one node for each group, between all its active sources and all recv nodes they reach. A
        group with several sources is circular if it lies on a cycle of that graph: then one of its sources cannot
        arrive before the group has answered one of its recv nodes.
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
