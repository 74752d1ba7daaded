"""Replaces ``torch.distributed.autograd``."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from backhaul._autograd import api
from backhaul._autograd.backward.engine import Engine
from backhaul._autograd.context import Context
from backhaul._autograd.forward.functions import Recv, SendRecord, edge_of, recv_of
from backhaul._autograd.forward.recording import Scope, current_scope, enter
from backhaul._rpc.api import get_worker_info
from backhaul._runtime.compile_marks import graph_break
from backhaul._worker.worker import Worker, current_worker
from backhaul.compat import errors
from backhaul.errors import BackhaulError, ContextError, RemoteTraceback

_COUNTER_BITS = 48  # the low bits of a context id; the bits above are the id of the worker that made it


def is_available() -> bool:
    """Whether distributed autograd is available: always."""
    return True


class context:
    """A context for one training step. ``with`` returns its id."""

    @graph_break
    def __init__(self) -> None:
        self._inner = api.context()

    @graph_break
    def __enter__(self) -> int:
        try:
            with errors.rewording():
                return int(self._inner.__enter__())
        except ContextError as error:
            raise RuntimeError(f"Already have an autograd context id for this thread: {error.context}") from error

    @graph_break
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inner.__exit__(kind, error, trace)


@graph_break
def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """Compute the gradients of ``roots`` and add them to the context, on every worker that took part."""
    if not isinstance(context_id, int) or not isinstance(roots, (list, tuple)):
        raise TypeError("backward(): incompatible function arguments: takes a context id and a list of tensors")
    _check_roots(roots)
    try:
        with errors.rewording():
            api.backward(context_id, roots, retain_graph=retain_graph)
    except Exception as error:
        if isinstance(error.__cause__ or error, BackhaulError):
            raise
        worker = error.__cause__.worker if isinstance(error.__cause__, RemoteTraceback) else None
        raise RuntimeError(f"Error on Node {get_worker_info(worker).id}: {error}") from error


def _check_roots(roots: Sequence[Any]) -> None:
    if not roots:
        raise RuntimeError("No tensors provided for gradient computation.")
    for root in roots:
        if not root.requires_grad:
            raise RuntimeError("requires_grad not set on root")
        if root.numel() != 1:
            raise RuntimeError(f"{root.shape} is not a scalar, all roots need to be scalar")
        if root.grad_fn is None:
            raise RuntimeError("A root does not have a valid gradient function.")


@graph_break
def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients that a context holds on this worker: leaf -> gradient."""
    with errors.rewording():
        return api.get_gradients(context_id)


# Internals that the reference's tests inspect.


class _Function:
    """A node of the autograd graph. The nodes at the two ends of a message have the reference's names."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def __eq__(self, other: object) -> bool:
        return bool(self._node == (other._node if isinstance(other, _Function) else other))

    def __hash__(self) -> int:
        return hash(self._node)

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        return tuple(_edge(node, number) for node, number in self._node.next_functions)


class _RecvFunction:
    """The node at which a message was received."""

    def __init__(self, recv: Recv) -> None:
        self._recv = recv

    def name(self) -> str:
        return "torch::distributed::autograd::RecvRpcBackward"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _RecvFunction):
            return self._recv is other._recv
        found = recv_of(other)
        return found is not None and found[0] is self._recv

    def __hash__(self) -> int:
        return id(self._recv)


class _SendFunction:
    """The node at which a message was sent."""

    def __init__(self, record: SendRecord) -> None:
        self._record = record

    def name(self) -> str:
        return "torch::distributed::autograd::SendRpcBackward"

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        edges = [edge_of(end) for end in self._record.ends]
        return tuple(_edge(edge.node, edge.output_nr) for edge in edges)


def _edge(node: Any, number: int) -> tuple[Any, int]:
    found = recv_of(node) if node is not None else None
    return (_Function(node), number) if found is None else (_RecvFunction(found[0]), found[1])


class _ContextView:
    """A context on one worker, with the methods of the reference."""

    def __init__(self, inner: Context) -> None:
        self._inner = inner

    def _context_id(self) -> int:
        return int(self._inner.id)

    def _send_functions(self) -> dict[int, _SendFunction]:
        return {int(message): _SendFunction(record) for message, record in self._inner.sends.items()}

    def _recv_functions(self) -> dict[int, _RecvFunction]:
        return {int(message): _RecvFunction(recv) for message, recv in self._inner.recvs.items()}

    def _known_worker_ids(self) -> set[int]:
        return self._inner.known - {int(current_worker().info.id)}


def _engine(worker: Worker | None = None) -> Engine:
    with errors.rewording():
        return (worker or current_worker()).part(Engine)


def _init(worker_id: int) -> None:
    """Do nothing: Backhaul's autograd starts with the worker."""


def _new_context() -> _ContextView:
    """Make a context and make it the current one until ``_release_context``."""
    worker = current_worker()
    made = _engine(worker).container.new()
    enter(Scope(worker, made))
    return _ContextView(made)


def _release_context(context_id: int) -> None:
    """Release a context on every worker."""
    worker = current_worker()
    scope = current_scope(worker)
    if scope is not None and scope.context.id == context_id:
        enter(None)
    _engine(worker).release(context_id)


def _retrieve_context(context_id: int) -> _ContextView:
    with errors.rewording():
        return _ContextView(_engine().container.get(context_id))


def _current_context() -> _ContextView:
    scope = current_scope(current_worker())
    if scope is None:
        raise RuntimeError("There is no current autograd context.")
    return _ContextView(scope.context)


def _is_valid_context(context_id: int) -> bool:
    return _engine().container.find(context_id) is not None


def _get_max_id() -> int:
    return (int(current_worker().info.id) << _COUNTER_BITS) + (1 << _COUNTER_BITS) - 1


def _get_debug_info() -> dict[str, str]:
    counters = current_worker().counters
    return {name: str(counters[name]()) for name in ("num_current_backward_passes", "num_autograd_contexts")}
