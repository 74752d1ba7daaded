"""Calls of PyTorch's autograd engine, and what a call needs to know about nodes, leaves and gradients.

Knows nothing of workers, contexts or passes. ``_torch_support`` lists every private name of torch that is used here.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence, Set
from types import FrameType
from typing import Any, Generic, TypeVar

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.autograd.variable import Variable

from backhaul._native import core
from backhaul._runtime import interrupts

T = TypeVar("T")

Node = Any  # torch.autograd.graph.Node, as far as Python sees it

LeafNode: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
"""The class of accumulation nodes. The ``variable`` of such a node is its leaf."""

_engine: Any = Variable._execution_engine

set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""Sets the grad mode of this thread. ``torch.set_grad_enabled`` does more and costs more."""


class _RunCount:
    """Counts the runs of torch's engine that may do something. Thread-safe.

    Attributes:
        lock: Guards the count. While a thread holds the lock, no such run begins.
        count: How many such runs are under way.
    """

    __slots__ = ("count", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0

    def __enter__(self) -> None:
        with self.lock:
            self.count += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.count -= 1


grad_writers = _RunCount()
"""Entered around each run of the engine that may write to ``.grad``."""

engine_runs = _RunCount()
"""Entered around each run of the engine. A run reads the hooks of its nodes without the interpreter lock, so Backhaul
adds a hook to a node only while no other run is under way.
"""


@interrupts.calls_out
def run_engine(
    edges: Sequence[GradientEdge],
    seeds: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor | GradientEdge],
    *,
    retain: bool,
    create: bool,
    accumulate: bool = False,
    checkpoints: bool = False,
) -> Sequence[torch.Tensor | None]:
    """Run the engine from ``edges`` as far as ``wanted``; return their gradients, or add them to their ``.grad``.
    ``checkpoints``: gradients of all leaves go into ``.grad``, so that reentrant checkpoints may run.

    This does what ``torch.autograd.grad`` and ``backward`` do at half the cost: those check at length what is known
    here. All nodes run on the calling thread, also those of devices. To hand a node to one of the engine's device
    threads and to wait for it takes longer than most groups do.
    """
    threads = torch._C._is_multithreading_enabled()
    torch._C._set_multithreading_enabled(False)
    try:
        with engine_runs:
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


SEND_EARLY_NODES = 64
"""A group with more nodes than this sends the gradients of a message while the rest of the group still runs."""


@interrupts.calls_out
def run_sources(  # noqa: PLR0917 (by place, which takes less time)
    index: Any,
    records: dict[Any, Any],
    sources: list[Any],
    counts: list[int],
    grads: list[torch.Tensor | None],
    retain: bool,
    send_early: Callable[..., None],
    forget: bool,
    checkpoints: bool,
) -> tuple[Any, bool, list[Any], dict[int, int]] | None:
    """Run the engine once for several sources; see ``backward.simple_runs`` and the native core. None: the core does
    not run these.
    """
    with engine_runs:
        found: tuple[Any, bool, list[Any], dict[int, int]] | None = core.run_sources(
            index, records, sources, counts, grads, retain, SEND_EARLY_NODES, send_early, forget, engine_runs
        )
    return found


_RUNS = frozenset((run_engine.__code__, run_sources.__code__))


def leaf_edge(leaf: torch.Tensor) -> GradientEdge:
    """The edge at which the gradient of ``leaf`` arrives, even if the leaf no longer requires a gradient."""
    frozen = not leaf.requires_grad
    # A subclass may put a node of its own between a leaf and its view.
    with torch.inference_mode(False), torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        if frozen:
            leaf.requires_grad_()
        try:
            if leaf.layout is torch.strided:
                return get_gradient_edge(leaf)
            copy: Node = leaf.clone()  # sparse tensors have no views
            return GradientEdge(copy.grad_fn.next_functions[0][0], 0)
        finally:
            if frozen:
                leaf.requires_grad_(False)


def renumber(nodes: Iterable[Node]) -> None:
    """Make the engine run ``nodes``, and add what they produce, in the reverse of this order.

    The engine orders nodes by sequence numbers, and each thread of the forward counted its own.
    """
    for number, node in enumerate(nodes):
        if type(node) is not LeafNode:
            node._set_sequence_nr(number)


def is_own(grad: torch.Tensor) -> bool:
    """Whether no other tensor shares the memory of ``grad``, so that its only owner may change it in place."""
    if grad.layout is not torch.strided:
        return True
    if not grad.is_contiguous() and 0 in grad.stride():
        return False  # expanded: several elements share memory
    # One use is the tensor's, one is that of the storage object made here.
    return torch._C._storage_Use_Count(grad.untyped_storage()._cdata) <= 2


