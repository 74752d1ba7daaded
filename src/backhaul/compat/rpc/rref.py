"""RRefs with the reference's timeouts, error texts, and the internals that its tests inspect."""

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
from backhaul.compat.rpc.containers import unshare
from backhaul.compat.rpc.futures import CallFuture, Future, follow
from backhaul.compat.rpc.info import WorkerInfo, as_reference
from backhaul.compat.rpc.internal import RPCExecMode
from backhaul.errors import CallTimeoutError, PeerLostError, UnknownWorkerError

T = TypeVar("T")

_COUNTER_BITS = 48  # the low bits of an id; the bits above are the id of the worker that made it


# Over the limit because it has the methods of the reference's RRef and overrides those of ``handle.RRef``.
class RRef(handle.RRef[T]):
    """A reference to a value on a worker."""

    __slots__ = ()

    def __init__(self, value: T, type_hint: type | None = None) -> None:
        agent.current()
        if isinstance(value, torch.jit.ScriptModule) and type_hint is None:
            raise RuntimeError(
                "The RRef being created contains a ScriptModule, must provide its ModuleInterface type hint."
            )
        super().__init__(value, type_hint)

    def owner(self) -> WorkerInfo:
        """The worker that owns the value."""
        return as_reference(self._owner)

    def __repr__(self) -> str:
        if self._fork is None:
            return f"OwnerRRef({self._format_id(self._id)})"
        return f"UserRRef(RRefId = {self._format_id(self._id)}, ForkId = {self._format_id(self._fork)})"

    def _format_id(self, number: int) -> str:
        """An id in the reference's format, which counts the ids of each worker from 0.

        Works after the worker was shut down, too, because errors that name an RRef may be raised then.
        """
        maker, count = maker_of(number), number & (1 << _COUNTER_BITS) - 1
        with contextlib.suppress(UnknownWorkerError):  # the maker has left, and its first number is not known any more
            count -= first_number(self._rrefs.worker.part(Node).peers.find(maker).record.incarnation)
        return f"GloballyUniqueId(created_on={maker}, local_id={count})"

    # The value.

    @graph_break
    def local_value(self) -> T:
        """The value itself. Only its owner can call this."""
        if self._entry is None:
            assert self._fork is not None
            raise RuntimeError(
                f"For UserRRef(rref_id={self._format_id(self._id)}, fork_id={self._format_id(self._fork)}), can't call "
                f"localValue() on user {as_reference(self._rrefs.worker.info)}. Call it on owner {self.owner()}"
            )
        with errors.rewording():
            return cast(T, unshare(super().local_value()))

    @graph_break
    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:  # type: ignore[override]
        """A copy of the value; on its owner, the value itself."""
        self._check_alive("Cannot call to_here() on it after deletion.")
        self._check_created()
        with errors.rewording():
            return cast(T, unshare(super().to_here(_timeout_or_none(timeout))))

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
        """Run ``backward`` on the owner, with the value as the root."""
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
        return _ReferenceProxy(self._call_and_wait, _timeout_or_none(timeout))

    @graph_break
    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:  # type: ignore[override]
        """``rref.rpc_async().method(...)`` calls a method of the value and returns a future."""
        return _ReferenceProxy(self._follow_call, _timeout_or_none(timeout))

    @graph_break
    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:  # type: ignore[override]
        """``rref.remote().method(...)`` calls a method of the value and returns an RRef to the result."""
        return _ReferenceProxy(self._adopt_made, _timeout_or_none(timeout))

    def _follow_call(self, what: str, args: Any, kwargs: Any, timeout: float | None) -> Future[Any]:
        made: CallFuture[Any] = CallFuture()
        self._call(what, args, kwargs, timeout, future=made)
        return made

    def _adopt_made(self, what: str, args: Any, kwargs: Any, timeout: float | None) -> RRef[Any]:
        value_type = self._get_type(UNSET_RPC_TIMEOUT if timeout is None else timeout)
        if not issubclass(value_type, torch.jit.ScriptModule):
            getattr(value_type, what)  # raises at once, as the reference does, if there is no such method
        return adopt(self._make(what, args, kwargs, timeout))

    # Internals that the reference's tests inspect.

    def _get_future(self) -> Future[Any]:
        """Done when the owner has the value."""
        made: Future[Any] = Future()
        if self._created is None:
            made.set_result(None)
            return made
        return follow(self._created)

    def _get_profiling_future(self) -> Future[Any]:
        """Done when the owner has the value and the profile has the events of the call that made it."""
        return _recordings.get(self) or self._get_future()

    def _set_profiling_future(self, future: Future[Any]) -> None:
        _recordings[self] = future

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:  # type: ignore[override]
        """The type of the value, or a future of it. The owner is asked only once."""
        found = _types.get(self)
        if found is None:
            with errors.rewording():
                found = _types[self] = self._ask_for_type(_timeout_or_none(timeout))
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
        """The data from which ``_deserialize`` makes another RRef to the value. This worker holds it until then."""
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
    """Turns method calls into calls of the value's methods on its owner."""

    __slots__ = ("__call", "__timeout")

    def __init__(self, call: Callable[[str, Any, Any, float | None], Any], timeout: float | None) -> None:
        self.__call = call
        self.__timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(self.__run, name)

    @graph_break
    def __run(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.__call(name, args, kwargs, self.__timeout)
        except errors.CONVERTED as error:
            errors.raise_reworded(error)


_creations: weakref.WeakSet[torch.futures.Future[Any]] = weakref.WeakSet()  # calls that make values, until freed


def adopt(rref: handle.RRef[T]) -> RRef[T]:
    """Turn an RRef of Backhaul into one of this class. It stays the same object."""
    if rref._created is not None:
        _creations.add(rref._created)
    rref.__class__ = RRef
    assert isinstance(rref, RRef)
    return rref


def _timeout_or_none(timeout: float) -> float | None:
    return None if timeout == UNSET_RPC_TIMEOUT else timeout


def backward_from(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    """Run ``backward`` with the value as the root. Runs on the owner."""
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise RuntimeError("RRef should contain a tensor for .backward()")
    if context_id == -1:
        value.backward(retain_graph=retain_graph)
    else:
        autograd.backward(context_id, [value], retain_graph)


# Sending RRefs in messages.


def _rebuild(owner: int, incarnation: str, number: int, fork: int, via: int) -> Any:
    """Names an RRef in a pickled message. The receiver calls ``_build`` in its place."""
    raise TypeError("an RRef can be unpickled only from a message: send it as an argument or result of a call")


def _build(  # noqa: PLR0917 (in a message)
    worker: Worker | None, owner: int, incarnation: str, number: RRefId, fork: ForkId, via: ForkId
) -> RRef[Any]:
    return adopt(handle._build(worker, owner, incarnation, number, fork, via))


def _reduce(rref: RRef[Any], parcels: list[Any]) -> Any:
    return _rebuild, handle._reduce(rref, parcels)[1]


reducers[RRef] = _reduce
builders[_rebuild.__module__, _rebuild.__name__] = _build


def counters() -> dict[str, int]:
    """The numbers of RRefs and of calls that make values, under the reference's names."""
    worker = agent.current().worker
    pending = sum(not created.done() for created in _creations)
    return {
        "num_owner_rrefs": len(worker.part(RRefRegistry).end()),  # the reference counts values that others refer to
        "num_forks": worker.counters["num_forks"](),
        "num_pending_users": pending,
        "num_pending_futures": pending,
    }
