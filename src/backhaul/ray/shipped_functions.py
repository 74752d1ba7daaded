"""Checks functions before Ray sends them. Ray sends a function of ``__main__``, a lambda or a local function by value,
with copies of its globals, and says nothing if the function needs the originals.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any

from backhaul._wire.codec import encode

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def refuse_shipped_state(values: Iterable[Any]) -> None:
    """Raise ``SerializationError`` for a function among ``values`` that goes by value and keeps state in globals.

    These are the rules for calls between workers: encoding a function for a call applies them.
    """
    for value in values:
        if isinstance(value, _FUNCTIONS):
            encode((value,), names=("the function",)).discard()
