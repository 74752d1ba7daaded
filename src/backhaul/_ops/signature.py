"""Turns the annotations of a function into the schema of an operator. Knows no workers."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from backhaul._wire.callables import label_of

Args = Sequence[Any]


class Signature:
    """The parameters and the result of a function that becomes an operator.

    Attributes:
        named: The names of the keyword-only parameters, which are the last ones.

    Raises:
        TypeError: Annotations are missing, or an operator cannot have these types.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._label = label_of(function)
        self._python = self._read(function)
        self._hints = self._types(function)
        parameters = list(self._python.parameters.values())
        for parameter in parameters:
            self._check(parameter)
        self._names = [parameter.name for parameter in parameters]
        self._defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self.named = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        self._positional = len(parameters) - len(self.named)
        self._collect: Callable[[list[torch.Tensor]], Any] = self._collector(self._hints.get("return"))
        self.schema()  # raises now if torch rejects a type

    def _read(self, function: Callable[..., Any]) -> inspect.Signature:
        try:
            return inspect.signature(function)
        except (TypeError, ValueError) as error:
            raise self._wrong(f"has no signature that inspect can read ({error}); wrap it in a function") from None

    def _types(self, function: Callable[..., Any]) -> Mapping[str, Any]:
        inner = inspect.unwrap(function)
        if not inspect.isroutine(inner):
            inner = type(inner).__call__
        try:
            return typing.get_type_hints(inner)
        except Exception as error:
            raise self._wrong(f"has annotations that cannot be resolved: {error}") from error

    def _wrong(self, what: str) -> TypeError:
        return TypeError(f"{self._label} cannot be a remote_op: it {what}")

    def _check(self, parameter: inspect.Parameter) -> None:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise self._wrong(f"takes a variable number of arguments ({parameter}); an operator has a fixed number")
        if parameter.name not in self._hints:
            raise self._wrong(f"has no annotation for {parameter.name!r}; annotate it, for example with torch.Tensor")
        if self._hints[parameter.name] in (list[torch.Tensor | None], Sequence[torch.Tensor | None]):
            raise self._wrong(
                f"takes a list of tensors in which some may be None ({parameter.name!r}); leave out the None values"
            )

    def _collector(self, hint: Any) -> Callable[[list[torch.Tensor]], Any]:
        """Return a function that builds the result from a list of tensors."""
        if hint is torch.Tensor:
            return lambda tensors: tensors[0]
        if hint in (list[torch.Tensor], typing.List[torch.Tensor]):  # noqa: UP006 (a user may have written it)
            return list
        if typing.get_origin(hint) is tuple and all(part is torch.Tensor for part in typing.get_args(hint)):
            return tuple
        found = "nothing" if hint is None else hint
        raise self._wrong(
            f"is annotated to return {found}; it must return torch.Tensor, a tuple such as "
            "tuple[torch.Tensor, torch.Tensor], or list[torch.Tensor]"
        )

    def schema(self, **more: Any) -> str:
        """Return the schema of an operator with these parameters, then ``more`` (by type), that returns tensors."""

        def prototype() -> None: ...

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        types = {name: self._hints[name] for name in self._names} | more
        prototype.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, kind, annotation=hint) for name, hint in types.items()],
            return_annotation=list[torch.Tensor],
        )
        try:
            return torch.library.infer_schema(prototype, mutates_args=())
        except ValueError as error:
            reason = str(error).partition(": ")[2].partition(" The valid types")[0]
            raise self._wrong(f"has a parameter of a type that operators do not support: {reason}") from None

    def complete(self, args: Args, kwargs: Mapping[str, Any]) -> list[Any]:
        """Return all arguments in the order of the parameters, defaults included."""
        values = list(args)
        if len(args) > self._positional:
            self._python.bind(*args, **kwargs)  # raises the TypeError that the function would raise
        used = 0
        for name in self._names[len(args) :]:
            if name in kwargs:
                values.append(kwargs[name])
                used += 1
            elif name in self._defaults:
                values.append(self._defaults[name])
            else:
                self._python.bind(*args, **kwargs)
        if used != len(kwargs):
            self._python.bind(*args, **kwargs)
        return values

    def collect(self, tensors: list[torch.Tensor]) -> Any:
        """Build the result of the function from its tensors."""
        return self._collect(tensors)


def call(function: Callable[..., Any], named: Sequence[str], args: Args) -> list[torch.Tensor]:
    """Call a function with all its arguments, those in ``named`` by keyword, and return the tensors of its result.

    Raises:
        ValueError: The function changed an argument in place. The caller's tensor would not change.
    """
    values = values_of(args)
    versions = [value._version for value in values]
    split = len(args) - len(named)
    result = function(*args[:split], **dict(zip(named, args[split:], strict=True)))
    if [value._version for value in values] != versions:
        raise ValueError(
            f"{label_of(function)} changes an argument in place, but the caller's tensor would not change; return the "
            "new tensor instead"
        )
    return _tensors_of(result, label_of(function))


def _tensors_of(result: Any, label: str) -> list[torch.Tensor]:
    """Return the tensors of a result."""
    found = [result] if isinstance(result, torch.Tensor) else result
    if not isinstance(found, list | tuple) or not all(isinstance(part, torch.Tensor) for part in found):
        raise TypeError(f"{label} is a remote_op and must return tensors, but it returned a {type(result).__name__}")
    for tensor in found:
        if tensor.layout is not torch.strided:
            raise TypeError(f"{label} is a remote_op and must return strided tensors, but it returned {tensor.layout}")
    return list(found)


def _is_tensors(arg: Any) -> bool:
    """Return whether an argument is a list of tensors. An empty list counts as one."""
    return isinstance(arg, list | tuple) and all(isinstance(part, torch.Tensor) for part in arg)


def values_of(args: Args) -> list[torch.Tensor]:
    """Return the tensors among arguments, including those in lists."""
    found = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            found.append(arg)
        elif _is_tensors(arg):
            found.extend(arg)
    return found


class Template:
    """Arguments with gaps in place of their tensors."""

    def __init__(self, args: Args) -> None:
        counts = [-1 if isinstance(arg, torch.Tensor) else len(arg) if _is_tensors(arg) else None for arg in args]
        self._counts = counts  # -1: a tensor; None: neither a tensor nor a list of tensors
        self._rest = [arg if count is None else None for arg, count in zip(args, counts, strict=True)]
        self.count = sum(abs(count) for count in counts if count is not None)

    def fill(self, values: Sequence[torch.Tensor]) -> list[Any]:
        """Return the arguments with ``values`` in the gaps."""
        left = iter(values)
        made: list[Any] = []
        for arg, count in zip(self._rest, self._counts, strict=True):
            if count is None:
                made.append(arg)
            else:
                made.append(next(left) if count < 0 else [next(left) for _ in range(count)])
        return made

    def split(self, values: Sequence[torch.Tensor]) -> tuple[list[Any], list[torch.Tensor]]:
        """Return the arguments with the first of ``values`` in the gaps, and the remaining values."""
        return self.fill(values[: self.count]), list(values[self.count :])
