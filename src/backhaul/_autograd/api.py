"""The autograd functions that users call. Each acts on the current worker."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import torch

from backhaul._autograd.backward.engine import Engine
from backhaul._autograd.context import Context
from backhaul._autograd.failure.replay import Replay
from backhaul._autograd.forward.recording import Scope, current_scope, enter, leave
from backhaul._autograd.graph_description import describe_everywhere
from backhaul._rpc.interceptors import extensions
from backhaul._runtime.compile_marks import graph_break
from backhaul._worker.worker import Worker, current_worker
from backhaul.errors import ContextError

extensions.append(lambda node: Engine(node).attach())

Mode = Literal["exact", "fast"]
Accumulate = Literal["context", "grad"]


class ContextHandle(int):
    """A context as users hold it. It is an ``int``, the id of the context, and can be used wherever an id is wanted.

    Example:
        >>> import torch, backhaul as bh
        >>> w = torch.ones(2, requires_grad=True)
        >>> with bh.cluster(2), bh.context() as ctx:
        ...     ctx.backward(bh.rpc_sync("worker1", torch.mul, args=(w, 3)).sum())
        ...     ctx.grads[w]
        tensor([3., 3.])
    """

    @property
    def id(self) -> int:
        """The id as a plain ``int``."""
        return int(self)

    @graph_break
    def backward(
        self,
        roots: torch.Tensor | Sequence[torch.Tensor],
        *,
        grad_tensors: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[torch.Tensor] | None = None,
        mode: Mode = "exact",
        accumulate: Accumulate = "context",
        deterministic: bool | None = None,
        timeout: float | None = None,
    ) -> None:
        """As ``backhaul.backward``. A single root needs no list."""
        backward(
            self,
            [roots] if isinstance(roots, torch.Tensor) else roots,
            grad_tensors=[grad_tensors] if isinstance(grad_tensors, torch.Tensor) else grad_tensors,
            retain_graph=retain_graph,
            create_graph=create_graph,
            inputs=inputs,
            mode=mode,
            accumulate=accumulate,
            deterministic=deterministic,
            timeout=timeout,
        )

    @property
    def grads(self) -> dict[torch.Tensor, torch.Tensor]:
        """See ``backhaul.get_gradients``."""
        return get_gradients(self)

    @graph_break
    def describe(self) -> dict[str, Any]:
        """The context's graph over all workers, as plain data.

        For each worker: the workers that it exchanged messages with, the messages that it sent and received, which of
        the sent messages run together, and the state of passes. This calls every worker that the context has reached.
        """
        return describe_everywhere(current_worker().part(Engine), int(self))

    def __repr__(self) -> str:
        return f"<context {int(self)}>"


class context:
    """A context for one training step: it keeps the calls made inside the block, and their gradients, apart.

    ``ctx.backward`` runs through these calls, and puts gradients into the context. Calls outside contexts need none:
    ``loss.backward()`` runs through them, and adds gradients to ``.grad``. A context is for gradients that must not go
    into ``.grad``, for ``replay``, and for passes with ``mode="fast"``.

    When the block ends, the context is released on every worker that it reached. Contexts do not nest in one thread or
    asyncio task. Many may be open at once in different threads or tasks.

    Args:
        replay: Let the step survive the loss of a worker: calls and ``backward`` wait for a worker that takes the lost
            one's place, run there again what the lost one had computed, and go on. Every request and the graph are kept
            until the block ends. ``True``, or a ``Replay`` that says how to restore the worker's state and how long to
            wait. ``docs/replay.md`` lists what is possible.

    Raises:
        ContextError: Another context is current in this thread or task.

    Example:
        >>> import torch, backhaul as bh
        >>> w = torch.ones(2, requires_grad=True)
        >>> with bh.cluster(2):
        ...     with bh.context() as ctx:
        ...         y = bh.rpc_sync("worker1", torch.mul, args=(w, 3))
        ...         bh.backward(ctx, [y.sum()])
        ...         bh.get_gradients(ctx)[w]
        tensor([3., 3.])
    """

    @graph_break
    def __init__(self, *, replay: bool | Replay = False) -> None:
        if not isinstance(replay, (bool, Replay)):
            raise TypeError(f"replay must be a bool or a Replay, not a {type(replay).__name__}")
        self._replay = Replay() if replay is True else replay or None
        self._worker: Worker | None = None
        self._context: Context | None = None
        self._token: contextvars.Token[Scope | None] | None = None

    @graph_break
    def __enter__(self) -> ContextHandle:
        worker = current_worker()
        engine = worker.part(Engine)
        if (outer := current_scope(worker)) is not None:
            raise ContextError(
                f"context {outer.context.id} is already current here; contexts do not nest: leave it first, or use "
                "another thread or task",
                worker=worker.name,
                context=outer.context.id,
            )
        self._worker = worker
        self._context = engine.container.new()
        if self._replay is not None:
            engine.recovery.begin(self._context, self._replay)
        self._token = enter(Scope(worker, self._context))
        return ContextHandle(self._context.id)

    @graph_break
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._token is not None
        assert self._worker is not None
        assert self._context is not None
        leave(self._token)
        if not self._worker.closed:
            self._worker.part(Engine).release(self._context.id)


@graph_break
def backward(
    context: int,
    roots: Sequence[torch.Tensor],
    *,
    grad_tensors: Sequence[torch.Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Sequence[torch.Tensor] | None = None,
    mode: Mode = "exact",
    accumulate: Accumulate = "context",
    deterministic: bool | None = None,
    timeout: float | None = None,
) -> None:
    """Compute the gradients of ``roots`` in a context, on every worker that took part in computing them.

    Once this returns, all gradients are in the context on the workers that hold the leaves (or in ``.grad``). Several
    passes on one context accumulate.

    Args:
        context: The context, as ``with bh.context()`` gave it.
        roots: Tensors of this worker that require grad.
        grad_tensors: Gradients of the roots, one for each; None only for roots with one element.
        retain_graph: Keep the graph for another pass. Default: the value of ``create_graph``.
        create_graph: Record the pass itself, so that gradients can be differentiated again.
        inputs: Compute only the gradients of these tensors of this worker, and only what leads to them.
        mode: ``"exact"`` asks workers which messages take part in the pass and waits for those. ``"fast"`` assumes that
            every message of the context takes part, and does not ask. If one does not, the pass ends by its timeout.
        accumulate: ``"context"`` sums gradients in the context, ``"grad"`` in the leaves' ``.grad``.
        deterministic: Sum contributions in program order, so that two runs give the same bits. Default: what
            ``torch.use_deterministic_algorithms`` was set to.
        timeout: Seconds that the pass may take; 0: without limit. Default: ``Options.backward_timeout``.

    Raises:
        Exception: What a backward function raised on any worker, with its remote traceback. A note names the worker,
            the context and the message.
        UnknownContextError: The context was released or is not known here.
        ForeignGraphError: A gradient would have to go through a tensor received in another context, or outside any.
        GraphFreedError: An earlier pass freed the graph.
        BackwardTimeoutError: The pass took longer than ``timeout``.
        PeerLostError: A worker that takes part in the pass is lost.

    Example:
        >>> import torch, backhaul as bh
        >>> w = torch.ones(2, requires_grad=True)
        >>> with bh.cluster(2), bh.context() as ctx:
        ...     y = bh.rpc_sync("worker1", torch.mul, args=(w, 3))
        ...     bh.backward(ctx, [y], grad_tensors=[torch.tensor([1.0, 10.0])])
        ...     bh.get_gradients(ctx)[w]
        tensor([ 3., 30.])
    """
    worker = current_worker()
    engine = worker.part(Engine)
    found = engine.container.get(_context_id(context))
    if mode not in ("exact", "fast"):
        raise ValueError(f"mode must be 'exact' or 'fast', got {mode!r}")
    if accumulate not in ("context", "grad"):
        raise ValueError(f"accumulate must be 'context' or 'grad', got {accumulate!r}")
    limit = worker.options.backward_timeout if timeout is None else timeout
    if limit < 0:
        raise ValueError(f"timeout must not be negative, got {limit}; 0 means no limit")
    roots = _check_roots(roots)
    run = engine.backward if found.replay is None else engine.recovery.backward
    run(
        found,
        roots,
        _seeds(roots, grad_tensors, create_graph),
        inputs=_check_inputs(inputs),
        timeout=limit,
        retain=create_graph if retain_graph is None else retain_graph,
        create=create_graph,
        fast=mode == "fast",
        into_grad=accumulate == "grad",
        deterministic=torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
    )


def _context_id(context: Any) -> int:
    if not isinstance(context, int) or isinstance(context, bool):
        raise TypeError(f"context must be the id of a context, not a {type(context).__name__}")
    return int(context)


def _check_roots(roots: Any) -> list[torch.Tensor]:
    if isinstance(roots, torch.Tensor) or not isinstance(roots, Sequence):
        raise TypeError(f"roots must be a list of tensors, not a {type(roots).__name__}")
    if not roots:
        raise ValueError("roots is empty: backward needs at least one root")
    for index, root in enumerate(roots):
        if not isinstance(root, torch.Tensor):
            raise TypeError(f"roots[{index}] is a {type(root).__name__}, not a tensor of this worker")
        if not root.requires_grad:
            raise ValueError(
                f"roots[{index}] does not require grad: it was computed under no_grad, or from tensors that do not "
                "require grad"
            )
    return list(roots)


def _seeds(
    roots: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None] | None, create: bool
) -> list[torch.Tensor]:
    if given is not None and len(given) != len(roots):
        raise ValueError(f"there are {len(roots)} roots but {len(given)} grad_tensors; pass one for each root")
    seeds = []
    for index, root in enumerate(roots):
        seed = given[index] if given is not None else None
        if seed is None:
            if root.numel() != 1:
                raise ValueError(f"roots[{index}] has {root.numel()} elements; pass grad_tensors for non-scalar roots")
            if root.is_complex():
                raise ValueError(f"roots[{index}] is complex; pass grad_tensors for complex roots")
            seed = torch.ones_like(root, memory_format=torch.preserve_format)
        elif seed.shape != root.shape:
            raise ValueError(
                f"grad_tensors[{index}] has shape {tuple(seed.shape)}, but roots[{index}] has {tuple(root.shape)}"
            )
        seeds.append(seed if create else seed.detach())
    return seeds


def _check_inputs(inputs: Any) -> list[torch.Tensor] | None:
    if inputs is None:
        return None
    if isinstance(inputs, torch.Tensor):
        inputs = [inputs]
    if not inputs:
        raise ValueError("inputs is empty; pass None to compute all gradients")
    for index, tensor in enumerate(inputs):
        if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
            raise ValueError(f"inputs[{index}] is not a tensor that requires grad")
    return list({id(tensor): tensor for tensor in inputs}.values())


@graph_break
def get_gradients(context: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients that a context holds on this worker: leaf -> gradient.

    The dict is a copy: a later pass does not change it.

    Raises:
        UnknownContextError: The context was released or is not known here.

    Example:
        >>> import torch, backhaul as bh
        >>> w = torch.ones(2, requires_grad=True)
        >>> with bh.cluster(2), bh.context() as ctx:
        ...     ctx.backward(bh.rpc_sync("worker1", torch.mul, args=(w, 3)).sum())
        ...     list(bh.get_gradients(ctx).values())
        [tensor([3., 3.])]
    """
    return dict(current_worker().part(Engine).container.get(_context_id(context)).gradients)


