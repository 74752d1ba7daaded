"""PyTorch's own engine, and most of the private interfaces of it that we use; ``torch_support`` lists all of them."""

from __future__ import annotations

import collections
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Sequence, Set
from types import FrameType
from typing import Any, Generic, TypeVar

import torch
from torch.autograd.function import _HookMixin
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.autograd.variable import Variable
from torch.utils.hooks import RemovableHandle

from backhaul._runtime import interrupts

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

Node = Any  # torch.autograd.graph.Node, as far as Python sees it

LeafNode: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
"""The class of accumulation nodes; a node's ``variable`` is its leaf."""

_engine: Any = Variable._execution_engine

set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""For this thread; the class of that name does more."""


@interrupts.calls_out
def run_engine(
    edges: Sequence[GradientEdge],
    seeds: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor | GradientEdge],
    *,
    retain: bool,
    create: bool,
    accumulate: bool = False,
) -> Sequence[torch.Tensor | None]:
    """Run the engine from ``edges`` as far as ``wanted``; return their gradients, or add them to their ``.grad``.

    What ``torch.autograd.grad`` and ``backward`` do, at half the cost: they check at length what is known here. All
    nodes run on the calling thread, those of devices too: to hand them to the engine's threads for these, and to wait
    for that, takes longer than most groups do.
    """
    threads = torch._C._is_multithreading_enabled()
    torch._C._set_multithreading_enabled(False)
    try:
        found: Sequence[torch.Tensor | None] = _engine.run_backward(
            tuple(edges),
            tuple(seeds),
            retain,
            create,
            tuple(wanted),
            allow_unreachable=True,
            accumulate_grad=accumulate,
        )
    finally:
        torch._C._set_multithreading_enabled(threads)
    return found


def leaf_edge(leaf: torch.Tensor) -> GradientEdge:
    """The edge at which the gradient of ``leaf`` arrives, even if it does not require one any more."""
    frozen = not leaf.requires_grad
    with torch.inference_mode(False), torch.enable_grad():
        if frozen:
            leaf.requires_grad_()
        try:
            if leaf.layout is torch.strided:
                return get_gradient_edge(leaf)
            copy: Node = leaf.clone()  # there are no views of sparse tensors
            return GradientEdge(copy.grad_fn.next_functions[0][0], 0)
        finally:
            if frozen:
                leaf.requires_grad_(False)


def renumber(nodes: Iterable[Node]) -> None:
    """Make the engine run ``nodes``, and so add what they give, in their order, last first. It goes by numbers that
    each thread of the forward counted for itself.
    """
    for number, node in enumerate(nodes):
        if type(node) is not LeafNode:
            node._set_sequence_nr(number)


class NodeHooks:
    """Knows the hooks of nodes, which Python cannot ask for: registering one and looking at its handle's table shows
    the others. That costs more than all else that is done for a leaf, so it is done only after somebody has registered
    a hook on a node: torch calls a function of Python's for that, which is watched.
    """

    def __init__(self) -> None:
        self.possible = RemovableHandle.next_id > 0  # hooks of whatever kind that were there before us
        register = getattr(_HookMixin, "_register_hook", None)
        if register is None:
            self.possible = True
            return

        def watched(hooks: Any, hook: Any) -> Any:
            if not getattr(hook, "backhaul_own", False):
                self.possible = True
            return register(hooks, hook)

        mixin: Any = _HookMixin
        mixin._register_hook = staticmethod(watched)

    def of(self, register: Callable[..., Any]) -> list[Callable[..., Any]]:
        """The hooks of a node, of those that ``register``, a method of its, registers."""
        if not self.possible:
            return []
        handle = register(_nothing)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        return list(hooks.values()) if hooks is not None else []


def pass_hooks(node: Node, grad: torch.Tensor | None) -> torch.Tensor | None:
    """What the hooks of a node that does not run make of the gradient that came to it."""
    if grad is None or not node_hooks.possible:
        return grad
    for hook in node_hooks.of(node.register_prehook):
        changed = hook((grad,))
        if changed is not None:
            if not isinstance(changed, tuple):
                raise TypeError(f"expected tuple, but the hook {hook} returned a {type(changed).__name__}")
            (grad,) = changed
    for hook in node_hooks.of(node.register_hook):
        hook((None,), (grad,))
    return grad


def own_hook(hook: F) -> F:
    """Mark a hook of ours, which is gone before anybody could ask for it."""
    hook.backhaul_own = True  # type: ignore[attr-defined]
    return hook


@own_hook
def _nothing(*_: object) -> None:
    """A hook that is never called."""


node_hooks = NodeHooks()


def is_own(grad: torch.Tensor) -> bool:
    """Whether no other tensor sees the memory of ``grad``, so that who has the tensor alone can change it in place."""
    if grad.layout is not torch.strided:
        return True
    if not grad.is_contiguous() and 0 in grad.stride():
        return False  # expanded: elements share memory
    # One for the tensor, one for the storage that is looked at here.
    return torch._C._storage_Use_Count(grad.untyped_storage()._cdata) <= 2


BoundaryNodeClass: Any = torch._C._functions.Error  # type: ignore[attr-defined]
"""The class of the nodes of fences."""


class BoundaryNode:
    """The end of a worker's graph: a node of torch's own that refuses to run, with ``message``, and carries a mark.

    The engine is asked for the gradient that arrives at it. That costs a third of a node in Python, which would have to
    run.
    """

    def __init__(self, message: str) -> None:
        self._put: Callable[[torch.Tensor], torch.Tensor] = torch._C._functions.DelayedError(message, 1)

    def put(self, tensor: torch.Tensor, mark: object) -> torch.Tensor:
        """``tensor``, a leaf that requires grad, as a value that has come through the fence."""
        output = self._put(tensor)
        node: Node = output.grad_fn
        node.metadata[_MARK] = mark
        return output

    @staticmethod
    def mark_of(node: Node) -> Any:
        """The mark of a node, None if it is not a fence."""
        return node.metadata.get(_MARK) if type(node) is BoundaryNodeClass else None


_MARK = "backhaul"


DEEP = 10_000  # nodes of a graph from which on it has to be freed one by one
_ROW = 2_000  # nodes that are freed by recursion at most


def free_one_by_one(nodes: Sequence[Node]) -> None:
    """See to it that a graph is freed from node to node, whoever holds on to whatever part of it. torch frees nodes
    that Python has looked at by recursion, and a long row of them would need more stack than there is.

    On a node hang only nodes that it leads to: so they make no circle, in whatever order other passes come by, and
    nothing is kept that the graph would not keep itself.

    Args:
        nodes: All nodes, each after those behind it.
    """
    for end in range(len(nodes), 1, -_ROW):
        row = nodes[max(end - _ROW, 0) : end]
        places = {node: place for place, node in enumerate(row)}
        left = set(row)
        for node in reversed(row):
            if node not in left:
                continue
            behind: list[Node] = []
            ahead = [node]
            while ahead:
                following = {n for n, _ in ahead.pop().next_functions} & left
                left -= following
                ahead += following
                behind += following
            if behind:
                node.metadata[_BEHIND] = sorted(behind, key=places.__getitem__)  # a list is freed from its end


_BEHIND = "backhaul_behind"


class Task:
    """What multi-grad hooks take a pass for. They ask torch for the graph task that runs, and which nodes it is going
    to run; but a pass is many tasks, one for each group or even node, and the first knows nothing of what follows.
    While inside, on this thread, they get the pass in answer.

    Args:
        number: Names the pass; above all of torch's own.
        nodes: All nodes that take part.
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
        _task.begin(self)

    def __exit__(self, *_: object) -> None:
        _task.end()


