"""Converts values that come from Python and that scripts wait for.

The compiler knows the type of each value, and the interpreter requires the value to have that type. A future made in
Python holds a Python object, which no operator accepts. Where a script waits for the future at once, the rewritten
graph converts the outcome after the wait. Where the script gets the future itself, that is a future of the
interpreter: of a fork that waits for the Python future (this blocks no thread) and then converts its outcome.

Forks, and scripts that continue after a wait, need a thread of the interpreter. Python code that scripts call may block
all of those. So a thread that called the script itself waits here, and the script continues on it.
"""

from __future__ import annotations

import numbers
import threading
from typing import Any, TypeAlias

import torch
import torch.futures

from backhaul._rpc.futures import Future
from backhaul.jit import current_worker, torch_compiler

ValueType: TypeAlias = Any  # a placeholder: each template is compiled with a type of the compiler in its place


class _ScriptOutcome:
    """The outcome of a future, as an object that the interpreter can pass on."""

    __slots__ = ("_future",)

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        self._future = future

    def take(self) -> Any:
        return self._future.value()


def take(outcome: Any) -> Any:
    """Return the value of an outcome, or raise its exception."""
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
    """As ``take``, for a value that the interpreter can convert to that type.

    Raises:
        TypeError: The interpreter cannot convert the value.
    """
    value = outcome.take()
    if not isinstance(value, _ACCEPTED[kind]):
        raise TypeError(
            f"the script expects a value of type {kind}, but the value is of type {type(value).__name__}: change the "
            "annotation in the script, or the function that makes the value"
        )
    return value


# Templates. Each is compiled once for each type of value, with other meanings for the names in it.


def convert(outcome: Any) -> ValueType:
    """Make a value of an outcome."""
    return take(outcome)


def convert_unchecked(outcome: Any) -> ValueType:
    """Make a value of an outcome. The value keeps its type, whatever that is."""
    return unchecked_cast(take(outcome))


def unchecked_cast(value: Any) -> ValueType:
    """A placeholder. The compiled graph has a cast in its place."""
    raise NotImplementedError


def wait_and_convert(outcome: torch.futures.Future[Any]) -> ValueType:
    """Wait for an outcome and make a value of it."""
    return take(outcome.wait())


def fork_conversion(outcome: torch.futures.Future[Any]) -> torch.futures.Future[ValueType]:
    """Start ``wait_and_convert``; return its future."""
    return torch.jit.fork(wait_and_convert, outcome)  # type: ignore[no-any-return]


_lock = threading.RLock()  # guards the tables below; held while a template is compiled
_types: dict[str, torch_compiler.Type] = {}
_forking_converters: dict[str, Any] = {}
_converters: dict[str, Any] = {}


def register_type(value_type: torch_compiler.Type) -> str:
    """Make a type known to ``typed_future``; returns the key to pass there."""
    with _lock:
        _types[value_type.annotation_str] = value_type
    return str(value_type.annotation_str)


def _forking_converter(key: str) -> Any:
    with _lock:
        found = _forking_converters.get(key)
        if found is None:
            found = _forking_converters[key] = _compile(_types[key])
        return found


def take_function(value_type: torch_compiler.Type) -> Any:
    """What ``take`` means in script for one type: an operator, or a Python function where there is no operator."""
    operator = getattr(torch.ops.backhaul, f"take_{value_type.annotation_str}", None)
    return operator or torch_compiler.ignored(take, **{"outcome": Any, "return": value_type})


def unchecked_take_function(value_type: torch_compiler.Type) -> Any:
    """As ``take_function``, where annotations may be wrong.

    Only tensors are not checked. Values of all other types are converted.
    """
    if not isinstance(value_type, torch_compiler.types_of.TensorType):
        return take_function(value_type)
    placeholder = torch_compiler.ignored(unchecked_cast, **{"value": Any, "return": value_type})
    meanings = {"ValueType": value_type, "take": torch.ops.backhaul.take_Any, "unchecked_cast": placeholder}
    made = torch_compiler.instantiate(convert_unchecked, meanings)  # type: ignore[arg-type]
    torch_compiler.replace_by_cast(made, unchecked_cast.__name__)
    return made


def converter(value_type: torch_compiler.Type) -> torch_compiler.Graph:
    """A graph that makes a value of an outcome; see ``outcome_to_await``."""
    key = register_type(value_type)
    with _lock:
        found = _converters.get(key)
        if found is None:
            meanings = {"ValueType": value_type, "take": take_function(value_type)}
            found = _converters[key] = torch_compiler.instantiate(convert, meanings)  # type: ignore[arg-type]
        return found.graph


def _compile(value_type: torch_compiler.Type) -> Any:
    meanings = {"ValueType": value_type, "take": take_function(value_type)}
    inner = torch_compiler.instantiate(wait_and_convert, meanings)  # type: ignore[arg-type]
    return torch_compiler.instantiate(fork_conversion, {**meanings, "wait_and_convert": inner})  # type: ignore[arg-type]


def typed_future(future: torch.futures.Future[Any], key: str) -> torch.futures.Future[Any]:
    """A future for script that ends as ``future`` does, with a value of the type registered as ``key``."""
    made: torch.futures.Future[Any] = _forking_converter(key)(_outcome_of(future))
    return made


def outcome_to_await(future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
    """A future of the outcome of ``future``, for a script that waits for it at once.

    It is already done if Python code on this thread called the script, because then this function waits.
    """
    outcome = _outcome_of(future)
    if current_worker.called_from_this_thread():
        outcome.wait()
    return outcome


def _outcome_of(future: torch.futures.Future[Any]) -> Future[Any]:
    outcome: Future[Any] = Future()
    future.add_done_callback(lambda done: outcome.set_result(_ScriptOutcome(done)))
    return outcome
