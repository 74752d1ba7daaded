"""The reference's names for kinds of messages, by which its tests say what is to go wrong."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.jit._builtins import _find_builtin

from backhaul._rpc.calls.pending import Pending

_of_call: contextvars.ContextVar[str | None] = contextvars.ContextVar("backhaul_compat_kind", default=None)

_of_label = {
    "to_here": ("SCRIPT_RREF_FETCH_CALL", "PYTHON_RREF_FETCH_CALL"),
    "take_notices": ("RREF_FORK_REQUEST", "RREF_CHILD_ACCEPT", "RREF_USER_DELETE"),
}


@contextlib.contextmanager
def calling(function: Callable[..., Any], *, remote: bool = False) -> Iterator[None]:
    """Say what the call is that is made inside."""
    script = isinstance(function, torch.jit.ScriptFunction) or _find_builtin(function) is not None
    token = _of_call.set(f"{'SCRIPT' if script else 'PYTHON'}{'_REMOTE' if remote else ''}_CALL")
    try:
        yield
    finally:
        _of_call.reset(token)


def kinds_of(pending: Pending) -> Collection[str]:
    """What the reference would call the message that is being sent."""
    kind = _of_call.get()
    return (kind,) if kind is not None else _of_label.get(pending.label, ())
