"""Calls, the exchange of values between all workers, and shutdown, with the reference's names and signatures."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from backhaul._rpc.node import Node
from backhaul._rref.registry import RRefRegistry
from backhaul._rref.remote import remote as create
from backhaul._runtime.compile_marks import graph_break
from backhaul._wire.callables import label_of
from backhaul._worker.deadlines import FOREVER
from backhaul.compat import errors
from backhaul.compat.rpc import agent as agents
from backhaul.compat.rpc import internal, membership, profiling, serving, watched_calls
from backhaul.compat.rpc.agent import current as _get_current_rpc_agent
from backhaul.compat.rpc.agent import get_rpc_timeout
from backhaul.compat.rpc.agent import is_set as _is_current_rpc_agent_set
from backhaul.compat.rpc.agent import set_current as _set_and_start_rpc_agent
from backhaul.compat.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from backhaul.compat.rpc.futures import CallFuture, Future
from backhaul.compat.rpc.info import WorkerInfo
from backhaul.compat.rpc.internal import RPCExecMode
from backhaul.compat.rpc.rref import RRef, adopt
from backhaul.errors import PeerLostError, UnknownWorkerError

__all__ = ["RRef", "get_worker_info", "remote", "rpc_async", "rpc_sync", "shutdown"]

P = ParamSpec("P")
R = TypeVar("R")
Target = str | int | WorkerInfo

logger = logging.getLogger("backhaul")

_ignore_rref_leak = True
"""Whether ``shutdown`` raises no error if other workers still hold RRefs to values of this one."""

_LAST_REPLY_SECONDS = 1.0  # how long a worker whose graceful shutdown failed waits for its handlers
_LOST_CHECK_SECONDS = 0.2  # how often a waiting worker checks whether the workers it waits for are lost

_default_pickler: Any = internal._internal_rpc_pickler
_thread_local_var = threading.local()


def _require_initialized(function: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _is_current_rpc_agent_set():
            raise RuntimeError(errors.NOT_INITIALIZED)
        return function(*args, **kwargs)

    return graph_break(checked)


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Pickle calls with another pickler inside the ``with`` block."""
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = internal._internal_rpc_pickler


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """At the end of the ``with`` block, wait for all calls that this thread started inside it with ``rpc_async``."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list


# Calls.


@_require_initialized
def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Name and id of a worker. By default, of this one."""
    info: WorkerInfo = _get_current_rpc_agent().get_worker_info(worker_name)
    return info


def _to_worker_info(to: Any) -> WorkerInfo:
    if isinstance(to, WorkerInfo):
        return to
    if isinstance(to, (str, int)):
        info: WorkerInfo = _get_current_rpc_agent().get_worker_info(to)
        return info
    raise ValueError(f"Cannot get WorkerInfo from name {to}")


def _timeout_or_none(timeout: float) -> float | None:
    return None if timeout == UNSET_RPC_TIMEOUT else timeout


