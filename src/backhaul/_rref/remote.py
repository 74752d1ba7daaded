"""Making values on other workers."""

from __future__ import annotations

import functools
import inspect
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch

from backhaul._rpc.arguments import LateArguments, keywords, positional
from backhaul._rpc.calls.async_results import answers_later, async_execution
from backhaul._rpc.calls.retry import Retry, start
from backhaul._rpc.calls.served_call import never_dropped, run_here
from backhaul._rpc.cluster.peers import Peer
from backhaul._rpc.exception_copies import copy_without_frames
from backhaul._rpc.futures import Future
from backhaul._rpc.interceptors import extensions
from backhaul._rpc.node import Node
from backhaul._rref.handle import RRef, forward, keeps_history, make_handle, without_history
from backhaul._rref.ownership import RRefId, maker_of
from backhaul._rref.registry import RRefRegistry, current_rrefs, identity_of
from backhaul._runtime.compile_marks import graph_break
from backhaul._types import WorkerInfo
from backhaul._wire.callables import label_of, name_of, resolve
from backhaul._wire.faults import foreign
from backhaul._worker import deadlines
from backhaul._worker.worker import current_worker
from backhaul.errors import LimitError, PermissionDeniedError, SerializationError

T = TypeVar("T")
_NOT_TAKEN = (SerializationError, LimitError, PermissionDeniedError)  # the function was not run
_OURS = 7  # arguments of ``create`` that are not the user's


def _extend(node: Node) -> None:
    RRefRegistry(node)


extensions.append(_extend)


@graph_break
def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., T],
    args: tuple[Any, ...] | list[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    *,
    retry: Retry | None = None,
) -> RRef[T]:
    """Call ``func(*args, **kwargs)`` on another worker, where the result stays; return a reference to it at once.

    What goes wrong in making the value is raised where the reference is used (``to_here``, its proxies, passing it on).

    Args:
        to: Name, id or ``WorkerInfo`` of the worker that is to own the value; it may be this one.
        func: As for ``rpc_sync``; a class makes an object there.
        args: Positional arguments, a tuple or a list.
        kwargs: Keyword arguments, a dict.
        timeout: Seconds that making the value may take; 0: any time; None: the worker's default. Never longer than what
            is left to the handler or block that this is called in.
        retry: As for ``rpc_async``.

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
    to: str | int | WorkerInfo,
    func: Callable[..., T],
    args: tuple[Any, ...] | list[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    *,
    label: str | None = None,
    retry: Retry | None = None,
) -> RRef[T]:
    """``remote``, by another name for people."""
    if not callable(func):
        raise TypeError(f"only a callable can be called, not a {type(func).__name__}")
    given, named = positional(args), None if kwargs is None else keywords(kwargs)
    rrefs = current_rrefs()
    peer = rrefs.client.peers.find(to)
    if peer.plain:
        raise PermissionDeniedError(
            f"there are no references between workers one of which does not trust the other (trusted=False): "
            f"{label_of(func)} cannot make a value on worker '{peer.info.name}'",
            worker=peer.info.name,
            function=label_of(func),
            caller=rrefs.worker.name,
        )
    what = name_of(func, main_shared=peer.main_shared) or func
    if peer.record.id == rrefs.id:
        return _make_here(rrefs, what, given, named, timeout, label=label or label_of(func), retry=retry)
    birth = _Birth(rrefs, peer)
    arguments = _Arguments(birth, keeps_history(rrefs), what, given)
    try:
        call = rrefs.client, peer.record.id, create, arguments, named, timeout
        created = start(*call, retry, label=label or label_of(func), mode="remote")
    except BaseException as error:
        birth.end(heard=False)
        rrefs.bury((birth.life, birth.number, birth.fork))
        if isinstance(error, SerializationError):
            raise _renumbered(error) from error.__cause__
        raise
    handle: RRef[T] = make_handle(rrefs, birth.number, birth.owner, birth.life, fork=birth.fork)
    handle._created = created
    birth.handle = weakref.ref(handle)
    if retry is not None:
        handle._keep_until(created)  # as long as attempts are made, it may have to turn to another owner
    created._when_done(birth.settle)
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
    """``make_remote`` for a value of this worker's own."""
    number = RRefId(rrefs.new_id())
    entry = rrefs.own(number)
    try:
        arguments = int(number), -1, -1, "", "", keeps_history(rrefs), what, *args
        created = start(rrefs.client, rrefs.id, create, arguments, kwargs, timeout, retry, label=label, mode="remote")
    except BaseException as error:
        rrefs.let_go(entry)
        if isinstance(error, SerializationError):
            raise _renumbered(error) from error.__cause__
        raise
    handle: RRef[Any] = make_handle(rrefs, number, rrefs.worker.info, rrefs.life, entry=entry)
    handle._created = created
    created._when_done(lambda done: _fail(entry.value, done))
    return handle


