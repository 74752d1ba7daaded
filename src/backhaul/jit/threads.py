"""Which worker and which context are current where context variables do not reach.

``torch.jit.fork`` runs code on other threads, and after a ``wait`` a script may go on on another one. Context variables
do not follow there; ATen's thread-local state does. So what is current is put there whenever a script is about to fork
or to wait, and looked up there on threads on which it was not put.
"""

from __future__ import annotations

import threading
import weakref
from typing import NamedTuple

from backhaul import worker as workers
from backhaul.autograd import recording
from backhaul.jit import compiler
from backhaul.worker import Worker

_KEY = "backhaul"


class Carried(NamedTuple):
    """What was current on a thread. Weakly: the state of a thread may outlive it by far."""

    thread: int
    worker: weakref.ref[Worker] | None
    scope: weakref.ref[recording.Scope] | None


def carry() -> None:
    """Let what is current here be current on all threads that this strand of execution moves to."""
    if _elsewhere() is None:
        worker, scope = workers._current.get(), recording._scope.get()
        carried = Carried(
            threading.get_ident(),
            None if worker is None else weakref.ref(worker),
            None if scope is None else weakref.ref(scope),
        )
        compiler.stash(_KEY, carried)


def _elsewhere() -> Carried | None:
    """What was carried here from another thread. On the thread itself, context variables know better."""
    carried: Carried | None = compiler.stashed(_KEY)
    return None if carried is None or carried.thread == threading.get_ident() else carried


def _worker() -> Worker | None:
    carried = _elsewhere()
    return None if carried is None or carried.worker is None else carried.worker()


def _scope() -> recording.Scope | None:
    carried = _elsewhere()
    return None if carried is None or carried.scope is None else carried.scope()


def install() -> None:
    """Look there too."""
    workers.carried = _worker
    recording.carried = _scope
