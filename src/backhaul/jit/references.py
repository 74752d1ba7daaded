"""``RRef[T]`` in script: for each ``T`` a scripted class that holds the reference as a Python object.

Scripts can use references and pass them on. A reference that comes out of script is a ``_ReferenceFromScript`` in
Python, which acts as the reference itself.

The class holds a future of the reference, because the compiler can name the type of a future but not that of a Python
object. Its methods are operators where possible, because a script that calls Python functions cannot be saved. So
modules that hold references can be saved, if ``saving`` is set.
"""

from __future__ import annotations

import re
import threading
import typing
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.futures

from backhaul._rref.handle import RRef
from backhaul._wire.pickling import reducers
from backhaul._worker.worker import current_worker
from backhaul.jit import torch_compiler
from backhaul.jit.results import outcome_to_await, take, take_function, unchecked_take_function
from backhaul.jit.torch_compiler import types_of

# Placeholders: the class below is compiled with types of the compiler in their place.
ValueType: TypeAlias = Any
Held: TypeAlias = Any


Owner = NamedTuple("Owner", [("name", str), ("id", int)])  # noqa: UP014 (the compiler needs types, not their names)
"""What ``owner()`` returns in script. Calls accept it as a worker."""


class Reference:
    """A template, compiled once for each type of value and under another name. It calls the functions below."""

    def __init__(self, _held: Held) -> None:
        self._held = _held

    def to_here(self, timeout: float = -1.0) -> ValueType:
        return take(to_here(self._held, timeout).wait())

    def local_value(self) -> ValueType:
        return take(local_value(self._held).wait())

    def is_owner(self) -> bool:
        return is_owner(self._held)

    def owner(self) -> Owner:
        return Owner(owner_name(self._held), owner_id(self._held))

    def owner_name(self) -> str:
        return owner_name(self._held)

    def confirmed_by_owner(self) -> bool:
        return confirmed_by_owner(self._held)

    def __getstate__(self) -> str:
        return save(self._held)

    def __setstate__(self, state: str) -> None:
        self._held = load(state)


class Saving(Protocol):
    """How references are written to files.

    References are counted, so this is only for programs that read each file once.
    """

    def save(self, reference: RRef[Any]) -> str:
        """The text to write for a reference."""

    def load(self, state: str) -> RRef[Any]:
        """The reference that this text was written for."""


saving: Saving | None = None

NOT_SAVED = "RRef jit pickling is only allowed inside RPC calls"


def save(held: Any) -> str:
    """The text to write to a file for a reference."""
    if saving is None:
        raise RuntimeError(NOT_SAVED)
    return saving.save(reference(held))


def load(state: str) -> Any:
    """Read a reference from a file; returns what its scripted class holds."""
    if saving is None:
        raise RuntimeError(
            "cannot load a file that holds references: only programs that use backhaul.compat.rpc can save and load "
            "references"
        )
    return saving.load(state)._held


def reference(held: Any) -> Any:
    """The reference that a scripted class holds."""
    return held.value() if isinstance(held, torch._C.Future) else unwrap(held)


def to_here(held: Any, timeout: float) -> Any:
    """A future of the value's outcome, for ``results.converter``."""
    asked = reference(held)._ask(None if timeout < 0 else timeout)
    current_worker().endpoint.flush()  # a script that waits for the value does not tell the worker
    return outcome_to_await(asked)


def local_value(held: Any) -> Any:
    """A future of the value's outcome, for ``results.converter``. Only the owner may call this."""
    asked = reference(held)
    if not asked.is_owner():
        raise RuntimeError(f"Can't call RRef.local_value() on a non-owner RRef: {asked!r}")
    return outcome_to_await(asked._ask_owner())


def is_owner(held: Any) -> bool:
    """Whether this worker owns the value."""
    return bool(reference(held).is_owner())


def owner_name(held: Any) -> str:
    """The name of the worker that owns the value."""
    return str(reference(held).owner_name())


def owner_id(held: Any) -> int:
    """The id of the worker that owns the value."""
    return int(reference(held).owner().id)


def confirmed_by_owner(held: Any) -> bool:
    """Whether the owner is known to have the value, or to have failed to make it."""
    return bool(reference(held).confirmed_by_owner())


