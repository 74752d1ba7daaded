"""Making values on other workers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch

from backhaul import limits
from backhaul.compiler import graph_break
from backhaul.errors import PermissionDeniedError, SerializationError
from backhaul.rpc.dispatch import answers_later, async_execution, never_dropped
from backhaul.rpc.futures import Future
from backhaul.rpc.intercept import extensions
from backhaul.rpc.node import Node
from backhaul.rpc.retry import Retry, start
from backhaul.rref.handle import RRef, forward, make_handle
from backhaul.rref.ownership import ForkId, RRefId, maker_of
from backhaul.rref.registry import RRefs, current_rrefs
from backhaul.types import WorkerInfo
from backhaul.wire.callables import label_of, name_of, resolve
from backhaul.worker import current_worker

T = TypeVar("T")


def _extend(node: Node) -> None:
    RRefs(node)


extensions.append(_extend)


@graph_break
def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
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
        args: Positional arguments.
        kwargs: Keyword arguments.
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
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    *,
    label: str | None = None,
    retry: Retry | None = None,
) -> RRef[T]:
    """``remote``, by another name for people."""
    if not callable(func):
        raise TypeError(f"only a callable can be called, not a {type(func).__name__}")
    rrefs = current_rrefs()
    peer = rrefs.agent.peers.find(to)
    if peer.plain:
        raise PermissionDeniedError(
            f"there are no references between workers one of which does not trust the other (trusted=False): "
            f"{label_of(func)} cannot make a value on worker '{peer.info.name}'",
            worker=peer.info.name,
            function=label_of(func),
            caller=rrefs.worker.name,
        )
    number = RRefId(rrefs.new_id())
    fork = ForkId(-1 if peer.record.id == rrefs.id else rrefs.new_id())
    what = name_of(func, main_shared=peer.main_shared) or func
    arguments = (int(number), int(fork), what, *(args or ()))
    entry = rrefs.own(number) if fork < 0 else None
    try:
        call = rrefs.agent, peer.record.id, create, arguments, kwargs, timeout
        created = start(*call, retry, label=label or label_of(func), mode="remote")
    except BaseException as error:
        if entry is not None:
            rrefs.let_go(entry)
        if isinstance(error, SerializationError):
            raise _renumbered(error) from error.__cause__
        raise
    handle: RRef[T] = make_handle(rrefs, number, peer.info, entry=entry, fork=None if fork < 0 else fork)
    handle._created = created
    if retry is not None:
        handle._keep_until(created)  # else an attempt might make the value after its last reference was gone
    if entry is not None:
        created._when_done(lambda done: _fail(entry.value, done))
    return handle


def _renumbered(error: SerializationError) -> SerializationError:
    """The same error with the user's arguments counted alone."""

    def count(text: str) -> str:
        return re.sub(r"\bargs\[(\d+)\]", lambda found: f"args[{max(int(found[1]) - 3, 0)}]", text)

    return SerializationError(count(str(error)), worker=error.worker, path=count(error.path or "") or None)


def _fail(value: Future[Any], created: Future[Any]) -> None:
    """The call itself has failed, so nobody is going to set the value."""
    try:
        created.value()
    except Exception as error:
        if not value.done():
            value.set_exception(error)


@async_execution
@never_dropped
def create(number: int, fork: int, what: Any, /, *args: Any, **kwargs: Any) -> Future[None]:
    """Makes a value. What goes wrong is kept in its place."""
    entry = current_rrefs().create(number, fork, maker_of(fork) if fork >= 0 else -1)
    value: Future[Any] = entry.value
    rrefs = current_rrefs()
    done: Future[None] = Future()
    made: torch.futures.Future[Any]
    try:
        function = resolve(what) if isinstance(what, str) else what
        limits.check(f"{label_of(function)} was not run")
        result = function(*args, **kwargs)
        if answers_later(function, result):
            if not isinstance(result, torch._C.Future):
                raise TypeError(
                    f"{label_of(function)} is marked with async_execution, so it must return a Future, but it returned "
                    f"a {type(result).__name__}"
                )
            made = cast("torch.futures.Future[Any]", result)
        elif inspect.iscoroutine(result):
            made = current_worker().part(Node).dispatcher.complete(result)
        else:
            made = Future()
            made.set_result(result)
    except BaseException as error:  # also one that means to end the program: it ends the call
        made = Future()
        made.set_exception(error)

    def finish(_: Any) -> None:
        rrefs.let_go(entry)
        done.set_result(None)

    forward(made, value)
    value._when_done(finish)
    return done
