"""``RRef[T]`` in script: for each ``T`` a scripted class that holds the reference as a Python object.

In script, references are used and passed on; in Python they are what they always were. Where one comes out of script
it is a ``_Shown``, which stands for the reference itself.

The class holds a future of the reference, because the compiler has a name for the type of a future and none for that
of a Python object. Its methods are operators where they can be, because calls of Python functions cannot be saved. So
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
from backhaul.jit.results import settled, take, taking, taking_loosely
from backhaul.jit.torch_compiler import types_of

Kind: TypeAlias = Any  # stands for a type of the compiler's
Held: TypeAlias = Any


Owner = NamedTuple("Owner", [("name", str), ("id", int)])  # noqa: UP014 (the compiler wants types, not their names)
"""What ``owner()`` gives in script; calls take it for a worker."""


class Reference:
    """Scripted for each kind of value, under a name of its own. The names in it mean the functions below."""

    def __init__(self, _held: Held) -> None:
        self._held = _held

    def to_here(self, timeout: float = -1.0) -> Kind:
        return take(to_here(self._held, timeout).wait())

    def local_value(self) -> Kind:
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
    """How references are written to files. They are counted, so this is for those who know that a file is read once."""

    def save(self, reference: RRef[Any]) -> str:
        """What to write for a reference."""

    def load(self, state: str) -> RRef[Any]:
        """The reference for which that was written."""


saving: Saving | None = None

NOT_SAVED = "RRef jit pickling is only allowed inside RPC calls"


def save(held: Any) -> str:
    """What a file gets of a reference."""
    if saving is None:
        raise RuntimeError(NOT_SAVED)
    return saving.save(reference(held))


def load(state: str) -> Any:
    """What a reference holds that comes from a file."""
    if saving is None:
        raise RuntimeError("a file with references in it can only be loaded where they can be saved")
    return saving.load(state)._held


def reference(held: Any) -> Any:
    """The reference that script holds."""
    return held.value() if isinstance(held, torch._C.Future) else itself(held)


def to_here(held: Any, timeout: float) -> Any:
    """A future of the value, for ``results.converter``."""
    asked = reference(held)._ask(None if timeout < 0 else timeout)
    current_worker().endpoint.flush()  # whoever waits for this in script does not tell the worker
    return settled(asked)


def local_value(held: Any) -> Any:
    """Likewise, on its owner."""
    asked = reference(held)
    if not asked.is_owner():
        raise RuntimeError(f"Can't call RRef.local_value() on a non-owner RRef: {asked!r}")
    return settled(asked._ask_owner())


def is_owner(held: Any) -> bool:
    """Whether the value is here."""
    return bool(reference(held).is_owner())


def owner_name(held: Any) -> str:
    """The name of the worker that has it."""
    return str(reference(held).owner_name())


def owner_id(held: Any) -> int:
    """The id of that worker."""
    return int(reference(held).owner().id)


def confirmed_by_owner(held: Any) -> bool:
    """Whether its owner is known to have it."""
    return bool(reference(held).confirmed_by_owner())


class _Shown:
    """A reference that came out of script."""

    __slots__ = ("__weakref__", "_held")

    _held: torch.futures.Future[RRef[Any]]

    @property
    def _itself(self) -> RRef[Any]:
        return self._held.value()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._itself, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._itself)

    def __repr__(self) -> str:
        return repr(self._itself)


def itself(value: Any) -> Any:
    """The reference that a value stands for; the value if it stands for none."""
    return value._itself if type(value) is _Shown else value


def _reduce(shown: _Shown, parcels: list[Any]) -> Any:
    return reducers[type(shown._itself)](shown._itself, parcels)


reducers[_Shown] = _reduce


class References:
    """The classes, made when they are asked for. Thread-safe.

    Attributes:
        loose: Classes of references whose annotations are not to be relied on, see ``results.taking_loosely``.
    """

    def __init__(self) -> None:
        self.loose: set[type] = set()
        self._classes: dict[tuple[str, bool], Any] = {}
        self._lock = threading.RLock()  # guards _classes, while one is compiled too

    def annotated(self, annotation: Any, loc: Any) -> Any:
        """The type for an annotation ``RRef[T]``; None if it is something else."""
        origin = typing.get_origin(annotation)
        if isinstance(annotation, type) and issubclass(annotation, RRef):
            raise torch_compiler.error(loc, f"write {annotation.__name__}[T], where T is the type of the value")
        if not (isinstance(origin, type) and issubclass(origin, RRef)):
            return None
        return self.class_of(torch_compiler.type_of(typing.get_args(annotation)[0], loc), loose=origin in self.loose)

    def inferred(self, value: Any) -> Any:
        """The type of a reference, or of a list, dict or tuple of references; None if it is something else.

        Asks owners for the types of the values, and waits for the answers. Where one does not come, or where a Python
        type does not say enough, the result is None too: the value may be one that scripts have nothing to do with.
        """
        value = itself(value)
        if isinstance(value, RRef):
            return self._inferred(value)
        if isinstance(value, tuple):
            kinds = [torch_compiler.infer(item) for item in value]
            return None if None in kinds else types_of.TupleType(kinds)
        if not (isinstance(value, (list, dict)) and value):
            return None
        items = value.values() if isinstance(value, dict) else value
        kinds = [self.inferred(item) for item in items]
        if None in kinds or any(kind != kinds[0] for kind in kinds):
            return None
        if isinstance(value, list):
            return types_of.ListType(kinds[0])
        key = torch_compiler.infer(next(iter(value)))
        return None if key is None else types_of.DictType(key, kinds[0])

    def _inferred(self, reference: RRef[Any]) -> Any:
        try:
            kind = torch_compiler.type_of_values(reference._get_type())
        except Exception:  # whatever ends a call, and whatever the function raised that was to make the value
            return None
        return None if kind is None else self.class_of(kind, loose=type(reference) in self.loose)

    def class_of(self, kind: torch_compiler.Type, *, loose: bool = False) -> Any:
        """The class for references to values of a type."""
        key = kind.annotation_str, loose
        with self._lock:
            found = self._classes.get(key)
            if found is None:
                name = f"RRef_{len(self._classes)}_{re.sub('[^a-zA-Z0-9]+', '_', key[0])}"
                found = self._classes[key] = _compile(kind, name, taking_loosely(kind) if loose else taking(kind))
            return found


def _compile(kind: torch_compiler.Type, name: str, taken: Any) -> Any:
    operators = torch.ops.backhaul
    meanings = {
        "Held": types_of.FutureType(types_of.AnyType.get()),
        "Kind": kind,
        "Owner": Owner,
        "take": taken,
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
    torch_compiler.set_python_class(made.qualified_name(), _Shown)
    return made


classes = References()
