"""Which worker and which context are current where context variables do not reach.

``torch.jit.fork`` runs code on other threads, and after a ``wait`` a script may go on on another one. Context variables
do not follow there; ATen's thread-local state does. So what is current is put there while Python calls a script, and
looked up there on other threads. It comes second: where something was made current on a thread itself, that is.
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

_KEY = "backhaul"
_SETTLED = {f"backhaul::{name}" for name in ("rpc_sync", "remote", "to_here", "local_value")}


class Entered(NamedTuple, Generic[T]):
    """What a context variable held on a thread. Weakly: the state of threads may outlive it by far."""

    thread: int
    value: weakref.ref[Any]

    def elsewhere(self) -> bool:
        """Whether that was another thread. On the same one, context variables know better."""
        return self.thread != threading.get_ident()


class Carried(NamedTuple):
    """What is current for a strand of execution."""

    worker: Entered[Worker] | None
    scope: Entered[recording.Scope] | None


_NOTHING = Carried(None, None)


class _ThreadWorker(threading.local):
    calls = 0  # from Python into script that have not returned to this thread


_here = _ThreadWorker()


class _Traits(NamedTuple):
    """What a script may do."""

    moves: bool  # to other threads
    waits: bool  # in the interpreter, on the thread that calls it


_NONE = _Traits(moves=False, waits=False)
_traits: dict[str, _Traits] = {}  # by the name of the script


def called_here() -> bool:
    """Whether this thread has called the script that it runs, so that it has to wait for its end in any case. Other
    threads are those of the interpreter, which has few.
    """
    return _here.calls > 0


def call(invoke: Callable[..., Any], script: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a script. What is current here is current on all threads that it moves to, until it returns."""
    worker, scope = workers._current.get(), recording._scope.get()
    outer: Carried | None = saved(_KEY)
    current = not (worker is None and scope is None and outer is None)
    traits = _traits_of(script) if current else _NONE
    if traits.moves:
        inherited = outer or _NOTHING
        save(_KEY, Carried(_put(worker, inherited.worker), _put(scope, inherited.scope)))
    _here.calls += 1
    try:
        if worker is None or not worker.thread_pool.inside or not traits.waits:
            return invoke(script, *args, **kwargs)
        with worker.thread_pool.blocking():  # the interpreter does not say when it waits
            return invoke(script, *args, **kwargs)
    finally:
        _here.calls -= 1
        if traits.moves:
            save(_KEY, outer)


def _put(own: T | None, inherited: Entered[T] | None) -> Entered[T] | None:
    if own is not None:
        return Entered(threading.get_ident(), weakref.ref(own))
    return inherited if inherited is not None and inherited.elsewhere() else None


def _traits_of(script: Any) -> _Traits:
    name = torch_compiler.name_of(script)
    found = _traits.get(name)
    if found is None:
        graph = script.inlined_graph
        unknown = bool(graph.findAllNodes("prim::CallMethod", True))
        waited = {node.inputsAt(0).node().kind() for node in graph.findAllNodes("aten::wait", True)}
        waits = unknown or not waited <= _SETTLED  # most of our operators wait before
        found = _Traits(moves=waits or bool(graph.findAllNodes("prim::fork", True)), waits=waits)
        _traits[name] = found
    return found


def _worker() -> Worker | None:
    carried: Carried | None = saved(_KEY)
    return None if carried is None else _value(carried.worker)


def _scope() -> recording.Scope | None:
    carried: Carried | None = saved(_KEY)
    return None if carried is None else _value(carried.scope)


def _value(put: Entered[T] | None) -> T | None:
    return put.value() if put is not None and put.elsewhere() else None


def install() -> None:
    """Carry what is current into scripts and look there too. This stays: what was scripted has to go on working."""
    if workers.find_outside_context is None:
        torch_compiler.wrap_calls(call)
        workers.find_outside_context = _worker
        recording.carried = _scope
