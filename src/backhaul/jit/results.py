"""Values that come from Python and are waited for in script.

The compiler knows which type a value has, and the interpreter needs it to have that type: a future made in Python
holds a Python object, which no operator takes. Where a script waits for it at once, what came is converted behind the
wait. Where it gets a future to wait for, that is one of the interpreter's own: of a fork which waits for the Python one
(this holds up no thread) and then converts.

Forks, and scripts that go on after a wait, need a thread of the interpreter's, which may all be held up by Python code
that scripts call. So a thread that called the script itself waits here, and the script goes on on it.
"""

from __future__ import annotations

import numbers
import threading
from typing import Any, TypeAlias

import torch
import torch.futures

from backhaul._rpc.futures import Future
from backhaul.jit import current_worker, torch_compiler

Kind: TypeAlias = Any  # stands for a type of the compiler's


class _ScriptOutcome:
    """What a future ended with, on its way through the interpreter."""

    __slots__ = ("_future",)

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        self._future = future

    def take(self) -> Any:
        return self._future.value()


def take(outcome: Any) -> Any:
    """The value, or the exception."""
    return outcome.take()


_NUMBERS = (numbers.Number, torch.Tensor)
_ACCEPTED: dict[str, Any] = {
    "Tensor": torch.Tensor,
    "bool": _NUMBERS,
    "int": _NUMBERS,
    "float": _NUMBERS,
    "str": str,
    "Any": object,
}


def take_as(kind: str, outcome: Any) -> Any:
    """The value, if the interpreter can make one of that kind of it, or the exception."""
    value = outcome.take()
    if not isinstance(value, _ACCEPTED[kind]):
        raise TypeError(f"the value is of type {type(value).__name__}, but the script takes it for {kind}")
    return value


def convert(outcome: Any) -> Kind:
    """Scripted for each kind of value."""
    return take(outcome)


def convert_loosely(outcome: Any) -> Kind:
    """Likewise, and what came is left what it is, whatever that is."""
    return as_it_is(take(outcome))


def as_it_is(value: Any) -> Kind:
    """Stands for a cast in what is compiled."""
    raise NotImplementedError


def deliver(one_shot: torch.futures.Future[Any]) -> Kind:
    """Likewise."""
    return take(one_shot.wait())


def start(one_shot: torch.futures.Future[Any]) -> torch.futures.Future[Kind]:
    """Likewise."""
    return torch.jit.fork(deliver, one_shot)  # type: ignore[no-any-return]


_lock = threading.RLock()  # guards the tables, while something is compiled too
_kinds: dict[str, torch_compiler.Type] = {}
_starters: dict[str, Any] = {}
_converters: dict[str, Any] = {}


def key_of(kind: torch_compiler.Type) -> str:
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


def taking(kind: torch_compiler.Type) -> Any:
    """What ``take`` is in scripts, for one kind of value: an operator, or a Python function where there is none."""
    operator = getattr(torch.ops.backhaul, f"take_{kind.annotation_str}", None)
    return operator or torch_compiler.ignored(take, **{"outcome": Any, "return": kind})


def taking_loosely(kind: torch_compiler.Type) -> Any:
    """Likewise, where annotations are not to be relied on. That is for tensors alone: other values are converted."""
    if not isinstance(kind, torch_compiler.types_of.TensorType):
        return taking(kind)
    standing = torch_compiler.ignored(as_it_is, **{"value": Any, "return": kind})
    meanings = {"Kind": kind, "take": torch.ops.backhaul.take_Any, "as_it_is": standing}
    made = torch_compiler.instantiate(convert_loosely, meanings)  # type: ignore[arg-type]
    torch_compiler.set_unchecked(made, as_it_is.__name__)
    return made


def converter(kind: torch_compiler.Type) -> torch_compiler.Graph:
    """A graph that makes a value of what ``settled`` gives."""
    key = key_of(kind)
    with _lock:
        found = _converters.get(key)
        if found is None:
            made = torch_compiler.instantiate(convert, {"Kind": kind, "take": taking(kind)})  # type: ignore[arg-type]
            found = _converters[key] = made
        return found.graph


def _compile(kind: torch_compiler.Type) -> Any:
    meanings = {"Kind": kind, "take": taking(kind)}
    delivering = torch_compiler.instantiate(deliver, meanings)  # type: ignore[arg-type]
    return torch_compiler.instantiate(start, {**meanings, "deliver": delivering})  # type: ignore[arg-type]


def typed(future: torch.futures.Future[Any], key: str) -> torch.futures.Future[Any]:
    """A future for script that ends as ``future`` does, with a value of the type named."""
    made: torch.futures.Future[Any] = _starter(key)(_gate(future))
    return made


def settled(future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
    """A future for a script that waits for it at once, of what ``take`` takes. It is done, where a thread may wait."""
    one_shot = _gate(future)
    if current_worker.called_here():
        one_shot.wait()
    return one_shot


def _gate(future: torch.futures.Future[Any]) -> Future[Any]:
    one_shot: Future[Any] = Future()
    future.add_done_callback(lambda done: one_shot.set_result(_ScriptOutcome(done)))
    return one_shot
