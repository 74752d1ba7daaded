"""References to remote values, as the reference has them: its timeouts, its words, and what its tests look at."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from backhaul._rpc.api import rpc_sync
from backhaul._rpc.node import Node
from backhaul._rref import handle
from backhaul._rref.ownership import ForkId, RRefId, maker_of
from backhaul._rref.registry import RRefRegistry
from backhaul._runtime.compile_marks import graph_break
from backhaul._types import first_number
from backhaul._wire.pickling import builders, reducers
from backhaul._worker.worker import Worker
from backhaul.compat import autograd, errors
from backhaul.compat.rpc import agent, profiling
from backhaul.compat.rpc.constants import UNSET_RPC_TIMEOUT
from backhaul.compat.rpc.containers import copied
from backhaul.compat.rpc.futures import Future, follow
from backhaul.compat.rpc.info import WorkerInfo, as_reference
from backhaul.compat.rpc.internal import RPCExecMode
from backhaul.errors import CallTimeoutError, PeerLostError, UnknownWorkerError

T = TypeVar("T")

_COUNTER_BITS = 48  # of an id; those above are its maker's


# Over the limit because its methods are those of the reference's RRef.
class RRef(handle.RRef[T]):
    """A reference to a value on some worker."""

    __slots__ = ()

    def __init__(self, value: T, type_hint: type | None = None) -> None:
        agent.current()
        if isinstance(value, torch.jit.ScriptModule) and type_hint is None:
            raise RuntimeError(
                "The RRef being created contains a ScriptModule, must provide its ModuleInterface type hint."
            )
        super().__init__(value, type_hint)

    def owner(self) -> WorkerInfo:
        """The worker that the value lives on."""
        return as_reference(self._owner)

    def __repr__(self) -> str:
        if self._fork is None:
            return f"OwnerRRef({self._show(self._id)})"
        return f"UserRRef(RRefId = {self._show(self._id)}, ForkId = {self._show(self._fork)})"

    def _show(self, number: int) -> str:
        """An id as the reference shows it, which counts those of each worker from 0.

        Works at any time: errors that name a reference are raised after its worker was shut down, too.
        """
        maker, count = maker_of(number), number & (1 << _COUNTER_BITS) - 1
        with contextlib.suppress(UnknownWorkerError):  # the maker has left: where it began to count is not known
            count -= first_number(self._rrefs.worker.part(Node).peers.find(maker).record.incarnation)
        return f"GloballyUniqueId(created_on={maker}, local_id={count})"

    # The value.

    @graph_break
    def local_value(self) -> T:
        """The value itself, on its owner."""
        if self._entry is None:
            assert self._fork is not None
            raise RuntimeError(
                f"For UserRRef(rref_id={self._show(self._id)}, fork_id={self._show(self._fork)}), can't call "
                f"localValue() on user {as_reference(self._rrefs.worker.info)}. Call it on owner {self.owner()}"
            )
        with errors.rewording():
            return cast(T, copied(super().local_value()))

    @graph_break
    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:  # type: ignore[override]
        """A copy of the value; on its owner, the value itself."""
        self._check_alive("Cannot call to_here() on it after deletion.")
        self._check_created()
        with errors.rewording():
            return cast(T, copied(super().to_here(_limit(timeout))))

    def _ask(self, timeout: float | None = None) -> Future[T]:
        self._check_alive("Cannot call to_here() on it after deletion.")
        return follow(super()._ask(timeout))

    def _ask_owner(self) -> Future[T]:
        return follow(super()._ask_owner())

    def _check_alive(self, problem: str) -> None:
        if self._entry is None and self._rrefs.worker.closed:
            raise RuntimeError(f"{self} has been deleted. {problem}")

    def _check_created(self) -> None:
        try:
            super()._check_created()
        except (CallTimeoutError, PeerLostError) as error:
            raise RuntimeError(
                "RRef creation via rpc.remote() timed out, and it is possible that the RRef on the owner node does "
                f"not exist: {error}"
            ) from error

    @graph_break
    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run ``backward`` from the value, on its owner."""
        if self._entry is not None:
            backward_from(self, dist_autograd_ctx_id, retain_graph)
            return
        if dist_autograd_ctx_id == -1:
            raise RuntimeError("User RRefs require 'dist_autograd_ctx_id' to be specified")
        with errors.rewording():
            rpc_sync(self._owner, backward_from, (self, dist_autograd_ctx_id, retain_graph), timeout=0)

    # Calls.

    @graph_break
    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:  # type: ignore[override]
        """``rref.rpc_sync().method(...)`` calls a method of the value and waits for the result."""
        return _ReferenceProxy(
            lambda name, args, kwargs: follow(self._call(name, args, kwargs, _limit(timeout))).wait()
        )

    @graph_break
    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:  # type: ignore[override]
        """``rref.rpc_async().method(...)`` calls a method of the value and returns a future."""
        return _ReferenceProxy(lambda name, args, kwargs: follow(self._call(name, args, kwargs, _limit(timeout))))

    @graph_break
    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:  # type: ignore[override]
        """``rref.remote().method(...)`` calls a method of the value, and the result stays there."""

        def call(name: str, args: Any, kwargs: Any) -> RRef[Any]:
            kind = self._get_type(timeout)
            if not issubclass(kind, torch.jit.ScriptModule):
                getattr(kind, name)  # the reference notices at once if there is no such method
            inner = getattr(handle.RRef.remote(self, _limit(timeout)), name)
            return adopt(inner(*args, **kwargs))

        return _ReferenceProxy(call)

    # What the reference's tests look at.

    def _get_future(self) -> Future[Any]:
        """Done when the value is there."""
        made: Future[Any] = Future()
        if self._created is None:
            made.set_result(None)
            return made
        return follow(self._created)

    def _get_profiling_future(self) -> Future[Any]:
        """Done when what made the value is recorded in the profile, too."""
        return _recordings.get(self) or self._get_future()

    def _set_profiling_future(self, future: Future[Any]) -> None:
        _recordings[self] = future

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:  # type: ignore[override]
        """The type of the value, or a future of it, which is asked for once."""
        found = _types.get(self)
        if found is None:
            with errors.rewording():
                found = _types[self] = self._ask_for_type(_limit(timeout))
        try:
            return found.wait() if blocking else found
        except Exception:
            _types.pop(self, None)
            raise

    def _ask_for_type(self, limit: float | None) -> Future[Any]:
        if self._entry is not None or not profiling.is_on():
            return follow(super()._get_type(limit, blocking=False))
        name = "_rref_typeof_on_owner"
        ask = super()._get_type
        return profiling.record(RPCExecMode.ASYNC, name, self.owner(), None, lambda _: follow(ask(limit, False)))

    def _serialize(self) -> tuple[int, str, int, int]:
        """What to make another reference to the same value of; it counts as held by this worker."""
        self._check_alive("Cannot call fork an UserRRef after deletion.")
        self._check_created()
        fork = ForkId(self._rrefs.new_id())
        self._rrefs.notices.tell(self._identity, [("forked", self._id, fork, self._rrefs.identity)])
        return *self._identity, self._id, fork

    @staticmethod
    def _deserialize(data: tuple[int, str, int, int]) -> RRef[Any]:
        owner, incarnation, number, fork = data
        return adopt(handle._build(None, owner, incarnation, RRefId(number), ForkId(fork)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("Can not pickle rref in python pickler, rref can only be pickled when using RPC")


_recordings: weakref.WeakKeyDictionary[RRef[Any], Future[Any]] = weakref.WeakKeyDictionary()
_types: weakref.WeakKeyDictionary[RRef[Any], Future[Any]] = weakref.WeakKeyDictionary()


class _ReferenceProxy:
    """Stands for the value: its methods are calls."""

    def __init__(self, call: Callable[[str, Any, Any], Any]) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(self._run, name)

    @graph_break
    def _run(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        with errors.rewording():
            return self._call(name, args, kwargs)


_being_made: weakref.WeakSet[torch.futures.Future[Any]] = weakref.WeakSet()


def adopt(made: handle.RRef[T]) -> RRef[T]:
    """The same reference, with the reference's manners."""
    if made._created is not None:
        _being_made.add(made._created)
    made.__class__ = RRef
    assert isinstance(made, RRef)
    return made


def _limit(timeout: float) -> float | None:
    return None if timeout == UNSET_RPC_TIMEOUT else timeout


def backward_from(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    """Runs on the owner."""
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise RuntimeError("RRef should contain a tensor for .backward()")
    if context_id == -1:
        value.backward(retain_graph=retain_graph)
    else:
        autograd.backward(context_id, [value], retain_graph)


# Travelling.


def _arrive(owner: int, incarnation: str, number: int, fork: int) -> Any:
    """Stands in a message for a reference; the receiver calls ``_build`` in its place."""
    raise TypeError("a reference travels in calls only")


def _build(worker: Worker | None, owner: int, incarnation: str, number: RRefId, fork: ForkId) -> RRef[Any]:
    return adopt(handle._build(worker, owner, incarnation, number, fork))


def _reduce(rref: RRef[Any], parcels: list[Any]) -> Any:
    return _arrive, handle._reduce(rref, parcels)[1]


reducers[RRef] = _reduce
builders[_arrive.__module__, _arrive.__name__] = _build


def counters() -> dict[str, int]:
    """References and calls that make values, by the reference's names."""
    worker = agent.current().worker
    making = sum(not created.done() for created in _being_made)
    return {
        "num_owner_rrefs": len(worker.part(RRefRegistry).end()),  # the reference counts those that others refer to
        "num_forks": worker.counters["num_forks"](),
        "num_pending_users": making,
        "num_pending_futures": making,
    }
