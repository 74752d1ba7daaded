"""Finds the calls in a compiled function that are Backhaul's.

The compiler recognizes ``rpc_sync``, ``rpc_async`` and ``remote`` by identity with those of ``torch.distributed.rpc``,
since only they take functions as arguments. So where a compiled function refers to Backhaul's functions, the compiler
gets torch's functions in their place, and this module remembers the file and lines of the compiled function. Nothing
else sees the replacement: it is made in a copy of the names that the function refers to. Functions that refer to
``torch.distributed.rpc`` itself are not changed.
"""

from __future__ import annotations

import re
import threading
import types
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from backhaul.jit import torch_compiler

CALL_FORMS = ("rpc_sync", "rpc_async", "remote")

CALL_NOT_SUPPORTED_HERE = (
    "{} cannot be called here: calls are supported in functions and in modules made with torch.jit.script, but not in "
    "methods of script classes or of the old torch.jit.ScriptModule; move the call into a scripted function and call "
    "that function"
)
CONTEXT_NOT_SUPPORTED = (
    "a context cannot be entered in script: enter it in Python, around the call of the script, and pass its id in as "
    "an argument where the script needs it"
)

_SOURCE_LINE = re.compile(r'File "(.+?)", line (\d+)')


@dataclass(frozen=True)
class Api:
    """A set of functions that make calls.

    Attributes:
        name: The name of the API in graphs.
        rpc_sync: The function that users call.
        rpc_async: The function that users call.
        remote: The function that users call. Scripts run it as well.
        start: What a script runs for ``rpc_sync`` and ``rpc_async``. It takes the arguments of ``rpc_async``.
        operators: Functions that are operators in script, each with the operator's name.
        contexts: The callables that make a context, which is not possible in script.
    """

    name: str
    rpc_sync: Callable[..., Any]
    rpc_async: Callable[..., Any]
    remote: Callable[..., Any]
    start: Callable[..., Any]
    operators: tuple[tuple[Callable[..., Any], str], ...] = ()
    contexts: tuple[Any, ...] = ()


class ApiNames:
    """The functions of all known APIs, and the source lines of the functions that call them. Thread-safe."""

    def __init__(self) -> None:
        self.apis: dict[str, Api] = {}
        self._forms: dict[int, tuple[Api, str]] = {}  # by the id of the function
        self._contexts: set[int] = set()
        self._lock = threading.Lock()  # guards _callers
        self._callers: dict[str, dict[tuple[int, int], Api]] = {}  # file -> first and last line of a function

    def add(self, api: Api) -> None:
        """Recognize the functions of an API from now on."""
        self.apis[api.name] = api
        for form in CALL_FORMS:
            self._forms[id(getattr(api, form))] = api, form
        self._contexts.update(map(id, api.contexts))

    def replace(self, function: Any, names: dict[str, Any]) -> dict[str, Any]:
        """The names that a function refers to, with the functions of an API replaced by those the compiler knows.

        Raises:
            RuntimeError: The function enters a context, uses two APIs, or makes a call where none is supported.
        """
        if function is _context_placeholder:
            raise RuntimeError(CONTEXT_NOT_SUPPORTED)
        if id(function) in self._forms:  # the compiler found it in a place where this method could not replace it
            raise RuntimeError(CALL_NOT_SUPPORTED_HERE.format(function.__name__))
        code = function.__code__
        referenced = _names_in(code)
        used: set[str] = set()
        replaced = {name: self._replacement(names[name], referenced, used) for name in referenced & names.keys()}
        if len(used) > 1:
            raise RuntimeError(
                f"{function.__qualname__} makes calls with {' and '.join(sorted(used))}: use only one of them in a "
                "function"
            )
        lines = code.co_firstlineno, _last_line(code)
        with self._lock:
            callers = self._callers.setdefault(code.co_filename, {})
            callers.pop(lines, None)
            if used:
                callers[lines] = self.apis[used.pop()]
        return {**names, **replaced}

    def _replacement(self, value: Any, referenced: Collection[str], used: set[str]) -> Any:
        found = self._forms.get(id(value))
        if found is not None:
            used.add(found[0].name)
            return torch_compiler.special_form(found[1])
        if id(value) in self._contexts:
            return _context_placeholder  # no error yet: it may be in a branch that is not compiled
        if not isinstance(value, types.ModuleType):
            return value
        inner: set[str] = set()
        # The recursion ends because the name of each module on the way is left out below it.
        replaced = {
            name: self._replacement(vars(value)[name], set(referenced) - {name}, inner)
            for name in referenced
            if name in vars(value)
        }
        if not any(replaced[name] is not vars(value)[name] for name in replaced):
            return value
        used |= inner
        copy = types.ModuleType(value.__name__)
        vars(copy).update(vars(value), **replaced)
        return copy

    def api_at(self, source_range: str) -> Api | None:
        """The API of the call at a source range, as the compiler prints it. None if no known API makes the call."""
        match = _SOURCE_LINE.search(source_range)
        if match is not None:
            line = int(match[2])
            with self._lock:
                callers = self._callers.get(match[1], {}).items()
                around = [(lines, api) for lines, api in callers if lines[0] <= line <= lines[1]]
            if around:
                return max(around, key=lambda item: item[0][0])[1]
        substitute = self._forms.get(id(torch_compiler.special_form("rpc_async")))
        return None if substitute is None else substitute[0]


def _context_placeholder() -> int:
    """The compiler gets this function in place of one that makes a context."""
    return 0


def _parts_of(code: types.CodeType) -> list[types.CodeType]:
    """The code of a function and of the comprehensions in it."""
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return [code, *(part for each in inner for part in _parts_of(each))]


def _names_in(code: types.CodeType) -> set[str]:
    return {name for part in _parts_of(code) for name in (*part.co_names, *part.co_freevars)}


def _last_line(code: types.CodeType) -> int:
    return max(line for part in _parts_of(code) for *_, line in part.co_lines() if line is not None)
