"""Watches a function for writes to tensors that are not its own. Knows no workers.

A function of an operator runs again for each gradient, and on fake tensors while a graph is traced. What it changes
besides would be changed that often: counters and running averages of a module in training, say.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class ForeignWriteError(ValueError):
    """A function was about to change a tensor that is not its own; it has not been changed."""


class NoForeignWrites(TorchDispatchMode):
    """While inside, what would change a tensor that was not made inside raises ``ForeignWriteError`` instead.

    Not all that makes tensors is seen here: not what receives them, nor compiled code. So tensors of unknown origin are
    let be if they are likely new.

    Args:
        own: Tensors that may be changed all the same.
        again: Whether the same function has run before: then it has changed what is not new.
    """

    def __init__(self, own: Iterable[torch.Tensor], *, again: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own: set[int] = set()  # memory, by its place
        self._again = again
        self._take(list(own))

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether functions stay compiled inside, and are seen by what they do when they run."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        effect = _effect(func)
        if not effect.places:  # nearly all of them
            result = func(*args, **named)
            if effect.fresh:
                self._take(result)
            return result
        written = list(effect.written(args, named))
        for tensor in written:
            if _place(tensor) not in self._own and (effect.training is not None or not self._maybe_new(tensor)):
                kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
                raise ForeignWriteError(f"{func} would change a {kind} that it has neither made nor been given")
        result = func(*args, **named)
        self._take(written)
        if effect.fresh:
            self._take(result)
        return result

    def _take(self, made: Any) -> None:
        for tensor in (made,) if isinstance(made, torch.Tensor) else _tensors(made):
            place = _place(tensor)
            if place is not None:
                self._own.add(place)

    def _maybe_new(self, tensor: torch.Tensor) -> bool:
        if _place(tensor) is None or tensor.is_inference():
            return True
        return not tensor._version if self._again else not tensor.untyped_storage().resizable()


class _Effect(NamedTuple):
    """What an operator does to memory.

    Attributes:
        places: The arguments that it writes to, by place and name.
        fresh: Whether its results have memory of their own.
        training: Place and name of the argument that says whether it writes to them at all.
    """

    places: tuple[tuple[int, str], ...]
    fresh: bool
    training: tuple[int, str] | None = None

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
        if self.training is None or _argument(self.training, args, kwargs):
            for place in self.places:
                yield from _tensors(_argument(place, args, kwargs))


_UNTOLD = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}
"""Operators that write to running averages, of which their schemas say nothing."""


WATCHES = hasattr(TorchDispatchMode, "ignore_compile_internals")
"""Whether this torch can watch functions and run them compiled, so that they compute the same, bit for bit."""


@functools.cache
def _effect(func: Any) -> _Effect:
    schema = getattr(func, "_schema", None)
    if schema is None:  # of higher order: what it runs is seen by itself
        return _Effect((), True)
    spots = {argument.name: (place, argument.name) for place, argument in enumerate(schema.arguments)}
    if schema.name in _UNTOLD:
        return _Effect((spots["running_mean"], spots["running_var"]), True, spots["training"])
    places = [spots[a.name] for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    fresh = schema.name == "aten::lift_fresh" or any(result.alias_info is None for result in schema.returns)
    return _Effect(tuple(places), fresh)


def _argument(spot: tuple[int, str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    place, name = spot
    return args[place] if place < len(args) else kwargs.get(name)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _place(tensor: torch.Tensor) -> int | None:
    """What tells a tensor's memory from others'; None if it has none, as sparse tensors and wrappers do."""
    try:
        place: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None
    return place