class OfRun(threading.local, Generic[T]):
    """A value that belongs to one run of the engine. A run stays on one thread, so the value is thread-local."""

    def __init__(self) -> None:
        self._values: list[T] = []

    def get(self) -> T | None:
        """The value of the innermost run on this thread; None if there is none."""
        return self._values[-1] if self._values else None

    def begin(self, value: T) -> None:
        """Give ``value`` to the runs that this thread starts from now on."""
        self._values.append(value)

    def end(self) -> None:
        """Undo the last ``begin``."""
        self._values.pop()


def nested(frame: FrameType | None) -> bool:
    """Whether a call of the engine by user code inside a run of ours, in a hook for example, runs ``frame``."""
    while frame is not None and frame.f_code not in _RUNS:
        if frame.f_code is _engine_run_backward.__code__:
            return True
        frame = frame.f_back
    return False


def own_run(frame: FrameType | None) -> FrameType | None:
    """The frame of our run of the engine that called ``frame``; None if torch's own run did."""
    while frame is not None and frame.f_code not in _RUNS:
        if frame.f_code is _engine_run_backward.__code__:
            return None
        frame = frame.f_back
    return frame


def allows_checkpoints(frame: FrameType | None) -> bool | None:
    """Whether reentrant checkpoints may run in the run of the engine that called ``frame``. None: torch knows.

    Such a checkpoint adds to ``.grad`` of every leaf that it reaches. So torch refuses it where a run is restricted to
    inputs, as all our runs are. Ours may reach all leaves nevertheless, see ``run_engine``.
    """
    run = own_run(frame)
    return None if run is None else bool(run.f_locals["checkpoints"])


_SMALL_NUMEL = 1 << 14  # as in the native core; adding so many elements takes a few microseconds


def add_to_grad(leaf: torch.Tensor, grad: torch.Tensor, *, shared: bool) -> None:
    """Add to ``.grad`` of a leaf as the engine does, without a run of the engine. ``shared``: other code may see the
    memory of ``grad``.

    The accumulation node of torch can do the work, under its own lock. But calling it takes longer than to add a small
    gradient, and it would copy the first gradient of a leaf, since Python refers to it too. So this function does both
    itself, unless a run of the engine may write to ``.grad`` at the same time.
    """
    before = torch.is_grad_enabled()
    set_grad_enabled(False)
    try:
        with grad_writers.lock:
            if not grad_writers.count:
                if leaf.grad is not None:
                    if grad.numel() <= _SMALL_NUMEL:
                        leaf.grad.add_(grad)
                        return
                elif not shared and grad.stride() == leaf.stride() and not grad.requires_grad and is_own(grad):
                    leaf.grad = grad
                    return
        set_grad_enabled(True)
        with torch._C.DisableTorchFunctionSubclass():  # as in ``leaf_edge``
            node: Node = leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        set_grad_enabled(False)
        node(_own_copy(leaf, grad))
    finally:
        set_grad_enabled(before)


def _own_copy(leaf: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """``grad``, or a copy if it would become ``.grad`` itself.

    An accumulation node that has ever had a hook expects one more reference. So it takes the memory of a gradient to
    which Python refers.
    """
    return grad if leaf.grad is not None else grad.clone()


_accumulating: OfRun[Set[int]] = OfRun()  # ids of the leaves whose accumulation nodes run


class _OnceHook:
    """Wraps a tensor hook of a leaf: the hook is not called again while the leaf's accumulation node runs.

    The wrapper stays in place of the user's hook, because another thread may be running the same hook.
    """

    def __init__(self, leaf: int, hook: Callable[..., Any]) -> None:
        self._leaf = leaf
        self.__wrapped__ = hook
        self.__module__ = getattr(hook, "__module__", "")

    @interrupts.calls_out
    def __call__(self, *args: Any) -> Any:
        accumulating = _accumulating.get()
        if accumulating is not None and self._leaf in accumulating and not nested(sys._getframe(1)):
            return None
        return self.__wrapped__(*args)


def run_accumulation(leaves: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], *, create: bool) -> None:
    """Run the accumulation nodes of ``leaves`` with all their hooks except tensor hooks: those have seen ``grads``."""
    for leaf in leaves:
        hooks: Any = leaf._backward_hooks or {}
        for key, hook in list(hooks.items()):
            if not isinstance(hook, _OnceHook):
                hooks[key] = _OnceHook(id(leaf), hook)
    if not create:
        grads = [_own_copy(leaf, grad) for leaf, grad in zip(leaves, grads, strict=True)]
    _accumulating.begin(frozenset(map(id, leaves)))
    try:
        edges = list(map(leaf_edge, leaves))
        with grad_writers:
            run_engine(edges, grads, edges, retain=create, create=create, accumulate=True)
    finally:
        _accumulating.end()