@graph_break
def rpc_sync(
    to: Target,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Call ``func`` on another worker and wait for the result."""
    client = agents.client()
    if client.outlet is not None or profiling.is_on():
        return watched_calls.call_watched(
            RPCExecMode.SYNC, _to_worker_info(to), _default_pickler, func, args, kwargs, _timeout_or_none(timeout)
        ).wait()
    try:
        function, given, named = serving.build_call(_default_pickler, func, args, kwargs)
        limit = None if timeout == UNSET_RPC_TIMEOUT else timeout
        return client.call(_checked(to), function, given, named, limit, label=label_of(func))
    except errors.CONVERTED as error:
        errors.raise_reworded(error)


@graph_break
def rpc_async(
    to: Target,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
    """Start a call and return its future."""
    return _rpc_async(RPCExecMode.ASYNC, to, func, args, kwargs, timeout)


@graph_break
def rpc_async_in_script(
    to: Target,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
    """As ``rpc_async``, for calls that TorchScript makes. They have another name in profiles."""
    return _rpc_async(RPCExecMode.ASYNC_JIT, to, func, args, kwargs, timeout)


def _rpc_async(  # noqa: PLR0917 (the arguments of rpc_async)
    mode: RPCExecMode, to: Target, func: Callable[..., Any], args: Any, kwargs: Any, timeout: float
) -> Future[Any]:
    client = agents.client()
    if client.outlet is not None or profiling.is_on():
        future = watched_calls.call_watched(
            mode, _to_worker_info(to), _default_pickler, func, args, kwargs, _timeout_or_none(timeout)
        )
    else:
        future = CallFuture()
        try:
            function, given, named = serving.build_call(_default_pickler, func, args, kwargs)
            limit = None if timeout == UNSET_RPC_TIMEOUT else timeout
            client.call_async(_checked(to), function, given, named, limit, label=label_of(func), future=future)
        except errors.CONVERTED as error:
            errors.raise_reworded(error)
    if hasattr(_thread_local_var, "future_list"):
        _thread_local_var.future_list.append(future)
    return future


def _checked(to: Any) -> Any:
    if isinstance(to, (str, int, WorkerInfo)):
        return to
    raise ValueError(f"Cannot get WorkerInfo from name {to}")


@graph_break
def remote(
    to: Target,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Call ``func`` on another worker, which keeps the result; returns an RRef to the result."""
    client = agents.client()
    if client.outlet is not None or profiling.is_on():
        return watched_calls.create_watched(
            _to_worker_info(to), _default_pickler, func, args, kwargs, _timeout_or_none(timeout)
        )
    try:
        function, given, named = serving.build_call(_default_pickler, func, args, kwargs, keep_result=True)
        return adopt(create(_checked(to), function, given, named, None if timeout == UNSET_RPC_TIMEOUT else timeout))
    except errors.CONVERTED as error:
        errors.raise_reworded(error)


# Gathering: all workers send their value to the leader, and the leader sends all values to all workers. The leader is
# the worker whose name comes first in alphabetical order; the others are followers.


class _GatherRound:
    """One round of gathering, on one worker."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.complete = threading.Event()


_ALL_WORKER_NAMES: set[str] = set()
_rounds_lock = threading.RLock()  # guards _rounds_begun and _rounds
_rounds_begun: collections.Counter[str] = collections.Counter()
_rounds: collections.defaultdict[str, _GatherRound] = collections.defaultdict(_GatherRound)


def _init_rpc_states(agent: Any) -> None:
    global _ALL_WORKER_NAMES
    _ALL_WORKER_NAMES = {info.name for info in agent.get_worker_infos()}
    if not _is_current_rpc_agent_set():
        _set_and_start_rpc_agent(agent)


def _gather_to_leader(sequence_id: str, worker_name: str, obj: Any, worker_names: set[str] | None = None) -> None:
    """Accept the value of one worker. Runs on the leader."""
    expected = worker_names or _ALL_WORKER_NAMES
    with _rounds_lock:
        gathering = _rounds[sequence_id]
        if worker_name not in expected or worker_name in gathering.values:
            raise AssertionError(
                f"worker {worker_name} does not take part in gather round {sequence_id}, or sent its value twice"
            )
        gathering.values[worker_name] = obj
        if expected == gathering.values.keys():
            gathering.complete.set()


def _broadcast_to_followers(sequence_id: str, objects_map: dict[str, Any]) -> None:
    """Accept the values of all workers. Runs on the followers."""
    with _rounds_lock:
        gathering = _rounds[sequence_id]
    if gathering.complete.is_set():
        raise AssertionError(f"the leader sent the values of gather round {sequence_id} twice")
    gathering.values = objects_map
    gathering.complete.set()


@_require_initialized
def _all_gather(obj: Any, worker_names: set[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> dict[str, Any]:
    """Exchange a value with all workers, or with those in ``worker_names``; returns name -> value.

    Raises:
        RuntimeError: One of the workers is lost.
    """
    values, lost = _gather(obj, worker_names, timeout)
    if lost:
        raise RuntimeError(f"_all_gather got no values from workers {sorted(lost)}, because they are lost")
    return values


def _gather(obj: Any, worker_names: set[str] | None, timeout: float) -> tuple[dict[str, Any], set[str]]:
    """Exchange a value as ``_all_gather`` does; returns the values, and the names of the workers that are lost."""
    names = worker_names or _ALL_WORKER_NAMES
    leader, own = min(names), get_worker_info().name
    with _rounds_lock:
        key = "".join(sorted(names))
        sequence_id = f"{key}{_rounds_begun[key]}"
        _rounds_begun[key] += 1
    call_timeout = get_rpc_timeout() if timeout == UNSET_RPC_TIMEOUT else timeout
    round_timeout = FOREVER if timeout in (UNSET_RPC_TIMEOUT, DEFAULT_SHUTDOWN_TIMEOUT) else timeout
    with _rounds_lock:
        gathering = _rounds[sequence_id]
    lost: set[str] = set()
    if own == leader:
        _gather_to_leader(sequence_id, own, obj, names)
        lost |= _await_round(gathering, names, round_timeout)
        lost |= _send_to_followers(names - {leader} - lost, sequence_id, gathering.values, call_timeout)
    else:
        try:
            rpc_sync(leader, _gather_to_leader, args=(sequence_id, own, obj, names), timeout=call_timeout)
            lost |= _await_round(gathering, {leader}, round_timeout)
        except PeerLostError as error:
            logger.warning("worker '%s' lost worker '%s', the leader of a gather round: %s", own, leader, error)
            lost.add(leader)
        if gathering.complete.is_set():
            lost |= names - gathering.values.keys()  # the leader has no values of workers that it has lost
    with _rounds_lock:
        return _rounds.pop(sequence_id).values, lost


def _await_round(gathering: _GatherRound, names: set[str], timeout: float) -> set[str]:
    """Wait until a round is complete, except for the workers of ``names`` that are lost; returns those."""
    worker = _get_current_rpc_agent().worker
    peers, now = worker.part(Node).peers, worker.runtime.now
    deadline = now() + timeout
    lost: set[str] = set()
    with worker.blocking():
        while not gathering.complete.wait(min(_LOST_CHECK_SECONDS, max(deadline - now(), 0.0))) and now() < deadline:
            for name in names - gathering.values.keys() - lost:
                try:
                    peers.channel_to(peers.find(name), worker.options.connect_timeout)
                except (PeerLostError, UnknownWorkerError) as error:
                    logger.warning(
                        "worker '%s' lost worker '%s' and stops waiting for it: %s", worker.name, name, error
                    )
                    lost.add(name)
            if not names - gathering.values.keys() - lost:
                break
    return lost


def _send_to_followers(names: set[str], sequence_id: str, values: dict[str, Any], timeout: float) -> set[str]:
    """Send all values to the followers; returns the followers that are lost."""
    futures = {
        name: rpc_async(name, _broadcast_to_followers, args=(sequence_id, values), timeout=timeout) for name in names
    }
    failed, lost = {}, set()
    for name, future in futures.items():
        try:
            future.wait()
        except PeerLostError:
            lost.add(name)
        except RuntimeError as error:
            failed[name] = error
    if failed:
        raise RuntimeError(
            f"Followers {list(failed)} timed out in _all_gather after {timeout:.2f} seconds. The first exception is "
            f"{next(iter(failed.values()))}"
        )
    return lost


@_require_initialized
def _barrier(worker_names: Sequence[str]) -> None:
    """Wait until all workers in ``worker_names`` have called this."""
    try:
        _all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("Failed to complete barrier")


@_require_initialized
def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> set[str]:
    """Wait until all workers that are not lost have called this, as ``shutdown`` does; returns the lost workers."""
    try:
        return _gather(None, None, timeout)[1]
    except RuntimeError:
        logger.exception("Failed to respond to 'Shutdown Proceed' in time")
        raise


# Shutdown.


def _delete_all_user_and_unforked_owner_rrefs() -> None:
    """Release the RRefs that this worker still holds."""
    _get_current_rpc_agent().worker.part(RRefRegistry).begin()


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """End this worker.

    With ``graceful``, wait first until all workers have called this and no calls are in progress. Lost workers are not
    waited for.
    """
    agent = _get_current_rpc_agent()
    try:
        if graceful and not agent.is_static_group:
            membership.leave(agent)
        elif graceful:
            lost = _wait_all_workers(timeout)
            _delete_all_user_and_unforked_owner_rrefs()
            # A lost worker may only hang, and then it may never answer the others. So the wait needs a limit.
            agent.join(timeout=timeout or (agent.worker.options.shutdown_timeout if lost else 0))
    except BaseException:
        # The handler that woke this thread may still run. Its caller should get the reply, not a PeerLostError.
        agent.finish_calls(_LAST_REPLY_SECONDS)
        raise
    finally:
        agent.shutdown()
        agents.reset()
    if agent.leaks and not _ignore_rref_leak:
        raise RuntimeError(f"Leaking RRef: {'; '.join(agent.leaks)}")
