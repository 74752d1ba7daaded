"""Decides which functions a peer may call on a worker that does not trust others. Pure: names in, functions or
refusals out.

*Exposed* functions are the program's. *Internal* functions are Backhaul's own: layers call them on other workers by
name. Both are registered when they are defined and belong to the process; a policy belongs to one worker.
"""

from __future__ import annotations

import fnmatch
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, overload

from backhaul._types import WorkerInfo
from backhaul._wire.callables import label_of, name_of
from backhaul.errors import PermissionDeniedError, SerializationError

F = TypeVar("F", bound=Callable[..., Any])


class Callee(Protocol):
    """What the policy needs to know of the worker that is called."""

    @property
    def info(self) -> WorkerInfo:
        """Its name and id."""

    @property
    def plain(self) -> bool:
        """Whether nothing may be pickled between it and this worker."""


@dataclass(frozen=True, slots=True)
class Exposed:
    """A function that others may call.

    Attributes:
        name: The name by which they call it.
        function: The function.
        to: Patterns of the names of workers that may call it; empty: all may.
    """

    name: str
    function: Callable[..., Any]
    to: tuple[str, ...]


_exposed: dict[str, Exposed] = {}
_names: dict[Any, str] = {}  # of exposed functions
_internal: dict[str, Callable[..., Any]] = {}


@overload
def expose(function: F, *, name: str | None = None, to: Sequence[str] = ()) -> F: ...
@overload
def expose(function: None = None, *, name: str | None = None, to: Sequence[str] = ()) -> Callable[[F], F]: ...
def expose(function: Any = None, *, name: str | None = None, to: Sequence[str] = ()) -> Any:
    """Let others call a function on workers of this process that do not trust them (``Security(trusted=False)``).

    A decorator, with or without arguments; ``bh.expose(torch.add)`` works as well. The function itself is not changed.
    Callers pass the function if they can import it, or its name: ``bh.rpc_sync("server", "predict", args=...)``.

    An exposed function must be safe with any arguments of plain data and tensors.

    Args:
        function: Any callable.
        name: A name that callers may use; needed where they cannot import the function.
        to: Patterns (as of ``fnmatch``) of the names of workers that may call it. Default: all. A name is only as
            reliable as the certificate behind it, see ``Tls.names``.

    Example:
        >>> import torch, backhaul as bh
        >>> @bh.expose(name="halve")
        ... def halve(x):
        ...     return x / 2
        >>> with bh.cluster(2, options=bh.Options(security=bh.Security(trusted=False))):
        ...     bh.rpc_sync("worker1", "halve", args=(torch.ones(2),))
        tensor([0.5000, 0.5000])
    """
    if function is None:
        return functools.partial(expose, name=name, to=to)
    if not callable(function):
        raise TypeError(f"only a callable can be exposed, not a {type(function).__name__}")
    if isinstance(to, str):
        raise TypeError(f"to is a list of patterns, not {to!r}")
    if name is not None and (not name or ":" in name):
        raise ValueError(f"{name!r} is no name for a function: a name must not be empty or contain a colon")
    found = name or _future_name(function) or name_of(function, main_shared=True)
    if found is None:
        raise ValueError(f"{label_of(function)} cannot be found by its name in its module: pass name=...")
    if (other := _exposed.get(found)) is not None and not _same(other.function, function):
        raise ValueError(f"another function is exposed as {found!r} already: pass another name=...")
    _exposed[found] = Exposed(found, function, tuple(to))
    _names[function] = found
    return function


def _future_name(function: Any) -> str | None:
    """What ``name_of`` will return for a function or class that is being defined right now."""
    if isinstance(function, (types.FunctionType, type)) and "<" not in function.__qualname__:
        return f"{function.__module__}:{function.__qualname__}"
    return None


def _same(one: Any, other: Any) -> bool:
    """Whether both are the same function, or one is the other after a reload of its module."""
    where = [(getattr(f, "__module__", None), getattr(f, "__qualname__", None)) for f in (one, other)]
    return one is other or where[0] == where[1]


def find_exposed(name: str) -> Exposed | None:
    """The function that is exposed under that name."""
    return _exposed.get(name)


def internal(*kinds: type) -> Callable[[F], F]:
    """Let members call one of Backhaul's own functions even where they are not trusted. The arguments must have exactly
    these types.
    """

    def register(function: F) -> F:
        @functools.wraps(function)
        def checked(*args: Any) -> Any:
            if [type(arg) for arg in args] != list(kinds):
                wanted, given = (", ".join(kind.__name__ for kind in each) for each in (kinds, map(type, args[:8])))
                raise TypeError(f"{label_of(function)} takes ({wanted}), not {len(args)} arguments: {given}")
            return function(*args)

        _internal[f"{function.__module__}:{function.__qualname__}"] = checked
        return function

    return register


def find_internal(name: str) -> Callable[..., Any] | None:
    """The internal function with that name."""
    return _internal.get(name)


def name_for(peer: Callee, function: Any, found: str | None) -> str | None:
    """The name of ``function`` in a request to ``peer``; None: send the function itself.

    ``found``: the name under which the peer can import it; None if it cannot.
    """
    if isinstance(function, str):
        return function
    if not peer.plain:
        return found
    try:
        name = _names.get(function, found)
    except TypeError:  # not hashable
        name = found
    if name is None:
        raise SerializationError(
            f"{label_of(function)} has no name that worker '{peer.info.name}' knows, and functions are not sent "
            "between workers of which one does not trust the other (trusted=False): expose it on that worker and call "
            "it by its name",
            worker=peer.info.name,
            path="function",
        )
    return name


class Policy:
    """The functions that one worker lets others call."""

    def __init__(self, worker: str, allow: Mapping[str, Sequence[str]] | None) -> None:
        self._worker = worker
        self._allow = None if allow is None else [(caller, tuple(functions)) for caller, functions in allow.items()]

    def find(self, name: str, caller: str) -> Callable[..., Any]:
        """The function with that name, if ``caller`` may call it. Raises ``PermissionDeniedError``."""
        if (own := _internal.get(name)) is not None:
            return own
        exposed = _exposed.get(name)
        if exposed is None:
            if name.startswith("backhaul."):
                what = "that worker accepts no references, remote modules, optimizers or profiles"
            else:
                what = "it is not exposed there (see backhaul.expose)"
            raise self._denied(name, caller, what)
        if exposed.to and not _matches(caller, exposed.to):
            raise self._denied(name, caller, f"it is exposed only to {', '.join(exposed.to)}")
        if self._allow is not None and not self._allows(name, caller):
            raise self._denied(name, caller, "Options(security=Security(allow=...)) there does not allow it")
        return exposed.function

    def _allows(self, name: str, caller: str) -> bool:
        return any(
            fnmatch.fnmatchcase(caller, who) and _matches(name, functions) for who, functions in self._allow or ()
        )

    def _denied(self, name: str, caller: str, why: str) -> PermissionDeniedError:
        return PermissionDeniedError(
            f"worker '{caller}' may not call {name!r} on worker '{self._worker}', which does not trust others: {why}",
            worker=self._worker,
            function=name,
            caller=caller,
        )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
