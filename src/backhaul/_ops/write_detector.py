"""Detects a function's writes to tensors that it did not create. Knows no workers.

The function of an operator runs again for each gradient, and on fake tensors while a graph is traced. A side effect,
such as an update of the running averages of a module in training mode, would happen as often.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class ForeignWriteError(ValueError):
    """A function was about to change a tensor that it did not create. The tensor was not changed."""


class NoForeignWrites(TorchDispatchMode):
    """Inside the block, an operation that would change a tensor created outside it raises ``ForeignWriteError``.

    The mode does not see every creation of a tensor: not the receipt of tensors, and not compiled code. Writes to a
    tensor of unknown origin are therefore allowed if the tensor is likely to be new.

    Args:
        own: Tensors outside the block that may be changed.
        again: Whether the function has run before. Tensors that it changed then have a version above 0.
    """

    def __init__(self, own: Iterable[torch.Tensor], *, again: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own: set[int] = set()  # identities of memory blocks, see _place
        self._again = again
        self._take(list(own))

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch to keep compiled functions compiled inside the block; their operations are seen when they run."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        effect = _effect(func)
        if not effect.places:  # true for nearly all operators
            result = func(*args, **named)
            if effect.fresh:
                self._take(result)
            return result
        written = list(effect.written(args, named))
        for tensor in written:
            if _place(tensor) not in self._own and (effect.training is not None or not self._maybe_new(tensor)):
                kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
                raise ForeignWriteError(
                    f"{func} would change a {kind} that the function neither created nor got as an argument"
                )
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
    """The effect of an operator on memory.

    Attributes:
        places: The arguments that it writes to, by index and name.
        fresh: Whether its results have their own memory.
        training: Index and name of the argument that decides whether it writes at all.
    """

    places: tuple[tuple[int, str], ...]
    fresh: bool
    training: tuple[int, str] | None = None

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
        if self.training is None or _argument(self.training, args, kwargs):
            for place in self.places:
                yield from _tensors(_argument(place, args, kwargs))


_UNTOLD = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}
"""Operators that write to running averages although their schemas do not say so."""


WATCHES = hasattr(TorchDispatchMode, "ignore_compile_internals")
"""Whether this torch can watch compiled functions. Uncompiled, their results could differ in the last bit."""


@functools.cache
def _effect(func: Any) -> _Effect:
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator: the operators that it runs are seen one by one
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
    """Return the identity of a tensor's memory; None if it has none, like sparse tensors and wrapper subclasses."""
    try:
        place: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None
    return place
