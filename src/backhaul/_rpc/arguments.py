"""Checks the arguments ``args`` and ``kwargs`` that users give to calls. Knows nothing of encoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class LateArguments(Sequence[Any]):
    """Positional arguments that a layer above computes when the call is sent. Not for users."""


def positional(args: Any) -> tuple[Any, ...]:
    """Return ``args`` as a tuple.

    Only a tuple or a list is accepted. Another iterable is most likely a single argument without its comma:
    ``args=(x)`` is ``args=x``.

    Raises:
        TypeError: ``args`` is neither a tuple, nor a list, nor None.

    Example:
        >>> positional([1, 2]), positional(None)
        ((1, 2), ())
        >>> positional(5)
        Traceback (most recent call last):
        ...
        TypeError: args must be a tuple or a list, not an int; for a single argument write args=(x,) with a comma
    """
    if args is None:
        return ()
    if isinstance(args, (tuple, list, LateArguments)):
        return tuple(args)
    raise TypeError(
        f"args must be a tuple or a list, not {_described(args)}; for a single argument write args=(x,) with a comma"
    )


def keywords(kwargs: Any) -> dict[str, Any]:
    """Return ``kwargs`` as a dict.

    Raises:
        TypeError: ``kwargs`` is neither a mapping nor None.

    Example:
        >>> keywords({"a": 1}), keywords(None)
        ({'a': 1}, {})
        >>> keywords([("a", 1)])
        Traceback (most recent call last):
        ...
        TypeError: kwargs must be a dict, not a list; write kwargs={'name': value}
    """
    if kwargs is None:
        return {}
    if isinstance(kwargs, Mapping):
        return dict(kwargs)
    raise TypeError(f"kwargs must be a dict, not {_described(kwargs)}; write kwargs={{'name': value}}")


def _described(value: Any) -> str:
    kind = type(value).__name__
    text = f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"
    return f"{text} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else text
