"""The reference that users hold, and calls on the value behind it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from backhaul._autograd.api import backward
from backhaul._rpc.calls.server import answers_later, async_execution, run_here
from backhaul._rpc.futures import Future, Kept
from backhaul._rpc.node import Node
from backhaul._rref.ownership import ForkId, Life, OwnerEntry, RRefId, maker_of
from backhaul._rref.registry import RRefRegistry, current_rrefs
from backhaul._runtime.compile_marks import graph_break
from backhaul._types import WorkerInfo
from backhaul._wire.callables import label_of
from backhaul._wire.pickling import builders, reducers
from backhaul._worker.worker import Worker, current_worker
from backhaul.errors import BackhaulError, CallTimeoutError

T = TypeVar("T")
Call = Callable[..., Any]
Named = tuple[int, int, int, str, str]
"""Value, fork (-1: the owner's own), id and incarnation of its holder, and the incarnation that owns the value."""


class RRef(Generic[T]):
    """A reference to a value on some worker, its *owner*. ``RRef(value)`` makes one to a value of this worker's;
    ``remote`` makes values elsewhere.

    References travel in calls, as arguments and results, and wherever they go the value stays where it is. It is
    dropped when the last of them is gone, on whatever worker.

    Example:
        >>> import torch, backhaul as bh
        >>> with bh.cluster(2):
        ...     rref = bh.remote("worker1", torch.add, args=(torch.ones(2), 1))
        ...     rref.to_here(), rref.owner_name(), rref.rpc_sync().sum()
        (tensor([2., 2.]), 'worker1', tensor(4.))
    """

    __slots__ = ("__weakref__", "_created", "_entry", "_fork", "_id", "_life", "_owner", "_rrefs", "_type")

    _rrefs: RRefRegistry
    _id: RRefId
    _owner: WorkerInfo
    _life: Life  # of the owner's
    _entry: OwnerEntry[Future[Any]] | None  # on the owner
    _fork: ForkId | None  # elsewhere
    _created: Future[Any] | None  # where ``remote`` was called: done when the value is there
    _type: type | None

    @graph_break
    def __init__(self, value: T, type_hint: type | None = None) -> None:
        rrefs = current_rrefs()
        entry = rrefs.own(RRefId(rrefs.new_id()))
        self._set(rrefs, entry.id, rrefs.worker.info, rrefs.life, entry=entry)
        entry.value.set_result(value)

    def _set(
        self,
        rrefs: RRefRegistry,
        number: RRefId,
        owner: WorkerInfo,
        life: Life,
        *,
        entry: OwnerEntry[Future[Any]] | None = None,
        fork: ForkId | None = None,
    ) -> None:
        self._rrefs = rrefs
        self._id = number
        self._owner = owner
        self._life = life
        self._entry = entry
        self._fork = fork
        self._created = None
        self._type = None

    def __del__(self) -> None:
        try:
            if self._entry is not None:
                self._rrefs.bury((self._entry,))
            elif self._fork is not None:
                self._rrefs.bury((self._life, self._id, self._fork))
        except AttributeError:  # never completed
            pass

    # Where it is.

    def owner(self) -> WorkerInfo:
        """The worker that the value lives on."""
        return self._owner

    def owner_name(self) -> str:
        """The name of that worker."""
        return self._owner.name

    def is_owner(self) -> bool:
        """Whether that worker is this one."""
        return self._entry is not None

    def confirmed_by_owner(self) -> bool:
        """Whether the owner is known to have the value, or to have failed to make it."""
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
                "local_value() is for its owner, to_here() brings a copy",
                worker=self._rrefs.worker.name,
            )
        return cast(T, self._entry.value.wait())

    @graph_break
    def to_here(self, timeout: float | None = None) -> T:
        """A copy of the value; on its owner, the value itself. Part of the graph, inside a context. Under
        ``torch.no_grad()`` it needs no gradient: its owner gets tensors, alone or in lists, tuples and dicts, detached.

        Args:
            timeout: Seconds to wait; 0: for ever; None: the worker's default.

        Raises:
            Exception: What the function raised that was to make the value.
        """
        if self._entry is not None:
            limit = self._rrefs.client.timeout if timeout is None else timeout
            try:
                value: T = self._entry.value.wait(limit or None)
                return value if keeps_history(self._rrefs) else detached(value)
            except TimeoutError as error:
                if self._entry.value.done() or isinstance(error, CallTimeoutError):
                    raise  # that is how it was made, or it is the deadline of what runs here
                raise CallTimeoutError(
                    f"the value of {self} was not there within {limit:g} s", worker=self.owner_name(), timeout=limit
                ) from error
        self._check_created()
        copy: T = self._rrefs.client.call(self._owner.id, fetch, self._named(), None, timeout, label="to_here")
        self._created = None  # it is there
        return copy

    @property
    def _held(self) -> torch.futures.Future[RRef[T]]:
        """What script holds of a reference; see ``jit.references``."""
        held: torch.futures.Future[RRef[T]] = torch.futures.Future()
        held.set_result(self)
        return held

    def _ask(self, timeout: float | None = None) -> Future[T]:
        """As ``to_here``, for those who cannot wait: a future of the value."""
        future: Future[T]
        if self._entry is not None:
            limit = self._rrefs.client.timeout if timeout is None else timeout
            value = self._entry.value
            future = cast("Future[T]", value if value.done() or not limit else self._within(limit))
            if not keeps_history(self._rrefs):
                future = future.then(lambda done: detached(done.value()))
        else:
            self._check_created()
            future = self._rrefs.client.call_async(self._owner.id, fetch, self._named(), None, timeout, label="to_here")
        self._keep_until(future)
        return future

    def _ask_owner(self) -> Future[T]:
        """As ``local_value``, for those who cannot wait."""
        assert self._entry is not None
        future = cast("Future[T]", self._entry.value)
        self._keep_until(future)
        return future

    def _within(self, limit: float) -> Future[Any]:
        """The value of this worker's, if it comes in time."""
        assert self._entry is not None
        made: Future[Any] = Kept()  # by the timer
        forward(self._entry.value, made)
        text, name = f"the value of {self} was not there within {limit:g} s", self.owner_name()

        def give_up() -> None:
            if not made.done():
                made.set_exception(CallTimeoutError(text, worker=name, timeout=limit))

        self._rrefs.worker.thread_pool.call_at(self._rrefs.worker.runtime.now() + limit, give_up)
        return made

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
        """Run ``backward`` from the value, on its owner.

        Args:
            context: A context to run it in, see ``backhaul.backward``; without, as ``value.backward()`` does.
            retain_graph: Keep the graph for another time.
        """
        if self._entry is not None:
            run_backward(self._entry.value.wait(), context, retain_graph)
        else:
            self._check_created()
            self._rrefs.client.call(self._owner.id, backward_of, (self._named(), context, retain_graph), None, 0)

    # Calls.

    @graph_break
    def rpc_sync(self, timeout: float | None = None) -> Any:
        """``rref.rpc_sync().method(...)`` calls a method of the value on its owner, and waits for the result."""
        return _Proxy(lambda name, args, kwargs: self._call(name, args, kwargs, timeout, "rpc_sync").wait())

    @graph_break
    def rpc_async(self, timeout: float | None = None) -> Any:
        """``rref.rpc_async().method(...)`` calls a method of the value on its owner, and returns a future."""
        return _Proxy(lambda name, args, kwargs: self._call(name, args, kwargs, timeout))

    @graph_break
    def remote(self, timeout: float | None = None) -> Any:
        """``rref.remote().method(...)`` calls a method of the value on its owner, where the result stays."""
        from backhaul._rref.remote import make_remote

        def call(name: str, args: Any, kwargs: Any) -> RRef[Any]:
            arguments = self._named(), name, args, kwargs
            made: RRef[Any] = make_remote(self._owner.id, invoke, arguments, timeout=timeout, label=name)
            if made._created is not None:
                self._keep_until(made._created)
            return made

        return _Proxy(call)

    def _named(self) -> Named:
        """How the owner knows it."""
        if self._fork is not None:
            self._rrefs.check(self._fork, self._owner.name)
        return self._id, -1 if self._fork is None else self._fork, *self._rrefs.life, self._life[1]

    @graph_break
    def _call(
        self,
        what: str | Call,
        args: Any,
        kwargs: Any,
        timeout: float | None,
        mode: str = "rpc_async",
        *,
        label: str | None = None,
    ) -> Future[Any]:
        """Call a method of the value, or a function with the value and the arguments, on the owner. ``mode`` and
        ``label`` are for people.
        """
        self._check_created()
        arguments = (self._named(), what, args, kwargs)
        label = label or (what if isinstance(what, str) else label_of(what))
        future = self._rrefs.client.call_async(self._owner.id, invoke, arguments, None, timeout, label=label, mode=mode)
        self._keep_until(future)
        return future

    def _keep_until(self, done: Future[Any]) -> None:
        """The value has to live as long as a call on it, even if nobody else refers to it any more."""

        def let_go(_: Any, keep: RRef[T] = self) -> None: ...

        done._when_done(let_go)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a reference travels in calls only; it cannot be pickled, copied or saved otherwise")


