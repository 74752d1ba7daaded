"""Finds the part of a message that cannot be sent, and the path to any part of it. For error texts only."""

from __future__ import annotations

import contextlib
import io
import itertools
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from backhaul._runtime import interrupts
from backhaul._wire.device_link import Link, TrialEncoding
from backhaul._wire.pickling import Pickler, reducers
from backhaul._wire.tensors.writer import TensorWriter
from backhaul.errors import BackhaulError, SerializationError

_MAX_DEPTH = 64
_MAX_SEARCHED_VALUES = 10_000
_MAX_TRIES = 2000
_MAX_NAMES = 8


def path_to(part: Any, values: Sequence[Any], names: Sequence[str]) -> str:
    """The path to ``part`` in a message, starting with one of ``names``. If the search takes too long: the names."""
    queue = list(zip(names, values, strict=True))
    seen = {id(value) for value in values}
    for path, value in queue:  # the loop appends to it
        if value is part or (isinstance(value, torch.Tensor) and _aliases(value, part)):
            return path
        for step, child in _children(value) if len(queue) < _MAX_SEARCHED_VALUES else ():
            if id(child) not in seen:
                seen.add(id(child))
                queue.append((path + step, child))
    return ", ".join(itertools.islice(names, _MAX_NAMES))


def _aliases(value: torch.Tensor, part: Any) -> bool:
    """Whether ``part`` is the plain alias that is sent for ``value``."""
    base = value if value._base is None else value._base
    return isinstance(part, torch.Tensor) and part._base is base


def explain(
    values: Sequence[Any], names: Sequence[str], main_shared: bool, link: Link | None, error: BaseException
) -> SerializationError:
    """The error that names the innermost part which cannot be sent on its own."""
    search = _Search(main_shared, None if link is None else TrialEncoding(link))
    for name, value in zip(names, values, strict=True):
        found = search.locate(name, value, frozenset((id(value),)), 0)
        if found is not None:
            path, culprit, why = found
            break
    else:  # a reference cycle, or the search took too long
        path, culprit, why = ", ".join(itertools.islice(names, _MAX_NAMES)), values, _reason(error)
    device = error.device if isinstance(error, SerializationError) else None
    return SerializationError(f"{path} (a {type(culprit).__name__}) cannot be sent: {why}", path=path, device=device)


class _Search:
    """Searches for a part that cannot be sent. It tries to pickle one part after the other."""

    def __init__(self, main_shared: bool, link: Link | None) -> None:
        self._main_shared = main_shared
        self._link = link
        self._tries = _MAX_TRIES

    def locate(self, path: str, value: Any, above: frozenset[int], depth: int) -> tuple[str, Any, str] | None:
        """The part at or below ``value`` that cannot be sent: its path, the part, and the reason."""
        self._tries -= 1
        why = _trouble(value, self._main_shared, self._link)
        if why is None:
            return None
        circular = False
        # Reducers do not send a value by its parts.
        searchable = depth < _MAX_DEPTH and self._tries > 0 and type(value) not in reducers
        for step, part in _children(value) if searchable else ():
            if id(part) in above:
                circular = True
                continue
            found = self.locate(path + step, part, above | {id(part)}, depth + 1)
            if found is not None:
                return found
        # A part that refers back to a value above it may fail only because of that value.
        return None if circular and depth else (path, value, why)


def _trouble(value: Any, main_shared: bool, link: Link | None) -> str | None:
    """Why ``value`` cannot be sent; None if it can. Returns text, because an exception keeps its frames alive."""
    try:
        writer = TensorWriter(link)
        Pickler(io.BytesIO(), writer, [], main_shared, []).dump(value)
        writer.finish()
    except BaseException as error:
        if interrupts.from_signal(error):
            raise
        return _reason(error)
    return None


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, BackhaulError) else f"{type(error).__name__}: {error}"


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"[{key!r}]", item
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, item in enumerate(value):
            yield f"[{index}]", item
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, types.FunctionType) and value.__closure__:
        for name, cell in zip(value.__code__.co_freevars, value.__closure__, strict=True):
            with contextlib.suppress(ValueError):
                yield f".<{name}>", cell.cell_contents
    elif not isinstance(value, (type, types.ModuleType, torch.Tensor)):
        for name, item in getattr(value, "__dict__", {}).items():
            yield f".{name}", item
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    yield f".{name}", getattr(value, name)
