"""The leaves of a worker in a pass: each gets its gradient once, and all its hooks are called.

A pass asks the engine for the gradients of the leaves. Tensor hooks are called, and nothing is written to ``.grad``.
The pass then adds the gradients to the context. For ``accumulate="grad"`` it runs the accumulation nodes instead, which
write ``.grad`` as ``loss.backward()`` does. It also runs an accumulation node that has hooks of its own (of Python, or
of a DDP reducer). Then it sets ``.grad`` aside meanwhile, and moves what was accumulated to the context.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import ClassVar

import torch
from torch.autograd.graph import GradientEdge
from torch.utils.weak import WeakIdKeyDictionary

from backhaul._autograd.context import Context
from backhaul._autograd.forward.functions import Grads, add
from backhaul._autograd.gradient_table import GradientTable
from backhaul._autograd.ids import PLAIN
from backhaul._autograd.messages import PassSpec
from backhaul._autograd.torch_engine.hooks import node_hooks
from backhaul._autograd.torch_engine.reducers import reducers
from backhaul._autograd.torch_engine.run import (
    Node,
    add_to_grad,
    is_own,
    leaf_edge,
    run_accumulation,
    run_engine,
    set_grad_enabled,
)
from backhaul._autograd.torch_engine.sharded import SHARDED, ShardedShare
from backhaul._devices import seam
from backhaul._runtime import interrupts
from backhaul.errors import BackhaulError

Wanted = torch.Tensor | GradientEdge
"""What a gradient is wanted for: a leaf, or a tensor or edge inside the graph that the user named."""


class _GradLock(contextlib.AbstractContextManager[None]):
    """Held while ``.grad`` of leaves is set aside or changed. A leaf may belong to several contexts. Each leaf has a
    lock of its own, because hooks run meanwhile, and hooks may do anything.
    """

    _locks: ClassVar[WeakIdKeyDictionary] = WeakIdKeyDictionary()
    _making: ClassVar[threading.Lock] = threading.Lock()  # guards _locks

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        ordered = sorted(
            {id(leaf): leaf for leaf in leaves}.values(), key=id
        )  # every thread takes the locks in this order
        with self._making:
            self._held = [self._locks.setdefault(leaf, threading.RLock()) for leaf in ordered]

    def __enter__(self) -> None:
        for lock in self._held:
            lock.acquire()

    def __exit__(self, *_: object) -> None:
        for lock in reversed(self._held):
            lock.release()


_SHARDED_IN_CONTEXT = (
    "the pass reaches parameters of an FSDP2 module (fully_shard), and FSDP2 reduces gradients in .grad, not in "
    'contexts; call loss.backward() outside contexts, or give accumulate="grad"'
)
_SOLE_REFERENCE_COUNT = 2  # a local variable holds the only reference: the variable, and the argument of getrefcount


class Leaves:
    """What one pass does with the leaves of one worker. Thread-safe.

    Args:
        context: The context of the pass.
        spec: The pass.
        inputs: On the driver, the tensors or edges that the pass is restricted to.
        results: On the driver, takes the gradients of the inputs, if they are neither for ``.grad`` nor the context.
        sharded: What the pass does with FSDP2 modules of this worker, if there are any.
    """

    def __init__(
        self,
        context: Context,
        spec: PassSpec,
        inputs: Sequence[Wanted] | None,
        results: GradientTable | None = None,
        sharded: ShardedShare | None = None,
    ) -> None:
        self._context = context
        self._spec = spec
        self._inputs = inputs
        self._results = results
        self._sharded = sharded
        self._runs_node: dict[int, bool] = {}  # by id of the leaf, which the graph keeps alive
        self._reducers = torch.distributed.is_available() and torch.distributed.is_initialized()
        # A leaf without hooks only gets its gradient added: in the context, or to ``.grad``.
        self._adds_only = not (spec.into_grad or spec.restricted)
        self._adds_to_grad = spec.into_grad and not (spec.restricted or spec.create)

    def join(self, leaf: torch.Tensor) -> object:
        """A key that joins the sources that reach ``leaf``; None if nothing joins them.

        Sources whose leaves give equal keys run together, so that hooks on the leaf see the sum of all gradients, once.
        """
        if self._sharded is not None and leaf in self._sharded:
            if not (self._spec.into_grad or self._spec.restricted):
                raise BackhaulError(_SHARDED_IN_CONTEXT)
            return SHARDED
        hooks = leaf._backward_hooks
        if not (hooks or leaf._post_accumulate_grad_hooks or self._reducers or node_hooks.possible):
            return id(leaf) if self._spec.deterministic and self._spec.into_grad else None
        if hooks and any(getattr(hook, "__module__", "") == "torch.autograd.graph" for hook in hooks.values()):
            return "multi-grad hooks"  # they span leaves, and rely on one run of the engine
        if (module := reducers.module_of(leaf)) is not None:
            return "reducer", module  # it averages when the last of its parameters has arrived: in one run
        if self._spec.deterministic and self._spec.into_grad:
            return id(leaf)  # several groups would add to ``.grad`` in any order; one group has one order
        return id(leaf) if hooks or leaf._post_accumulate_grad_hooks or self._must_run_node(leaf) else None

    def _must_run_node(self, leaf: torch.Tensor) -> bool:
        if not (self._reducers or node_hooks.possible):
            return False
        known = self._runs_node.get(id(leaf))
        if known is None:
            known = self._runs_node[id(leaf)] = runs_node(leaf)
        return known

    def keep_plain(self, leaf: torch.Tensor, grad: torch.Tensor, order: tuple[int, ...], *, shared: bool) -> bool:
        """Add to the gradient of a leaf that needs no run of the engine; False if ``leaf`` needs one."""
        if not (self._adds_only or self._adds_to_grad) or self.join(leaf) is not None:
            return False
        if leaf.requires_grad:
            if self._adds_only:
                self.keep(leaf, grad, order, shared=shared)
            elif not _is_simple(leaf):
                return False
            else:
                add_to_grad(leaf, grad, shared=shared)
        return True

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
        """Run the engine from ``edges`` to ``leaves``, whose gradients are kept, and ``ends``, whose gradients are
        returned. ``check`` gets the latter before anything is kept, and may raise.
        """
        spec = self._spec
        wanted: Collection[Wanted] = list(self._inputs or ()) if spec.restricted else leaves
        if not edges or not (wanted or ends):
            return [None] * len(ends)
        asked = [
            leaf if isinstance(leaf, GradientEdge) or leaf.layout is torch.strided else leaf_edge(leaf)
            for leaf in wanted
        ]
        grads = list(
            run_engine(
                edges,
                seeds,
                [*asked, *ends],
                retain=spec.retain,
                create=spec.create,
                checkpoints=spec.into_grad and not spec.restricted,
            )
        )
        seam.streams.adopt(grads)  # made on streams of the forward, used on those of this thread
        found = grads[len(wanted) :]
        if check is not None:
            check(found)
        if not wanted:
            return found
        del grads[len(wanted) :]
        self._take(wanted, grads, order)
        return found

    def _take(self, leaves: Iterable[Wanted], grads: list[torch.Tensor | None], order: tuple[int, ...]) -> None:
        """Keep gradients. Takes each out of the list first: its reference count then tells whether it is shared."""
        plain = self._adds_only and not (self._reducers or node_hooks.possible)
        run_nodes: list[tuple[torch.Tensor, torch.Tensor]] = []
        seen: set[int] = set()  # ids of gradients; several leaves share one whose id comes again
        for index, leaf in enumerate(leaves):
            grad, grads[index] = grads[index], None
            if grad is None:
                continue
            if self._results is not None:
                self._results.accumulate(leaf, grad, order if self._spec.deterministic else None)
                continue
            assert isinstance(leaf, torch.Tensor)
            # Before the calls below, whose argument is one more reference.
            shared = sys.getrefcount(grad) > _SOLE_REFERENCE_COUNT or id(grad) in seen
            seen.add(id(grad))
            if plain:
                self.keep(leaf, grad, order, shared=shared)
            else:
                self._keep(leaf, grad, order, run_nodes, shared=shared)
        if run_nodes:
            self._run_nodes([leaf for leaf, _ in run_nodes], [grad for _, grad in run_nodes])

    def add(self, gradients: Iterable[tuple[torch.Tensor, torch.Tensor, bool]]) -> None:
        """Keep gradients of leaves, each with whether other code may see its memory. Tensor hooks have seen them."""
        run_nodes: list[tuple[torch.Tensor, torch.Tensor]] = []
        for leaf, grad, shared in gradients:
            self._keep(leaf, grad, (), run_nodes, shared=shared)
        if run_nodes:
            self._run_nodes([leaf for leaf, _ in run_nodes], [grad for _, grad in run_nodes])

    def _keep(
        self,
        leaf: torch.Tensor,
        grad: torch.Tensor,
        order: tuple[int, ...],
        run_nodes: list[tuple[torch.Tensor, torch.Tensor]],
        *,
        shared: bool,
    ) -> None:
        """Keep the gradient of a leaf, or add it to those whose accumulation nodes have to run."""
        if not (leaf.is_leaf and (self._spec.into_grad or self._must_run_node(leaf))):
            self.keep(leaf, grad, order, shared=shared)
        elif self._spec.create or grad.layout is not torch.strided or not _is_simple(leaf) or self._must_run_node(leaf):
            run_nodes.append((leaf, grad))
        else:
            add_to_grad(leaf, grad, shared=shared)

    def _run_nodes(self, leaves: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        create = self._spec.create
        with reducers.explaining(leaves):
            if not self._spec.into_grad:
                self._accumulate_aside(leaves, grads)
                return
            if not create and self._context.id != PLAIN:
                self._detach_grads(leaves)
            run_accumulation(leaves, grads, create=create)

    def _detach_grads(self, leaves: Sequence[torch.Tensor]) -> None:
        """Copy each ``.grad`` that an earlier pass recorded: the engine adds to ``.grad`` in place."""
        with _GradLock(leaves):
            for leaf in leaves:
                if leaf.is_leaf and leaf.grad is not None and leaf.grad.grad_fn is not None:
                    leaf.grad = leaf.grad.detach().clone()

    def keep(self, leaf: Wanted, grad: torch.Tensor, order: tuple[int, ...] = (), *, shared: bool = False) -> None:
        """Add to a leaf's gradient. ``shared``: other code may see the memory of ``grad``."""
        spec = self._spec
        if self._results is not None:
            self._results.accumulate(leaf, grad, None)
            return
        assert isinstance(leaf, torch.Tensor)
        own = not shared and is_own(grad)
        if spec.into_grad:
            if leaf.retains_grad:
                return  # retain_grad() has written .grad already
            with _GradLock([leaf]), torch.set_grad_enabled(spec.create), warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # torch warns about .grad of a tensor that is no leaf; the user asked for it
                seam.streams.adopt(leaf.grad)
                leaf.grad = add(leaf.grad, grad) if leaf.grad is not None or own else grad.clone()
            return
        hooks = leaf._post_accumulate_grad_hooks
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
        """Call post-accumulate hooks. They read ``.grad``, so put the gradient of the context there meanwhile."""
        with _GradLock([leaf]):
            aside, leaf.grad = leaf.grad, self._context.gradient(leaf)
            try:
                for hook in hooks:
                    hook(leaf)  # type: ignore[operator]
                self._context.replace(leaf, leaf.grad)
            finally:
                leaf.grad = aside

    def _accumulate_aside(self, leaves: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        """Run accumulation nodes for the context, with the leaves' own ``.grad`` set aside."""
        with _GradLock(leaves):
            aside = [leaf.grad for leaf in leaves]
            for leaf in leaves:  # hooks see the sum so far in .grad
                so_far = self._context.gradient(leaf)
                leaf.grad = None if so_far is None else so_far.clone()  # the engine adds in place
            try:
                run_accumulation(leaves, grads, create=self._spec.create)
                for leaf in leaves:
                    # A reducer may have made .grad a view of memory that it reuses.
                    own = leaf.grad if leaf.grad is None or leaf.grad._base is None else leaf.grad.clone()
                    self._context.replace(leaf, own)
            finally:
                for leaf, grad in zip(leaves, aside, strict=True):
                    leaf.grad = grad


def _is_simple(leaf: torch.Tensor) -> bool:
    """Whether ``add_to_grad`` does the same as the engine, provided that the node of the leaf has no hooks. The engine
    also orders the streams of devices.
    """
    if leaf._post_accumulate_grad_hooks or leaf.layout is not torch.strided or leaf.device.type != "cpu":
        return False
    grad = leaf.grad
    return grad is None or (grad.grad_fn is None and grad.layout is torch.strided)


def runs_node(leaf: torch.Tensor) -> bool:
    """Whether the accumulation node of ``leaf`` has hooks or a reducer, so that the node has to run."""
    if not (leaf.is_leaf and leaf.requires_grad):
        return False
    if reducers.module_of(leaf) is not None:
        return True
    if not node_hooks.possible:
        return False
    node: Node = leaf_edge(leaf).node
    return bool(node_hooks.of(node.register_hook) or node_hooks.of(node.register_prehook))
