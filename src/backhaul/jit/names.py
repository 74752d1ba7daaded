"""Which calls in a function that is compiled are Backhaul's.

The compiler knows ``rpc_sync``, ``rpc_async`` and ``remote`` by identity with those of ``torch.distributed.rpc``, since
only they take functions as arguments. So where a function that is compiled refers to Backhaul's, the compiler is shown
those, and where in which file that was is remembered. Nothing else sees this: what is shown is a copy of the names that
the function refers to, and functions that refer to ``torch.distributed.rpc`` itself are left alone.
"""

from __future__ import annotations

import re
import threading
import types
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from backhaul.jit import torch_compiler

FORMS = ("rpc_sync", "rpc_async", "remote")

NOT_HERE = (
    "{} cannot be called here: calls are found in functions and in modules made with torch.jit.script, not in methods "
    "of script classes and of the old torch.jit.ScriptModule; make the call in a scripted function and call that"
)
NO_CONTEXTS = (
    "a context cannot be entered in script: enter it in Python, around the call of the script, and pass its id in "
    "where it is needed"
)

_PLACE = re.compile(r'File "(.+?)", line (\d+)')


@dataclass(frozen=True)
class Api:
    """Functions to make calls with.

    Attributes:
        name: What to call it in graphs.
        rpc_sync: As users know it.
        rpc_async: Likewise.
        remote: Likewise; what script runs, too.
        start: What script runs for the other two, with the arguments of ``rpc_async``.
        operators: Functions that are operators in script, each with its name.
        contexts: What makes a context, which cannot be done in script.
    """

    name: str
    rpc_sync: Callable[..., Any]
    rpc_async: Callable[..., Any]
    remote: Callable[..., Any]
    start: Callable[..., Any]
    operators: tuple[tuple[Callable[..., Any], str], ...] = ()
    contexts: tuple[Any, ...] = ()


class Names:
    """What names mean in functions that are compiled. Thread-safe."""

    def __init__(self) -> None:
        self.apis: dict[str, Api] = {}
        self._forms: dict[int, tuple[Api, str]] = {}
        self._contexts: set[int] = set()
        self._lock = threading.Lock()  # guards _places
        self._places: dict[str, dict[tuple[int, int], Api]] = {}  # file -> first and last line of a function

    def add(self, api: Api) -> None:
        """Know the functions of an API from now on."""
        self.apis[api.name] = api
        for form in FORMS:
            self._forms[id(getattr(api, form))] = api, form
        self._contexts.update(map(id, api.contexts))

    def captured(self, function: Any, found: dict[str, Any]) -> dict[str, Any]:
        """The names that a function refers to, as the compiler is to see them."""
        if function is _context:
            raise RuntimeError(NO_CONTEXTS)
        if id(function) in self._forms:  # the compiler met it where it was not shown another
            raise RuntimeError(NOT_HERE.format(function.__name__))
        code = function.__code__
        names = _names_in(code)
        used: set[str] = set()
        shown = {name: self._show(found[name], names, used) for name in names & found.keys()}
        if len(used) > 1:
            raise RuntimeError(
                f"{function.__qualname__} makes calls with {' and '.join(sorted(used))}: use one of them"
            )
        place = code.co_firstlineno, _last_line(code)
        with self._lock:
            places = self._places.setdefault(code.co_filename, {})
            places.pop(place, None)
            if used:
                places[place] = self.apis[used.pop()]
        return {**found, **shown}

    def _show(self, value: Any, names: Collection[str], used: set[str]) -> Any:
        found = self._forms.get(id(value))
        if found is not None:
            used.add(found[0].name)
            return torch_compiler.special_form(found[1])
        if id(value) in self._contexts:
            return _context  # not refused yet: it may be in a branch that is not compiled
        if not isinstance(value, types.ModuleType):
            return value
        inner: set[str] = set()
        # Names of modules that lead to a call are left out on the way down, so that this ends.
        shown = {
            name: self._show(vars(value)[name], set(names) - {name}, inner) for name in names if name in vars(value)
        }
        if not any(shown[name] is not vars(value)[name] for name in shown):
            return value
        used |= inner
        copy = types.ModuleType(value.__name__)
        vars(copy).update(vars(value), **shown)
        return copy

    def api_at(self, place: str) -> Api | None:
        """Whose call it is that was compiled from there, as the compiler says it; None: not one of ours."""
        match = _PLACE.search(place)
        if match is not None:
            line = int(match[2])
            with self._lock:
                around = [item for item in self._places.get(match[1], {}).items() if item[0][0] <= line <= item[0][1]]
            if around:
                return max(around, key=lambda item: item[0][0])[1]
        stands_in = self._forms.get(id(torch_compiler.special_form("rpc_async")))
        return None if stands_in is None else stands_in[0]


def _context() -> int:
    """Shown in the place of what makes a context."""
    return 0


def _parts_of(code: types.CodeType) -> list[types.CodeType]:
    """The code of a function and of the comprehensions in it."""
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return [code, *(part for each in inner for part in _parts_of(each))]


def _names_in(code: types.CodeType) -> set[str]:
    return {name for part in _parts_of(code) for name in (*part.co_names, *part.co_freevars)}


def _last_line(code: types.CodeType) -> int:
    return max(line for part in _parts_of(code) for *_, line in part.co_lines() if line is not None)