class _ReferenceFromScript:
    """A reference that came out of script. It passes everything on to the reference that it wraps."""

    __slots__ = ("__weakref__", "_held")

    _held: torch.futures.Future[RRef[Any]]

    @property
    def _wrapped(self) -> RRef[Any]:
        return self._held.value()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._wrapped)

    def __repr__(self) -> str:
        return repr(self._wrapped)


def unwrap(value: Any) -> Any:
    """The reference that came out of script as ``value``; any other value is returned unchanged."""
    return value._wrapped if type(value) is _ReferenceFromScript else value


def _reduce(value: _ReferenceFromScript, parcels: list[Any]) -> Any:
    return reducers[type(value._wrapped)](value._wrapped, parcels)


reducers[_ReferenceFromScript] = _reduce


class ReferenceClasses:
    """The scripted classes, compiled when they are first needed. Thread-safe.

    Attributes:
        unchecked: Python classes of references whose annotations may be wrong; see ``results.unchecked_take_function``.
    """

    def __init__(self) -> None:
        self.unchecked: set[type] = set()
        self._classes: dict[tuple[str, bool], Any] = {}
        self._lock = threading.RLock()  # guards _classes; held while a class is compiled

    def type_of_annotation(self, annotation: Any, loc: Any) -> Any:
        """The type for an annotation ``RRef[T]``; None for any other annotation."""
        origin = typing.get_origin(annotation)
        if isinstance(annotation, type) and issubclass(annotation, RRef):
            name = annotation.__name__
            raise torch_compiler.error(
                loc, f"{name} needs the type of its value: write {name}[T], where T is the type of the value"
            )
        if not (isinstance(origin, type) and issubclass(origin, RRef)):
            return None
        value_type = torch_compiler.type_of(typing.get_args(annotation)[0], loc)
        return self.class_of(value_type, unchecked=origin in self.unchecked)

    def infer_type(self, value: Any) -> Any:
        """The type of a reference, or of a list, dict or tuple of references; None for any other value.

        Asks owners for the types of the values, and waits for the answers. If an owner does not answer, or if the
        Python type does not determine the type in script, the result is None too: scripts may never use the value.
        """
        value = unwrap(value)
        if isinstance(value, RRef):
            return self._infer_type_of_reference(value)
        if isinstance(value, tuple):
            found = [torch_compiler.infer(item) for item in value]
            return None if None in found else types_of.TupleType(found)
        if not (isinstance(value, (list, dict)) and value):
            return None
        items = value.values() if isinstance(value, dict) else value
        found = [self.infer_type(item) for item in items]
        if None in found or any(each != found[0] for each in found):
            return None
        if isinstance(value, list):
            return types_of.ListType(found[0])
        key = torch_compiler.infer(next(iter(value)))
        return None if key is None else types_of.DictType(key, found[0])

    def _infer_type_of_reference(self, reference: RRef[Any]) -> Any:
        try:
            value_type = torch_compiler.type_of_values(reference._get_type())
        except Exception:  # the call failed, or the function that makes the value raised something
            return None
        return None if value_type is None else self.class_of(value_type, unchecked=type(reference) in self.unchecked)

    def class_of(self, value_type: torch_compiler.Type, *, unchecked: bool = False) -> Any:
        """The scripted class of references to values of a type."""
        key = value_type.annotation_str, unchecked
        with self._lock:
            found = self._classes.get(key)
            if found is None:
                name = f"RRef_{len(self._classes)}_{re.sub('[^a-zA-Z0-9]+', '_', key[0])}"
                take = unchecked_take_function(value_type) if unchecked else take_function(value_type)
                found = self._classes[key] = _compile(value_type, name, take)
            return found


def _compile(value_type: torch_compiler.Type, name: str, take: Any) -> Any:
    operators = torch.ops.backhaul
    meanings = {
        "Held": types_of.FutureType(types_of.AnyType.get()),
        "ValueType": value_type,
        "Owner": Owner,
        "take": take,
        "to_here": operators.to_here,
        "local_value": operators.local_value,
        "is_owner": operators.is_owner,
        "owner_name": operators.owner_name,
        "owner_id": operators.owner_id,
        "confirmed_by_owner": operators.confirmed_by_owner,
        "save": operators.save_reference,
        "load": operators.load_reference,
    }
    made = torch_compiler.instantiate_class(Reference, name, meanings)
    torch_compiler.set_python_class(made.qualified_name(), _ReferenceFromScript)
    return made


classes = ReferenceClasses()
