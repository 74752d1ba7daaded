"""Calls that a profile records, or whose messages tests lose or delay. ``api`` makes all other calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backhaul._rref.remote import remote as create
from backhaul._wire.callables import label_of
from backhaul.compat import errors
from backhaul.compat.rpc import agent, kinds, profiling, serving
from backhaul.compat.rpc.futures import CallFuture, Future
from backhaul.compat.rpc.info import WorkerInfo
from backhaul.compat.rpc.internal import RPCExecMode
from backhaul.compat.rpc.rref import RRef, adopt


def call_watched(  # noqa: PLR0917 (the arguments of rpc_async)
    mode: RPCExecMode,
    peer: WorkerInfo,
    pickler: Any,
    func: Callable[..., Any],
    args: Any,
    kwargs: Any,
    timeout: float | None,
) -> Future[Any]:
    """Start a call and return its future."""

    def start(call: Any) -> Future[Any]:
        function, given, named = call
        made: Future[Any] = CallFuture()
        agent.client().call_async(peer, function, given, named, timeout, label=label_of(func), future=made)
        return made

    with errors.rewording(), kinds.calling(func):
        call = serving.build_call(pickler, func, args, kwargs)
        return profiling.record(mode, profiling.name_of(func), peer, call, start) if profiling.is_on() else start(call)


def create_watched(  # noqa: PLR0917 (the arguments of remote)
    peer: WorkerInfo, pickler: Any, func: Callable[..., Any], args: Any, kwargs: Any, timeout: float | None
) -> RRef[Any]:
    """Start a call whose result stays on the callee; return an RRef to the result."""
    with errors.rewording(), kinds.calling(func, remote=True):
        call = serving.build_call(pickler, func, args, kwargs, keep_result=True)
        if not profiling.is_on():
            return adopt(_create(peer, call, timeout))
        created: list[RRef[Any]] = []

        def start(call: Any) -> Any:
            created.append(adopt(_create(peer, call, timeout)))
            return created[0]._get_future()

        recorded = profiling.record(RPCExecMode.REMOTE, profiling.name_of(func), peer, call, start)
        created[0]._set_profiling_future(recorded)
        return created[0]


def _create(peer: WorkerInfo, call: Any, timeout: float | None) -> Any:
    function, given, named = call
    return create(peer, function, given, named, timeout)