_own_tasks = itertools.count(1 << 62)


_handles = 0  # made by us


def own_handles() -> None:
    """Let handles that we have made so far not count as hooks."""
    global _handles
    if not node_hooks.possible:
        _handles = RemovableHandle.next_id


def tasks_matter() -> bool:
    """Whether there may be multi-grad hooks, who ask for the ``Task``: somebody has registered a hook of some kind."""
    return bool(RemovableHandle.next_id > _handles or node_hooks.possible)


def new_task_number() -> int:
    """A number for a ``Task``."""
    return next(_own_tasks)


class OfRun(threading.local, Generic[T]):
    """A value of one run of the engine, which is all on one thread."""

    def __init__(self) -> None:
        self._values: list[T] = []

    def get(self) -> T | None:
        """What the run has that is under way; None if nothing."""
        return self._values[-1] if self._values else None

    def begin(self, value: T) -> None:
        """Runs that are started from this thread have it from now on."""
        self._values.append(value)

    def end(self) -> None:
        """They have what they had before."""
        self._values.pop()


_task: OfRun[Task] = OfRun()
_replay: OfRun[Set[int]] = OfRun()


def _nested(frame: FrameType | None) -> bool:
    """Whether the code of ``frame`` is run by an engine call of somebody else's inside of ours: in a hook, say."""
    while frame is not None and frame.f_code is not run_engine.__code__:
        if frame.f_code is _engine_run_backward.__code__:
            return True
        frame = frame.f_back
    return False


