"""Finds the current worker and context on threads that context variables do not reach.

``torch.jit.fork`` runs code on other threads, and a script may continue on another thread after a ``wait``. Context
variables do not follow a script to those threads, but ATen's thread-local state does. So this module stores the current
worker and context there while Python calls a script, and looks them up there on other threads. The lookup comes second:
a worker or context that was made current on the thread itself takes precedence.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from backhaul._autograd.forward import recording
from backhaul._worker import worker as workers
from backhaul._worker.worker import Worker
from backhaul.jit import torch_compiler
from backhaul.jit.thread_state import save, saved

T = TypeVar("T")

_STATE_KEY = "backhaul"
_WAITING_OPERATORS = {f"backhaul::{name}" for name in ("rpc_sync", "remote", "to_here", "local_value")}


class ThreadValue(NamedTuple, Generic[T]):
    """The value of a context variable on one thread.

    The reference is weak, because the state of a thread may live much longer than the value.
    """

    thread: int
    value: weakref.ref[Any]

    def is_from_another_thread(self) -> bool:
        """Whether another thread stored the value. On the same thread, the context variable itself is up to date."""
        return self.thread != threading.get_ident()


class Carried(NamedTuple):
    """What a script carries along to the threads that it runs on."""

    worker: ThreadValue[Worker] | None
    scope: ThreadValue[recording.Scope] | None


_NOTHING_CARRIED = Carried(None, None)


class _ScriptCalls(threading.local):
    pending = 0  # calls from Python into script that have not returned to this thread


_calls = _ScriptCalls()


class _ScriptTraits(NamedTuple):
    """What a script may do."""

    changes_threads: bool
    waits: bool  # in the interpreter, on the thread that calls the script


_NO_TRAITS = _ScriptTraits(changes_threads=False, waits=False)
_traits: dict[str, _ScriptTraits] = {}  # by the qualified name of the script


def called_from_this_thread() -> bool:
    """Whether Python code on this thread called the running script, so that this thread waits for its end anyway.

    All other threads that run scripts belong to the interpreter, which has few of them.
    """
    return _calls.pending > 0


def call(invoke: Callable[..., Any], script: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a script. Until it returns, the current worker and context are current on all threads it continues on."""
    worker, scope = workers._current.get(), recording._scope.get()
    outer: Carried | None = saved(_STATE_KEY)
    anything_current = not (worker is None and scope is None and outer is None)
    traits = _traits_of(script) if anything_current else _NO_TRAITS
    if traits.changes_threads:
        inherited = outer or _NOTHING_CARRIED
        save(_STATE_KEY, Carried(_carry(worker, inherited.worker), _carry(scope, inherited.scope)))
    _calls.pending += 1
    try:
        if worker is None or not worker.thread_pool.inside or not traits.waits:
            return invoke(script, *args, **kwargs)
        with worker.thread_pool.blocking():  # the interpreter does not tell the pool when it waits
            return invoke(script, *args, **kwargs)
    finally:
        _calls.pending -= 1
        if traits.changes_threads:
            save(_STATE_KEY, outer)


def _carry(own: T | None, inherited: ThreadValue[T] | None) -> ThreadValue[T] | None:
    if own is not None:
        return ThreadValue(threading.get_ident(), weakref.ref(own))
    return inherited if inherited is not None and inherited.is_from_another_thread() else None


def _traits_of(script: Any) -> _ScriptTraits:
    name = torch_compiler.name_of(script)
    found = _traits.get(name)
    if found is None:
        graph = script.inlined_graph
        unknown = bool(graph.findAllNodes("prim::CallMethod", True))
        awaited = {node.inputsAt(0).node().kind() for node in graph.findAllNodes("aten::wait", True)}
        # Most operators of Backhaul wait themselves, so the interpreter's wait on their result returns at once.
        waits = unknown or not awaited <= _WAITING_OPERATORS
        forks = bool(graph.findAllNodes("prim::fork", True))
        found = _ScriptTraits(changes_threads=waits or forks, waits=waits)
        _traits[name] = found
    return found


def _worker() -> Worker | None:
    carried: Carried | None = saved(_STATE_KEY)
    return None if carried is None else _value(carried.worker)


def _scope() -> recording.Scope | None:
    carried: Carried | None = saved(_STATE_KEY)
    return None if carried is None else _value(carried.scope)


def _value(carried: ThreadValue[T] | None) -> T | None:
    return carried.value() if carried is not None and carried.is_from_another_thread() else None


def install() -> None:
    """Carry the current worker and context into scripts, and look them up there.

    This cannot be undone: functions that were scripted before ``uninstall`` must continue to work.
    """
    if workers.find_outside_context is None:
        torch_compiler.wrap_calls(call)
        workers.find_outside_context = _worker
        recording.carried = _scope
