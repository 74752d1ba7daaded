"""What ``rref.rpc_sync()`` and its relatives return."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from backhaul._runtime.compile_marks import graph_break

Call = Callable[..., Any]


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
