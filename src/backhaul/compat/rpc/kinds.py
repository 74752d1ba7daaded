"""The reference's names for kinds of messages. Its tests use them to choose the messages to drop or delay."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.jit._builtins import _find_builtin

from backhaul._rpc.calls.pending_call import Pending

_kind_of_call: contextvars.ContextVar[str | None] = contextvars.ContextVar("backhaul_compat_kind", default=None)

_KINDS_BY_LABEL = {
    "to_here": ("SCRIPT_RREF_FETCH_CALL", "PYTHON_RREF_FETCH_CALL"),
    "take_notices": ("RREF_FORK_REQUEST", "RREF_CHILD_ACCEPT", "RREF_USER_DELETE"),
}


@contextlib.contextmanager
def calling(function: Callable[..., Any], *, remote: bool = False) -> Iterator[None]:
    """Set the kind of the call that is made inside the ``with`` block."""
    script = isinstance(function, torch.jit.ScriptFunction) or _find_builtin(function) is not None
    token = _kind_of_call.set(f"{'SCRIPT' if script else 'PYTHON'}{'_REMOTE' if remote else ''}_CALL")
    try:
        yield
    finally:
        _kind_of_call.reset(token)


def kinds_of(pending: Pending) -> Collection[str]:
    """The reference's names for the message of a call that is being sent."""
    kind = _kind_of_call.get()
    return (kind,) if kind is not None else _KINDS_BY_LABEL.get(pending.label, ())