# For the layers above.


def passes_started() -> int:
    """How many backward passes the current worker has started. Another pass may have changed ``.grad`` of leaves."""
    return current_worker().part(Engine).latest_pass


def passes_ended(worker: Worker) -> int:
    """How many backward passes of a worker have ended. Each may have changed ``.grad`` of leaves on any worker."""
    return worker.part(Engine).passes_ended


@contextlib.contextmanager
def undoing_passes(worker: Worker) -> Iterator[None]:
    """A pass of the worker that fails inside this block leaves no task on it that would still add to ``.grad``."""
    engine = worker.part(Engine)
    engine.undoing += 1
    try:
        yield
    finally:
        engine.undoing -= 1


def find_gradients(context: int) -> dict[torch.Tensor, torch.Tensor] | None:
    """As ``get_gradients``; None if no call of the context has reached this worker, so that it holds no gradients here.

    Raises:
        UnknownContextError: The context was released.
    """
    container = current_worker().part(Engine).container
    found = container.find(_context_id(context))
    if found is None and container.was_released(context):
        raise container.unknown(context)
    return None if found is None else dict(found.gradients)


def replace_gradients(context: int, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Replace some of the gradients that a context holds on this worker. The others stay.

    Raises:
        UnknownContextError: The context was released or is not known here.
    """
    found = current_worker().part(Engine).container.get(_context_id(context))
    for leaf, gradient in gradients.items():
        found.replace(leaf, gradient)
