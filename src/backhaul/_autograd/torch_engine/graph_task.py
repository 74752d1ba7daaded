"""The graph task that multi-grad hooks see: one for each pass, though a pass calls the engine many times."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Set
from types import FrameType

from backhaul._autograd.torch_engine.run import Node, OfRun, nested


class GraphTask:
    """What multi-grad hooks take for the graph task of a pass.

    A multi-grad hook asks torch for the graph task that runs, and which nodes that task is going to run. A pass is many
    graph tasks of torch, one for each group or even for each node, and the first of them knows nothing of the others.
    Between ``__enter__`` and ``__exit__``, a hook on this thread is told about the whole pass; see ``patches``.

    Args:
        number: Names the pass. It is above all numbers of torch's own tasks.
        nodes: Finds all nodes that take part. It is called at the first question.
    """

    __slots__ = ("_found", "_nodes", "number")

    def __init__(self, number: int, nodes: Callable[[], Set[Node]]) -> None:
        self.number = number
        self._nodes = nodes
        self._found: Set[Node] | None = None

    def runs(self, node: Node) -> bool:
        """Whether ``node`` takes part."""
        if self._found is None:
            self._found = self._nodes()
        return node in self._found

    def __enter__(self) -> None:
        _current.begin(self)

    def __exit__(self, *_: object) -> None:
        _current.end()


_current: OfRun[GraphTask] = OfRun()

new_task_number: Callable[[], int] = itertools.count(1 << 62).__next__
"""Returns a number for a ``GraphTask``."""


def task_for(frame: FrameType) -> GraphTask | None:
    """The task of the pass in which ``frame``, a multi-grad hook, is called; None for all other callers."""
    if frame.f_globals.get("__name__") != "torch.autograd.graph":
        return None  # checkpointing, above all, asks for one run of the engine
    task = _current.get()
    return None if task is None or nested(frame) else task
