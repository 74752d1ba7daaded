"""Makes values on other workers: ``remote``, and what the owner runs for it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, TypeVarTuple, overload

import torch

from backhaul._rpc.arguments import LateArguments, keywords, positional
from backhaul._rpc.call_types import LateResult, Named, Positional, Target
from backhaul._rpc.calls.async_results import Later, answers_later, may_answer_later
from backhaul._rpc.calls.request_encoder import hides_arguments
from backhaul._rpc.calls.retry import Retry, start
from backhaul._rpc.calls.served_call import never_dropped, run_here
from backhaul._rpc.cluster.peers import Peer
from backhaul._rpc.exception_copies import copy_without_frames
from backhaul._rpc.futures import Future
from backhaul._rpc.interceptors import extensions
from backhaul._rpc.node import Node
from backhaul._rref.execution import outcome_of, relay
from backhaul._rref.handle import RRef, keep_until, make_handle
from backhaul._rref.history import keeps_history, without_history
from backhaul._rref.members import find_member, identity_of
from backhaul._rref.owned_values import Entry
from backhaul._rref.ownership import ForkId, RRefId, maker_of
from backhaul._rref.registry import RRefRegistry, current_rrefs
from backhaul._runtime.compile_marks import graph_break
from backhaul._wire.callables import label_of, name_of, resolve
from backhaul._wire.faults import foreign
from backhaul._worker import deadlines
from backhaul.errors import LimitError, PermissionDeniedError, SerializationError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_REFUSED = (SerializationError, LimitError, PermissionDeniedError)  # the owner did not run the function
_OWN_ARGUMENTS = 7  # arguments of ``create`` before those of the user


def _extend(node: Node) -> None:
    RRefRegistry(node)


extensions.append(_extend)


# fmt: off
@overload
def remote(to: Target, func: Callable[..., LateResult[T]], args: list[Any], kwargs: Named | None = ...,
           timeout: float | None = ..., *, retry: Retry | None = ...) -> RRef[T]: ...
@overload
def remote(to: Target, func: Callable[..., T], args: list[Any], kwargs: Named | None = ...,
           timeout: float | None = ..., *, retry: Retry | None = ...) -> RRef[T]: ...
@overload
def remote(to: Target, func: Callable[[*Ts], LateResult[T]], args: tuple[*Ts], kwargs: None = ...,
           timeout: float | None = ..., *, retry: Retry | None = ...) -> RRef[T]: ...
@overload
def remote(to: Target, func: Callable[[*Ts], T], args: tuple[*Ts], kwargs: None = ...,
           timeout: float | None = ..., *, retry: Retry | None = ...) -> RRef[T]: ...
@overload
def remote(to: Target, func: Callable[[], LateResult[T]], args: None = ..., kwargs: None = ...,
           timeout: float | None = ..., *, retry: Retry | None = ...) -> RRef[T]: ...
@overload
def remote(to: Target, func: Callable[[], T], args: None = ..., kwargs: None = ...,
           timeout: float | None = ..., *, retry: Retry | None = ...) -> RRef[T]: ...
@overload
def remote(to: Target, func: Callable[..., LateResult[T]], args: Positional, kwargs: Named,
           timeout: float | None = ..., *, retry: Retry | None = ...) -> RRef[T]: ...
@overload
def remote(to: Target, func: Callable[..., T], args: Positional, kwargs: Named,
           timeout: float | None = ..., *, retry: Retry | None = ...) -> RRef[T]: ...
@overload
def remote(to: Target, func: Callable[..., LateResult[T]], *, kwargs: Named, timeout: float | None = ...,
           retry: Retry | None = ...) -> RRef[T]: ...
@overload
def remote(to: Target, func: Callable[..., T], *, kwargs: Named, timeout: float | None = ...,
           retry: Retry | None = ...) -> RRef[T]: ...
# fmt: on


@graph_break
def remote(
    to: Target,
    func: Callable[..., Any],
    args: Positional = None,
    kwargs: Named | None = None,
    timeout: float | None = None,
    *,
    retry: Retry | None = None,
) -> RRef[Any]:
    """Call ``func(*args, **kwargs)`` on another worker, where the result stays; return a reference to it at once.

    If making the value fails, the error is raised when the reference is used (``to_here``, its proxies, passing it on).
    The call is part of the autograd graph, as for ``rpc_sync``.

    Args:
        to: Name, id or ``WorkerInfo`` of the worker that will own the value; it may be this one.
        func: As for ``rpc_sync``. A class makes an object there.
        args: Positional arguments, a tuple or a list.
        kwargs: Keyword arguments, a dict.
        timeout: Seconds that making the value may take; 0: without limit; None: the worker's default. Clamped to the
            deadline of the handler or block that calls this.
        retry: As for ``rpc_async``.

    Returns:
        A reference to the value. Once this returns, the call is on its way; the value may still be to come.

    Example:
        >>> import backhaul as bh
        >>> with bh.cluster(2):
        ...     counter = bh.remote("worker1", dict, kwargs={"a": 1})
        ...     counter.rpc_sync().update(b=2)
        ...     counter.to_here()
        {'a': 1, 'b': 2}
    """
    return make_remote(to, func, args, kwargs, timeout, retry=retry)


def make_remote(
    to: Target,
    func: Callable[..., T],
    args: Positional = None,
    kwargs: Named | None = None,
    timeout: float | None = None,
    *,
    label: str | None = None,
    retry: Retry | None = None,
) -> RRef[T]:
    """``remote``, with a label that profiles and errors show."""
    if not callable(func):
        raise TypeError(f"only a callable can be called, not a {type(func).__name__}")
    given, named = positional(args), None if kwargs is None else keywords(kwargs)
    rrefs = current_rrefs()
    peer = rrefs.client.peers.find(to)
    if peer.plain:
        raise PermissionDeniedError(
            f"{label_of(func)} cannot make a value on worker '{peer.info.name}': one of the two workers does not trust "
            "the other (trusted=False), and there are no references between such workers; use rpc_sync",
            worker=peer.info.name,
            function=label_of(func),
            caller=rrefs.worker.name,
        )
    what = name_of(func, main_shared=peer.main_shared) or func
    if peer.record.id == rrefs.worker.info.id:
        return _make_here(rrefs, what, given, named, timeout, label=label or label_of(func), retry=retry)
    creation = _Creation(rrefs, peer)
    arguments = _Arguments(creation, keeps_history(rrefs.worker), what, given)
    try:
        call = rrefs.client, peer.record.id, create, arguments, named, timeout
        created = start(*call, retry, label=label or label_of(func), mode="remote")
    except BaseException:
        creation.end(delivered=False)
        rrefs.cleaner.put((creation.identity, creation.number, creation.fork))
        raise
    handle: RRef[T] = make_handle(rrefs, creation.number, creation.owner, creation.identity, fork=creation.fork)
    handle._created = created
    creation.handle = weakref.ref(handle)
    if retry is not None:
        keep_until(handle, created)  # a later attempt may give it another owner
    created._when_done(creation.settle)
    return handle


def _make_here(
    rrefs: RRefRegistry,
    what: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    timeout: float | None,
    *,
    label: str,
    retry: Retry | None,
) -> RRef[Any]:
    """``make_remote`` for a value of this worker itself."""
    number = RRefId(rrefs.new_id())
    entry = rrefs.own(number)
    try:
        arguments = int(number), -1, -1, "", "", keeps_history(rrefs.worker), what, *args
        created = start(
            rrefs.client, rrefs.worker.info.id, create, arguments, kwargs, timeout, retry, label=label, mode="remote"
        )
    except BaseException:
        rrefs.owned.release(entry)
        raise
    handle: RRef[Any] = make_handle(rrefs, number, rrefs.worker.info, rrefs.identity, entry=entry)
    rrefs.owned.release(entry)
    handle._created = created
    created._when_done(lambda done: _fail(entry.value, done))
    return handle


class _Creation:
    """A value that this worker asks another one to make. If the owner is restarted between attempts, its new
    incarnation is asked.
    """

    def __init__(self, rrefs: RRefRegistry, peer: Peer) -> None:
        rrefs.cleaner.start()
        self.rrefs = rrefs
        self.owner, self.identity = peer.info, identity_of(peer)
        self.number, self.fork, notice = rrefs.held.expect(self.identity)
        self.handle: Callable[[], RRef[Any] | None] = lambda: None
        self._notices = {self.identity: notice}

    def named(self) -> tuple[int, int, int, str, str]:
        """The first arguments of ``create`` for the worker that has the owner's id now: value, fork, number of the
        notice, incarnation of this worker and of that one.
        """
        peer = self.rrefs.client.peers.find(self.owner.id)
        identity = identity_of(peer)
        if identity not in self._notices:
            _, _, self._notices[identity] = self.rrefs.held.expect(identity, self.number, self.fork)
            self.owner, self.identity = peer.info, identity
            handle = self.handle()
            if handle is not None:
                handle._owner, handle._identity = peer.info, identity
        return int(self.number), int(self.fork), self._notices[identity][0], self.rrefs.identity[1], identity[1]

    def settle(self, created: Future[Any]) -> None:
        """The call is over. If the owner refused it, the owner will not make the value. Then tell the owner why, since
        calls that use the value are under way already, or come from workers that got the reference.
        """
        error = created._failure()
        if not isinstance(error, _REFUSED):
            self.end(delivered=error is None)
            return
        peer = find_member(self.rrefs.client, self.identity)
        arguments = *self.named(), True, name_of(_not_made), copy_without_frames(error)
        if isinstance(peer, Peer):
            self.rrefs.notices.call(peer, create, arguments, lambda told: self.end(delivered=told._failure() is None))
        else:
            self.end(delivered=False)

    def end(self, *, delivered: bool) -> None:
        """The call is over. If it succeeded, it delivered its notice to the owner."""
        for identity, notice in self._notices.items():
            self.rrefs.notices.settle(identity, notice, delivered=delivered and identity == self.identity)


class _Arguments(LateArguments):
    """The arguments of ``create``. They are made when the call is sent, so that each attempt names the owner anew."""

    def __init__(self, creation: _Creation, history: bool, what: Any, args: Sequence[Any]) -> None:
        self._creation = creation
        self._rest = history, what, *args

    def __len__(self) -> int:
        return _OWN_ARGUMENTS + len(self._rest) - 2

    def __iter__(self) -> Iterator[Any]:
        return iter((*self._creation.named(), *self._rest))

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]


def _fail(value: Future[Any], created: Future[Any]) -> None:
    """The call itself has failed, so no function will set the value. The error is copied without its frames: it
    may have passed through frames that hold the handle, and would keep them as long as the value.
    """
    error = created._failure()
    if error is not None and not value.done():
        value.set_exception(copy_without_frames(error))


def _not_made(error: Exception) -> None:
    """Runs in ``create`` on an owner that refused the call: fails the value."""
    raise error


@may_answer_later
@never_dropped
@hides_arguments(_OWN_ARGUMENTS)
def create(  # noqa: PLR0917 (positional arguments travel without pickle)
    number: int,
    fork: int,
    notice: int,
    holder: str,
    incarnation: str,
    history: bool,
    what: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Make a value on this worker, without its history unless ``history``. An error is kept in place of the value."""
    rrefs = current_rrefs()
    entry = rrefs.owned.create(RRefId(number), ForkId(fork), notice, (maker_of(fork), holder), incarnation)
    value: Future[Any] = entry.value
    try:
        function: Callable[..., Any] = resolve(what) if isinstance(what, str) else what
        scope = deadlines.current.get()
        if scope is not None and not scope.left:
            deadlines.check(f"{label_of(function)} was not run")
        result = run_here(function, args, kwargs)
        if answers_later(function, result) or inspect.iscoroutine(result):
            return Later(_made_later(rrefs, entry, history, outcome_of(function, result, (args, kwargs))))
        _complete(value.set_result, result if history else without_history(result))
    except BaseException as error:  # also SystemExit and the like: they end the call, not the worker
        _complete(value.set_exception, foreign(error, worker=rrefs.worker.name))
    rrefs.owned.release(entry)
    return None


def _complete(complete: Callable[[Any], None], outcome: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the caller owns the value and has given up: the value has failed
        complete(outcome)


def _made_later(
    rrefs: RRefRegistry, entry: Entry, history: bool, outcome: torch.futures.Future[Any]
) -> torch.futures.Future[Any]:
    """The value will have that outcome. Returns a future that is done after that."""
    done: Future[None] = Future()

    def finish(_: Any) -> None:
        rrefs.owned.release(entry)
        done.set_result(None)

    reword = functools.partial(foreign, worker=rrefs.worker.name)
    relay(outcome, entry.value, change=None if history else without_history, reword=reword)
    entry.value._when_done(finish)
    return done