def _task_for(frame: FrameType) -> Task | None:
    """The pass that a multi-grad hook is called in; None for all others who ask."""
    if frame.f_globals.get("__name__") != "torch.autograd.graph":
        return None  # checkpointing, above all, means one run of the engine
    task = _task.get()
    return None if task is None or _nested(frame) else task


def _answer_hooks() -> None:
    graph_task, will_run = torch._C._current_graph_task_id, torch._C._will_engine_execute_node

    def current_graph_task_id() -> int:
        task = _task_for(sys._getframe(1))
        return graph_task() if task is None else task.number

    def will_engine_execute_node(node: Node) -> bool:
        task = _task_for(sys._getframe(1))
        return will_run(node) if task is None else task.runs(node)

    torch._C._current_graph_task_id = current_graph_task_id
    torch._C._will_engine_execute_node = will_engine_execute_node


_answer_hooks()


class NodeWatch:
    """While inside, ``seen`` is called with each gradient that comes to one of ``nodes``, after all tensor hooks."""

    __slots__ = ("_tables",)

    def __init__(self, nodes: Iterable[Node], seen: Callable[[Node, torch.Tensor | None], None]) -> None:
        self._tables: list[dict[int, Any]] = []
        for node in nodes:
            table = collections.OrderedDict({0: functools.partial(seen, node)})
            bearer: Any = torch.empty(0)
            bearer._backward_hooks = table
            node._register_hook_dict(bearer)  # for good; an empty table does nothing
            self._tables.append(table)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        for table in self._tables:
            table.clear()


class _Once:
    """A tensor hook that is not called again while the accumulation node of its leaf is run after it has been called
    already. It stays in the place of the user's: another thread may be running it.
    """

    def __init__(self, leaf: int, hook: Callable[..., Any]) -> None:
        self._leaf = leaf
        self.__wrapped__ = hook
        self.__module__ = getattr(hook, "__module__", "")

    @interrupts.calls_out
    def __call__(self, *args: Any) -> Any:
        replayed = _replay.get()
        if replayed is not None and self._leaf in replayed and not _nested(sys._getframe(1)):
            return None
        return self.__wrapped__(*args)


def run_accumulation(leaves: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], *, create: bool) -> None:
    """Run the accumulation nodes of ``leaves``, with all that hangs on them but tensor hooks: the gradients have been
    through those.
    """
    for leaf in leaves:
        hooks: Any = leaf._backward_hooks or {}
        for key, hook in list(hooks.items()):
            if not isinstance(hook, _Once):
                hooks[key] = _Once(id(leaf), hook)
    _replay.begin(frozenset(map(id, leaves)))
    try:
        edges = list(map(leaf_edge, leaves))
        run_engine(edges, grads, edges, retain=create, create=create, accumulate=True)
    finally:
        _replay.end()
