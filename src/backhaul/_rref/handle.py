"""The reference that users hold, and how it travels. What the owner does is in ``owner_calls``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar, cast

import torch

from backhaul._rpc.futures import Future, Kept
from backhaul._rref.execution import relay
from backhaul._rref.history import detached, keeps_history
from backhaul._rref.method_calls import MethodCalls, MethodsOfValue
from backhaul._rref.owned_values import Entry
from backhaul._rref.owner_calls import Named, backward_of, fetch, invoke, run_backward, type_of
from backhaul._rref.ownership import ForkId, Identity, RRefId, maker_of
from backhaul._rref.registry import RRefRegistry, current_rrefs
from backhaul._runtime.compile_marks import graph_break
from backhaul._types import WorkerInfo
from backhaul._wire.callables import label_of, name_of
from backhaul._wire.pickling import builders, reducers
from backhaul._worker.worker import Worker, current_worker
from backhaul.errors import BackhaulError, CallTimeoutError

T = TypeVar("T")
Call = Callable[..., Any]


# Over the limit because its public methods are those of torch's RRef, and each waits or returns a future.
class RRef(Generic[T]):
    """A reference to a value on some worker, its *owner*. ``RRef(value)`` refers to a value of this worker. ``remote``
    makes values on other workers.

    References travel in calls, as arguments and results. The value stays on its owner. The owner drops it when the
    last reference to it, on any worker, is deleted.

    Example:
        >>> import torch, backhaul as bh
        >>> with bh.cluster(2):
        ...     rref = bh.remote("worker1", torch.add, args=(torch.ones(2), 1))
        ...     rref.to_here(), rref.owner_name(), rref.rpc_sync().sum()
        (tensor([2., 2.]), 'worker1', tensor(4.))
    """

    __slots__ = ("__weakref__", "_created", "_entry", "_fork", "_id", "_identity", "_owner", "_rrefs", "_type")

    _rrefs: RRefRegistry
    _id: RRefId
    _owner: WorkerInfo
    _identity: Identity  # of the owner
    _entry: Entry | None  # on the owner
    _fork: ForkId | None  # on other workers
    _created: Future[Any] | None  # on the worker that called ``remote``: done when the value is there
    _type: type | None

    @graph_break
    def __init__(self, value: T, type_hint: type | None = None) -> None:
        rrefs = current_rrefs()
        entry = rrefs.add_handle(RRefId(rrefs.new_id()), id(self))
        self._set(rrefs, entry.id, rrefs.worker.info, rrefs.identity, entry=entry)
        entry.value.set_result(value)

    def _set(
        self,
        rrefs: RRefRegistry,
        number: RRefId,
        owner: WorkerInfo,
        identity: Identity,
        *,
        entry: Entry | None = None,
        fork: ForkId | None = None,
    ) -> None:
        self._rrefs = rrefs
        self._id = number
        self._owner = owner
        self._identity = identity
        self._entry = entry
        self._fork = fork
        self._created = None
        self._type = None

    def __del__(self) -> None:
        try:
            entry, fork = self._entry, self._fork
        except AttributeError:  # __init__ raised
            return
        if entry is not None:
            entry.handles.pop(id(self), None)
            if entry.unreferenced:
                self._rrefs.cleaner.put(entry)
        elif fork is not None and self._rrefs.held.lent.pop(fork, None) is None:
            self._rrefs.cleaner.put((self._identity, self._id, fork))

    # The owner.

    def owner(self) -> WorkerInfo:
        """The worker that has the value."""
        return self._owner

    def owner_name(self) -> str:
        """The name of the owner."""
        return self._owner.name

    def is_owner(self) -> bool:
        """Whether this worker is the owner."""
        return self._entry is not None

    def confirmed_by_owner(self) -> bool:
        """Whether this worker knows that the owner has made the value, or has tried and failed."""
        created = self._created
        return created is None or (created.done() and created._failure() is None)

    def __repr__(self) -> str:
        number = f"RRefId = {_show(self._id)}"
        return f"OwnerRRef({number})" if self._fork is None else f"UserRRef({number}, ForkId = {_show(self._fork)})"

    # The value.

    @graph_break
    def local_value(self) -> T:
        """The value itself, on its owner.

        Raises:
            BackhaulError: This worker is not the owner.
        """
        if self._entry is None:
            raise BackhaulError(
                f"the value of {self} is on worker '{self.owner_name()}', not on '{self._rrefs.worker.name}': "
                "call local_value() on its owner, or to_here() for a copy",
                worker=self._rrefs.worker.name,
            )
        return cast(T, self._entry.value.wait())

    @graph_break
    def to_here(self, timeout: float | None = None) -> T:
        """A copy of the value; on its owner, the value itself. The copy is part of the graph. Under
        ``torch.no_grad()`` it requires no grad: on the owner, tensors (alone or in lists, tuples and dicts) are
        detached.

        Args:
            timeout: Seconds to wait; 0: without limit; None: the worker's default.

        Raises:
            Exception: What the function that was to make the value raised.

        Example:
            >>> import torch, backhaul as bh
            >>> x = torch.ones(2, requires_grad=True)
            >>> with bh.cluster(2):
            ...     rref = bh.remote("worker1", torch.mul, args=(x, 3))
            ...     rref.to_here().sum().backward()
            ...     x.grad
            tensor([3., 3.])
        """
        if self._entry is not None:
            limit = self._rrefs.client.timeout if timeout is None else timeout
            try:
                value: T = self._entry.value.wait(limit or None)
                return value if keeps_history(self._rrefs.worker) else detached(value)
            except TimeoutError as error:
                if self._entry.value.done() or isinstance(error, CallTimeoutError):
                    raise  # making the value raised it, or the deadline of the current scope has passed
                raise CallTimeoutError(
                    f"the value of {self} was not there within {limit:g} s", worker=self.owner_name(), timeout=limit
                ) from error
        self._check_created()
        copy: T = self._rrefs.client.call(self._owner.id, fetch, self._named(), None, timeout, label="to_here")
        self._created = None  # the value is there
        return copy

    @property
    def _held(self) -> torch.futures.Future[RRef[T]]:
        """What TorchScript holds of a reference; see ``jit.references``."""
        held: torch.futures.Future[RRef[T]] = torch.futures.Future()
        held.set_result(self)
        return held

    def _ask(self, timeout: float | None = None) -> Future[T]:
        """As ``to_here``, but returns a future at once."""
        future: Future[T]
        if self._entry is not None:
            limit = self._rrefs.client.timeout if timeout is None else timeout
            value = self._entry.value
            future = cast("Future[T]", value if value.done() or not limit else _within(self, value, limit))
            if not keeps_history(self._rrefs.worker):
                future = future.then(lambda done: detached(done.value()))
        else:
            self._check_created()
            future = self._rrefs.client.call_async(self._owner.id, fetch, self._named(), None, timeout, label="to_here")
        keep_until(self, future)
        return future

    def _ask_owner(self) -> Future[T]:
        """As ``local_value``, but returns a future at once."""
        assert self._entry is not None
        future = cast("Future[T]", self._entry.value)
        keep_until(self, future)
        return future

    def _there(self) -> Future[RRef[T]]:
        """A future of this reference that is done when the value is there, or could not be made."""
        made: Future[Any] | None = self._created if self._entry is None else self._entry.value
        if made is None:
            made = Future()
            made.set_result(None)
        return made.then(lambda done: (done.value(), self)[1])

    def _check_created(self) -> None:
        if self._created is not None and self._created.done():
            error = self._created._failure()
            if error is not None:
                raise error

    @graph_break
    def _get_type(self, timeout: float | None = None, blocking: bool = True) -> Any:
        """The type of the value, or a future of it."""
        if self._type is not None and blocking:
            return self._type
        if self._entry is not None:
            found: Future[Any] = self._entry.value.then(lambda done: type(done.value()))
        else:
            found = self._rrefs.client.call_async(self._owner.id, type_of, self._named(), None, timeout)
        if not blocking:
            return found
        self._type = found.wait()
        return self._type

    @graph_break
    def backward(self, context: int = -1, retain_graph: bool = False) -> None:
        """Run ``backward`` from the value, on its owner. The pass goes over all workers.

        Args:
            context: The context to run it in, see ``backhaul.backward``; -1: run ``value.backward()``.
            retain_graph: Keep the graph for another pass.
        """
        if self._entry is not None:
            run_backward(self._entry.value.wait(), context, retain_graph)
        else:
            self._check_created()
            self._rrefs.client.call(self._owner.id, backward_of, (*self._named(), context, retain_graph), None, 0)

    # Calls.

    @graph_break
    def rpc_sync(self, timeout: float | None = None) -> T:
        """``rref.rpc_sync().method(...)`` calls a method of the value on its owner, and waits for the result."""
        return MethodCalls(self._call_and_wait, timeout)  # type: ignore[return-value]  # stands for the value

    @graph_break
    def rpc_async(self, timeout: float | None = None) -> MethodsOfValue[Future[Any]]:
        """``rref.rpc_async().method(...)`` calls a method of the value on its owner, and returns a future."""
        return MethodCalls(self._call, timeout)

    @graph_break
    def remote(self, timeout: float | None = None) -> MethodsOfValue[RRef[Any]]:
        """``rref.remote().method(...)`` calls a method of the value on its owner. The result stays there;
        returns a reference to it.
        """
        return MethodCalls(self._make, timeout)

    def _named(self) -> Named:
        """The arguments by which the owner finds the value. Raises ``PeerLostError`` if the owner is gone for good."""
        fork, rrefs = self._fork, self._rrefs
        if fork is None:
            return self._id, -1, *rrefs.identity, self._identity[1]
        rrefs.held.check(fork, self._owner.name)
        return self._id, fork, *rrefs.identity, self._identity[1]

    def _invocation(self, what: str | Call, args: Iterable[Any]) -> tuple[Any, ...]:
        """The arguments of ``invoke``."""
        if self._created is not None:
            self._check_created()
        return *self._named(), what if isinstance(what, str) else name_of(what) or what, *args

    @graph_break
    def _call(
        self,
        what: str | Call,
        args: Iterable[Any],
        kwargs: Any,
        timeout: float | None,
        *,
        label: str | None = None,
        future: Future[Any] | None = None,
    ) -> Future[Any]:
        """Call a method of the value, or a function with the value and the arguments, on the owner. Profiles and
        errors show ``label``. ``future``: the one to complete.
        """
        arguments = self._invocation(what, args)
        made = self._rrefs.client.call_async(
            self._owner.id, invoke, arguments, kwargs or None, timeout, label=label or label_of(what), future=future
        )
        keep_until(self, made)
        return made

    @graph_break
    def _call_and_wait(
        self, what: str | Call, args: Iterable[Any], kwargs: Any, timeout: float | None, *, label: str | None = None
    ) -> Any:
        """As ``_call``, but waits for the result."""
        arguments = self._invocation(what, args)
        return self._rrefs.client.call(
            self._owner.id, invoke, arguments, kwargs or None, timeout, label=label or label_of(what)
        )

    def _make(self, what: str, args: Iterable[Any], kwargs: Any, timeout: float | None) -> RRef[Any]:
        """As ``_call``, but the result stays on the owner. Returns a reference to it."""
        from backhaul._rref.remote import make_remote

        made: RRef[Any] = make_remote(
            self._owner.id, invoke, self._invocation(what, args), kwargs or None, timeout, label=what
        )
        if made._created is not None:
            keep_until(self, made._created)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a reference travels in calls only; it cannot be pickled, copied or saved")


def keep_until(rref: RRef[Any], done: Future[Any]) -> None:
    """Keep a reference until a call on its value is over: the value must live that long, even if the user deletes the
    reference.
    """

    def let_go(_: Any, keep: RRef[Any] = rref) -> None: ...

    done._when_done(let_go)


def _within(rref: RRef[Any], value: Future[Any], limit: float) -> Future[Any]:
    """A value of this worker that fails if it is not there within ``limit`` seconds."""
    made: Future[Any] = Kept()  # by the timer
    relay(value, made)
    text, name = f"the value of {rref} was not there within {limit:g} s", rref.owner_name()

    def give_up() -> None:
        if not made.done():
            made.set_exception(CallTimeoutError(text, worker=name, timeout=limit))

    worker = rref._rrefs.worker
    worker.thread_pool.call_at(worker.runtime.now() + limit, give_up)
    return made


def _show(number: int) -> str:
    return f"GloballyUniqueId(created_on={maker_of(number)}, local_id={number & (1 << 48) - 1})"


def make_handle(
    rrefs: RRefRegistry,
    number: RRefId,
    owner: WorkerInfo,
    identity: Identity,
    *,
    entry: Entry | None = None,
    fork: ForkId | None = None,
) -> RRef[Any]:
    """A handle to an entry of this worker, or of a fork."""
    made: RRef[Any] = RRef.__new__(RRef)
    if entry is not None:
        entry.handles[id(made)] = None
    made._set(rrefs, number, owner, identity, entry=entry, fork=fork)
    return made


# Travelling.


def _arrive(owner: int, incarnation: str, number: int, fork: int, via: int) -> Any:
    """Stands for a reference in a message. The receiver calls ``_build`` instead."""
    raise TypeError("a reference travels in calls only")


def _build(  # noqa: PLR0917 (the receiver's worker, then what is in the message)
    worker: Worker | None, owner: int, incarnation: str, number: RRefId, fork: ForkId, via: ForkId | None = None
) -> RRef[Any]:
    rrefs, identity = (worker or current_worker()).part(RRefRegistry), (owner, incarnation)
    made: RRef[Any] = RRef.__new__(RRef)
    info, entry = rrefs.arrive(id(made), identity, number, fork, via)
    made._set(rrefs, number, info, identity, entry=entry, fork=None if entry is not None else fork)
    return made


def _reduce(rref: RRef[Any], parcels: list[Any]) -> Any:
    if rref._created is not None:
        rref._check_created()
    own, rrefs = rref._fork, rref._rrefs
    if own is not None:
        rrefs.held.check(own, rref._owner.name)
    fork = ForkId(rrefs.new_id())
    parcels.append((rref, fork))
    return _arrive, (*rref._identity, rref._id, fork, -1 if own is None else own)


reducers[RRef] = _reduce
builders[_arrive.__module__, _arrive.__name__] = _build