class _Proxy:
    """Stands for the value: its methods are calls."""

    def __init__(self, call: Call) -> None:
        self.__call = call

    def __getattr__(self, name: str) -> Call:
        return functools.partial(self.__run, name)

    @graph_break
    def __run(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        return self.__call(name, args, kwargs)


def _show(number: int) -> str:
    return f"GloballyUniqueId(created_on={maker_of(number)}, local_id={number & (1 << 48) - 1})"


def make_handle(
    rrefs: RRefRegistry,
    number: RRefId,
    owner: WorkerInfo,
    life: Life,
    *,
    entry: OwnerEntry[Future[Any]] | None = None,
    fork: ForkId | None = None,
) -> RRef[Any]:
    """A handle of what is known already."""
    made: RRef[Any] = RRef.__new__(RRef)
    made._set(rrefs, number, owner, life, entry=entry, fork=fork)
    return made


# Travelling.


def _arrive(owner: int, incarnation: str, number: int, fork: int) -> Any:
    """Stands in a message for a reference; the receiver calls ``_build`` in its place."""
    raise TypeError("a reference travels in calls only")


def _build(worker: Worker | None, owner: int, incarnation: str, number: RRefId, fork: ForkId) -> RRef[Any]:
    rrefs, life = (worker or current_worker()).part(RRefRegistry), (owner, incarnation)
    if life == rrefs.life:
        return make_handle(rrefs, number, rrefs.worker.info, life, entry=rrefs.come_home(number, fork))
    return make_handle(rrefs, number, rrefs.adopt(life, number, fork), life, fork=fork)


def _reduce(rref: RRef[Any], parcels: list[Any]) -> Any:
    rref._check_created()
    if rref._fork is not None:
        rref._rrefs.check(rref._fork, rref._owner.name)
    parcel = *rref._life, rref._id, ForkId(rref._rrefs.new_id())
    parcels.append(parcel)
    return _arrive, parcel


reducers[RRef] = _reduce
builders[_arrive.__module__, _arrive.__name__] = _build


# What owners do for others.


@async_execution
def fetch(*named: Any) -> Future[Any]:
    """The value, when it is there."""
    return current_rrefs().join(*named)


@async_execution
def type_of(*named: Any) -> Future[Any]:
    """Its type."""
    return fetch(*named).then(lambda done: type(done.value()))


@async_execution
def backward_of(named: Named, context: int, retain_graph: bool) -> Future[None]:
    """Runs backward from the value."""
    return fetch(*named).then(lambda done: run_backward(done.value(), context, retain_graph))


@async_execution
def invoke(named: Named, what: str | Call, args: Any, kwargs: Any) -> Future[Any]:
    """Calls a method of the value, or a function with it."""
    value = fetch(*named)
    if value.done():
        return _invoke(value, what, args, kwargs)
    made: Future[Any] = Future()

    def go_on(done: Future[Any]) -> None:
        forward(_invoke(done, what, args, kwargs), made)

    value.add_done_callback(go_on)
    return made


def _invoke(value: Future[Any], what: str | Call, args: Any, kwargs: Any) -> Future[Any]:
    made: Future[Any] = Future()
    try:
        owned = value.wait()
        method = getattr(owned, what) if isinstance(what, str) else functools.partial(what, owned)
        result = run_here(method, args, kwargs)
        if answers_later(method, result):
            if not isinstance(result, torch._C.Future):
                raise TypeError(
                    f"{label_of(method)} is marked with async_execution, so it must return a Future, but it returned "
                    f"a {type(result).__name__}"
                )
            return cast("Future[Any]", result)
        if inspect.iscoroutine(result):
            return current_worker().part(Node).server.complete(result, (args, kwargs))
        made.set_result(result)
    except BaseException as error:  # also one that means to end the program: it ends the call
        made.set_exception(error)
    return made


def forward(
    source: torch.futures.Future[Any],
    target: Future[Any],
    *,
    change: Call | None = None,
    reword: Callable[[BaseException], BaseException] | None = None,
) -> None:
    """Complete ``target`` as ``source`` is, with what ``change`` makes of its value or ``reword`` of its exception."""

    def settle(done: torch.futures.Future[Any]) -> None:
        if target.done():
            return  # too late
        error = done._failure() if isinstance(done, Future) else None
        if error is None:  # else it is not raised: it would collect the frames of whoever has completed the source
            try:
                value = done.value() if change is None else change(done.value())
            except BaseException as raised:
                error = raised
        if error is None:
            target.set_result(value)
        else:
            target.set_exception(error if reword is None else reword(error))

    source.add_done_callback(settle)


def keeps_history(rrefs: RRefRegistry) -> bool:
    """Whether a value that is made or fetched now keeps the graph behind it, as the result of an operation does."""
    return torch.is_grad_enabled() or rrefs.worker.options.follows_reference


def without_history(value: Any) -> Any:
    """A value that was made under ``no_grad``: its tensors, alone or in containers, are leaves or have no graph."""
    return _replaced(value, lambda tensor: tensor if tensor.is_leaf else tensor.detach())


def detached(value: Any) -> Any:
    """A value of this worker as other workers get it under ``no_grad``, but in the same memory."""
    return _replaced(value, _detach)


def _replaced(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A value with other tensors in it; the value itself if none of its tensors changes."""
    parts, form = tree_flatten(value)
    changed = [change(part) if isinstance(part, torch.Tensor) else part for part in parts]
    same = all(old is new for old, new in zip(parts, changed, strict=True))
    return value if same else tree_unflatten(changed, form)


def _detach(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.requires_grad:
        return tensor
    return torch.nn.Parameter(tensor.detach()) if type(tensor) is torch.nn.Parameter else tensor.detach()


def run_backward(value: Any, context: int, retain_graph: bool) -> None:
    """``backward`` from a value of this worker's."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"backward starts from a tensor; this reference is to a {type(value).__name__}")
    if context < 0:
        value.backward(retain_graph=retain_graph)
    else:
        backward(context, [value], retain_graph=retain_graph)
