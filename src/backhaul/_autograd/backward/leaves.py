"""Where gradients end: how a native call is made so that leaves get theirs, once, with everything that hangs on them.

The engine is asked for the gradients of the leaves (their tensor hooks fire, nothing is written) and they are summed in
the context. For ``accumulate="grad"`` it then runs the accumulation nodes, which write ``.grad`` as ``loss.backward()``
does. It does so too where something hangs on an accumulation node itself (hooks of Python's, or of a DDP reducer): then
``.grad`` is put aside meanwhile and what was accumulated is taken into the context.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import ClassVar

import torch
from torch.autograd.graph import GradientEdge
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from backhaul._autograd.context import Context
from backhaul._autograd.forward.functions import Grads, add
from backhaul._autograd.messages import PassSpec
from backhaul._autograd.torch_engine.run import (
    Node,
    is_own,
    leaf_edge,
    node_hooks,
    own_handles,
    run_accumulation,
    run_engine,
    set_grad_enabled,
)
from backhaul._devices.cuda import process
from backhaul._runtime import interrupts


class _Swapping(contextlib.AbstractContextManager[None]):
    """Held while the ``.grad`` of leaves is put aside: they may belong to several contexts. A lock for each leaf, since
    hooks run meanwhile, and may do anything.
    """

    _locks: ClassVar[WeakIdKeyDictionary] = WeakIdKeyDictionary()
    _making: ClassVar[threading.Lock] = threading.Lock()  # guards _locks

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        ordered = sorted({id(leaf): leaf for leaf in leaves}.values(), key=id)  # the same order for all
        with self._making:
            self._held = [self._locks.setdefault(leaf, threading.RLock()) for leaf in ordered]

    def __enter__(self) -> None:
        for lock in self._held:
            lock.acquire()

    def __exit__(self, *_: object) -> None:
        for lock in reversed(self._held):
            lock.release()


_ALONE = 2  # references to what a local variable alone refers to: that, and the argument of getrefcount


class Leaves:
    """What one pass does with the leaves of one worker."""

    def __init__(self, context: Context, spec: PassSpec, inputs: Sequence[torch.Tensor] | None) -> None:
        self._context = context
        self._spec = spec
        self._inputs = inputs
        self._runs_node: dict[int, bool] = {}  # by id of the leaf, which the graph keeps
        self._reducers = reducers.possible
        self._adds_alone = not (spec.into_grad or spec.restricted)  # where a leaf carries nothing

    def join(self, leaf: torch.Tensor) -> object:
        """What joins the sources that reach ``leaf``, so that what hangs on it sees their sum, once; None: nothing.

        Sources whose leaves give equal answers run together.
        """
        hooks = leaf._backward_hooks
        if not (hooks or leaf._post_accumulate_grad_hooks or self._reducers or node_hooks.possible):
            return id(leaf) if self._spec.deterministic and self._spec.into_grad else None
        if hooks and any(getattr(hook, "__module__", "") == "torch.autograd.graph" for hook in hooks.values()):
            return "multi-grad hooks"  # they span leaves, and count on one run of the engine
        if (module := reducers.module_of(leaf)) is not None:
            return "reducer", module  # it averages when the last of its parameters is there: let that be one run
        if self._spec.deterministic and self._spec.into_grad:
            return id(leaf)  # the engine adds to ``.grad`` in whatever order the groups run: let there be one
        return id(leaf) if hooks or leaf._post_accumulate_grad_hooks or self._must_run_node(leaf) else None

    def _must_run_node(self, leaf: torch.Tensor) -> bool:
        if not (self._reducers or node_hooks.possible):
            return False
        known = self._runs_node.get(id(leaf))
        if known is None:
            known = self._runs_node[id(leaf)] = runs_node(leaf)
        return known

    def is_plain(self, leaf: torch.Tensor) -> bool:
        """Whether the gradient of ``leaf`` is just to be added."""
        return self._adds_alone and self.join(leaf) is None

    def compute(
        self,
        edges: Sequence[GradientEdge],
        seeds: Sequence[torch.Tensor],
        leaves: Collection[torch.Tensor],
        ends: Sequence[GradientEdge],
        order: tuple[int, ...],
        *,
        check: Callable[[Grads], None] | None = None,
    ) -> Grads:
        """Run the engine from ``edges`` to ``leaves``, which keep what they get, and ``ends``, whose gradients are
        returned. ``check`` sees these before anything is kept, and may raise.
        """
        spec = self._spec
        wanted = list(self._inputs or ()) if spec.restricted else leaves
        if not edges or not (wanted or ends):
            return [None] * len(ends)
        asked = [leaf if leaf.layout is torch.strided else leaf_edge(leaf) for leaf in wanted]
        grads = list(run_engine(edges, seeds, [*asked, *ends], retain=spec.retain, create=spec.create))
        if process.stream_order is not None:
            process.stream_order.adopt(grads)  # they are in memory of the forward's streams, and used on this thread's
        found = grads[len(wanted) :]
        if check is not None:
            check(found)
        if not wanted:
            return found
        del grads[len(wanted) :]
        self._take(wanted, grads, order)
        return found

    def _take(self, leaves: Iterable[torch.Tensor], grads: list[torch.Tensor | None], order: tuple[int, ...]) -> None:
        """Takes the gradients out of the list, so that it can tell which of them nobody else has."""
        plain = self._adds_alone and not (self._reducers or node_hooks.possible)
        run_nodes: list[tuple[torch.Tensor, torch.Tensor]] = []
        seen: set[int] = set()  # ids: one that comes again is that of a gradient which several leaves share
        for index, leaf in enumerate(leaves):
            grad, grads[index] = grads[index], None
            if grad is None:
                continue
            if not plain and leaf.is_leaf and (self._spec.into_grad or self._must_run_node(leaf)):
                run_nodes.append((leaf, grad))
            else:
                shared = sys.getrefcount(grad) > _ALONE  # not in the call below, whose arguments refer to it too
                self.keep(leaf, grad, order, shared=shared or id(grad) in seen)
            seen.add(id(grad))
        if run_nodes:
            self._run_nodes([leaf for leaf, _ in run_nodes], [grad for _, grad in run_nodes])

    def _run_nodes(self, leaves: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        create = self._spec.create
        if not self._spec.into_grad:
            self._accumulate_aside(leaves, grads)
            return
        if not create:
            self._part_from_graph(leaves)
        run_accumulation(leaves, grads, create=create)

    def _part_from_graph(self, leaves: Sequence[torch.Tensor]) -> None:
        """The engine is going to add to ``.grad`` in place; what an earlier pass recorded must not change."""
        with _Swapping(leaves):
            for leaf in leaves:
                if leaf.is_leaf and leaf.grad is not None and leaf.grad.grad_fn is not None:
                    leaf.grad = leaf.grad.detach().clone()

    def keep(
        self, leaf: torch.Tensor, grad: torch.Tensor, order: tuple[int, ...] = (), *, shared: bool = False
    ) -> None:
        """Add to a leaf's gradient."""
        spec = self._spec
        if spec.into_grad:
            if leaf.retains_grad:
                return  # the tensor has seen to it itself
            with _Swapping([leaf]), torch.set_grad_enabled(spec.create), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # .grad of a tensor that is no leaf: that is what was asked for
                if process.stream_order is not None:
                    process.stream_order.adopt(leaf.grad)
                leaf.grad = add(leaf.grad, grad)
            return
        hooks = leaf._post_accumulate_grad_hooks
        own = not shared and is_own(grad)
        if own and not (hooks or spec.deterministic) and self._context.accumulate_first(leaf, grad):
            return
        before = torch.is_grad_enabled()
        set_grad_enabled(spec.create)
        try:
            self._context.accumulate(
                leaf, grad if own else grad.clone(), order if spec.deterministic and not hooks else None
            )
        finally:
            set_grad_enabled(before)
        if hooks:
            self._call_hooks(leaf, list(hooks.values()))

    @interrupts.calls_out
    def _call_hooks(self, leaf: torch.Tensor, hooks: Sequence[object]) -> None:
        """Post-accumulate hooks look at ``.grad``: show them the context's there."""
        with _Swapping([leaf]):
            aside, leaf.grad = leaf.grad, self._context.gradient(leaf)
            try:
                for hook in hooks:
                    hook(leaf)  # type: ignore[operator]
                self._context.replace(leaf, leaf.grad)
            finally:
                leaf.grad = aside

    def _accumulate_aside(self, leaves: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        with _Swapping(leaves):
            aside = [leaf.grad for leaf in leaves]
            for leaf in leaves:  # hooks see the sum so far
                so_far = self._context.gradient(leaf)
                leaf.grad = None if so_far is None else so_far.clone()  # the engine adds in place
            try:
                run_accumulation(leaves, grads, create=self._spec.create)
                for leaf in leaves:
                    # A reducer may have made .grad a view of memory that it uses again.
                    own = leaf.grad if leaf.grad is None or leaf.grad._base is None else leaf.grad.clone()
                    self._context.replace(leaf, own)
            finally:
                for leaf, grad in zip(leaves, aside, strict=True):
                    leaf.grad = grad


def runs_node(leaf: torch.Tensor) -> bool:
    """Whether something hangs on the accumulation node of ``leaf``, so that it has to run."""
    if not (leaf.is_leaf and leaf.requires_grad):
        return False
    if reducers.module_of(leaf) is not None:
        return True
    if not node_hooks.possible:
        return False
    node: Node = leaf_edge(leaf).node
    return bool(node_hooks.of(node.register_hook) or node_hooks.of(node.register_prehook))


class _Reducers:
    """Knows the parameters of DDP modules, whose reducers hang on accumulation nodes where Python cannot see it.

    Modules made before this one was imported are found by looking once; later ones tell by a hook of torch's that is
    called when a module gets a sub-module.
    """

    def __init__(self) -> None:
        self._parameters: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._looked = False
        register_module_module_registration_hook(self._on_submodule)

    @property
    def possible(self) -> bool:
        """Whether there may be any."""
        return torch.distributed.is_available() and torch.distributed.is_initialized()

    def module_of(self, leaf: torch.Tensor) -> int | None:
        """Names the DDP module that reduces ``leaf``, if one does."""
        if not self.possible:
            return None
        if not self._looked:
            self._looked = True
            for thing in gc.get_objects():
                if issubclass(type(thing), DistributedDataParallel):  # not isinstance: there may be dead proxies
                    self._note(thing, thing)
        found: int | None = self._parameters.get(leaf)
        return found

    def _on_submodule(self, module: torch.nn.Module, name: str, submodule: torch.nn.Module | None) -> None:
        if isinstance(module, DistributedDataParallel) and submodule is not None:
            self._note(module, submodule)

    def _note(self, module: torch.nn.Module, part: torch.nn.Module) -> None:
        for parameter in part.parameters():
            self._parameters[parameter] = id(module)


reducers = _Reducers()
own_handles()
