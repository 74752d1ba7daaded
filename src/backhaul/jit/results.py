"""Values that come from Python and are waited for in script.

The compiler knows which type a value has, and the interpreter needs it to have that type: a future made in Python
holds a Python object, which no operator takes. So a script that waits gets a future of the interpreter's own: that of a
fork which waits for the Python one (this holds up no thread) and then converts what came.
"""

from __future__ import annotations

import threading
from typing import Any, TypeAlias

import torch
import torch.futures

from backhaul.jit import compiler

Kind: TypeAlias = Any  # stands for a type of the compiler's


class _Outcome:
    """What a future ended with, on its way through the interpreter."""

    __slots__ = ("_future",)

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        self._future = future

    def take(self) -> Any:
        return self._future.value()


def take(outcome: Any) -> Any:
    """The value, or the exception."""
    return outcome.take()


def deliver(gate: torch.futures.Future[Any]) -> Kind:
    """Scripted for each kind of value."""
    return take(gate.wait())


def start(gate: torch.futures.Future[Any]) -> torch.futures.Future[Kind]:
    """Likewise."""
    return torch.jit.fork(deliver, gate)  # type: ignore[no-any-return]


_lock = threading.RLock()  # guards both tables, while something is compiled too
_kinds: dict[str, compiler.Type] = {}
_starters: dict[str, Any] = {}


def key_of(kind: compiler.Type) -> str:
    """The name of a type, by which ``typed`` knows it."""
    with _lock:
        _kinds[kind.annotation_str] = kind
    return str(kind.annotation_str)


def _starter(key: str) -> Any:
    with _lock:
        found = _starters.get(key)
        if found is None:
            found = _starters[key] = _compile(_kinds[key])
        return found


def _compile(kind: compiler.Type) -> Any:
    meanings = {"Kind": kind, "take": compiler.ignored(take, **{"outcome": Any, "return": kind})}
    delivering = compiler.instantiate(deliver, meanings)  # type: ignore[arg-type]
    return compiler.instantiate(start, {**meanings, "deliver": delivering})  # type: ignore[arg-type]


def typed(future: torch.futures.Future[Any], key: str) -> torch.futures.Future[Any]:
    """A future for script that ends as ``future`` does, with a value of the type named."""
    gate: torch.futures.Future[Any] = torch.futures.Future()
    future.add_done_callback(lambda done: gate.set_result(_Outcome(done)))
    made: torch.futures.Future[Any] = _starter(key)(gate)
    return made