class _Birth:
    """A value being asked for. The owner may be restarted between attempts: then it is asked of the new one."""

    def __init__(self, rrefs: RRefRegistry, peer: Peer) -> None:
        self.rrefs = rrefs
        self.owner, self.life = peer.info, identity_of(peer)
        self.number, self.fork, letter = rrefs.expect(self.life)
        self.handle: Callable[[], RRef[Any] | None] = lambda: None
        self._letters = {self.life: letter}

    def named(self) -> tuple[int, int, int, str, str]:
        """What the owner, whoever has its id now, has to know: value, fork, number of the news, who asks whom."""
        peer = self.rrefs.client.peers.find(self.owner.id)
        life = identity_of(peer)
        if life not in self._letters:
            _, _, self._letters[life] = self.rrefs.expect(life, self.number, self.fork)
            self.owner, self.life = peer.info, life
            handle = self.handle()
            if handle is not None:
                handle._owner, handle._life = peer.info, life
        return int(self.number), int(self.fork), self._letters[life][0], self.rrefs.life[1], life[1]

    def settle(self, created: Future[Any]) -> None:
        """The call is over. If the owner did not take it, nobody there is going to make the value, so the owner is told
        why: calls that use the value are under way already, or come from workers that the reference was passed on to.
        """
        error = created._failure()
        if not isinstance(error, _NOT_TAKEN):
            self.end(heard=error is None)
            return
        peer = self.rrefs.client.peers.in_life(*self.life)
        arguments = *self.named(), True, name_of(_not_made), copy_without_frames(error)
        if isinstance(peer, Peer):
            self.rrefs.call(peer, create, arguments, lambda told: self.end(heard=told._failure() is None))
        else:
            self.end(heard=False)

    def end(self, *, heard: bool) -> None:
        """The call is over; if it has succeeded its owner has heard of it."""
        for life, letter in self._letters.items():
            self.rrefs.asked(life, letter, heard=heard and life == self.life)


class _Arguments(LateArguments):
    """Those of ``create``, as they are when they are sent."""

    def __init__(self, birth: _Birth, history: bool, what: Any, args: Sequence[Any]) -> None:
        self._birth = birth
        self._rest = history, what, *args

    def __len__(self) -> int:
        return _OURS + len(self._rest) - 2

    def __iter__(self) -> Iterator[Any]:
        return iter((*self._birth.named(), *self._rest))

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]


def _renumbered(error: SerializationError) -> SerializationError:
    """The same error with the user's arguments counted alone."""

    def count(text: str) -> str:
        return re.sub(r"\bargs\[(\d+)\]", lambda found: f"args[{max(int(found[1]) - _OURS, 0)}]", text)

    path = count(error.path or "") or None
    return SerializationError(count(str(error)), worker=error.worker, path=path, device=error.device)


def _fail(value: Future[Any], created: Future[Any]) -> None:
    """The call itself has failed, so nobody is going to set the value. If that was at once, the error has gone through
    the frames of whoever holds the handle; kept with the value, it would keep them.
    """
    error = created._failure()
    if error is not None and not value.done():
        value.set_exception(copy_without_frames(error))


def _not_made(error: Exception) -> None:
    """What ``create`` runs where the call that was to make the value was not taken."""
    raise error


@async_execution
@never_dropped
def create(  # noqa: PLR0917 (only so do they travel without pickle)
    number: int,
    fork: int,
    letter: int,
    life: str,
    incarnation: str,
    history: bool,
    what: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> Future[None]:
    """Makes a value, without its history if that is not wanted. What goes wrong is kept in its place."""
    rrefs = current_rrefs()
    entry = rrefs.create(number, fork, letter, (maker_of(fork), life), incarnation)
    value: Future[Any] = entry.value
    done: Future[None] = Future()
    made: torch.futures.Future[Any]
    try:
        function = resolve(what) if isinstance(what, str) else what
        deadlines.check(f"{label_of(function)} was not run")
        result = run_here(function, args, kwargs)
        if answers_later(function, result):
            if not isinstance(result, torch._C.Future):
                raise TypeError(
                    f"{label_of(function)} is marked with async_execution, so it must return a Future, but it returned "
                    f"a {type(result).__name__}"
                )
            made = cast("torch.futures.Future[Any]", result)
        elif inspect.iscoroutine(result):
            made = current_worker().part(Node).server.async_results.complete(result, (args, kwargs))
        else:
            made = Future()
            made.set_result(result)
    except BaseException as error:  # also one that means to end the program: it ends the call
        made = Future()
        made.set_exception(error)

    def finish(_: Any) -> None:
        rrefs.let_go(entry)
        done.set_result(None)

    reword = functools.partial(foreign, worker=rrefs.worker.name)
    forward(made, value, change=None if history else without_history, reword=reword)
    value._when_done(finish)
    return done
