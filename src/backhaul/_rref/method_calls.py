"""What ``rref.rpc_sync()`` and its relatives return."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from backhaul._runtime.compile_marks import graph_break

Call = Callable[..., Any]
Made_co = TypeVar("Made_co", covariant=True)


class MethodsOfValue(Protocol[Made_co]):
    """What a type checker knows of ``MethodCalls``: any method may be called, and what each call returns."""

    def __getattr__(self, name: str, /) -> Callable[..., Made_co]: ...


class MethodCalls:
    """Stands for the value: calling a method of it calls the method on the owner."""

    # No slots: the compiler asks for ``__dict__``, which would be a method of the value then.

    def __init__(self, call: Call, timeout: float | None) -> None:
        self.__call = call
        self.__timeout = timeout

    def __getattr__(self, name: str) -> Call:
        return functools.partial(self.__run, name)

    @graph_break
    def __run(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        return self.__call(name, args, kwargs, self.__timeout)
