"""Copies of exceptions. An exception refers to all frames that it passed, so each thread raises one of its own."""

from __future__ import annotations

import contextlib
import copy
import types

from backhaul._runtime import interrupts
from backhaul._wire.faults import described
from backhaul._worker.worker import name_here

_COPY_METHODS = {"__copy__", "__reduce__", "__reduce_ex__"}  # with these a class says how it is copied


def copy_without_frames(error: BaseException) -> BaseException:
    """Another exception of the same type, with the same cause, as if it had not been raised yet."""
    made = copy_of(error)
    for name in ("__cause__", "__suppress_context__"):
        BaseException.__setattr__(made, name, getattr(error, name))  # the class may have a __setattr__ that refuses
    return made


def copy_of(error: BaseException) -> BaseException:
    """Another exception of the same type and text; never fails."""
    kind = type(error)
    # A built-in type that keeps more than ``args`` knows best how to copy that.
    own_way = _builtin_base(kind).__basicsize__ > BaseException.__basicsize__ or any(
        part.__module__ != "builtins" and _COPY_METHODS & vars(part).keys() for part in kind.__mro__
    )
    for make in (copy.copy, _clone) if own_way else (_clone, copy.copy):
        try:
            made = make(error)
            if type(made) is kind:
                return made
        except BaseException as problem:  # code of the user's may raise anything
            if interrupts.from_signal(problem):
                raise
    return described(error, name_here())


def _builtin_base(kind: type[BaseException]) -> type:
    return next(base for base in kind.__mro__ if base.__module__ == "builtins")


def _clone(error: BaseException) -> BaseException:
    """A copy made without the constructor, which may need other arguments."""
    kind = type(error)
    made: BaseException = _builtin_base(kind).__new__(kind, *error.args)
    BaseException.__setattr__(made, "args", error.args)
    made.__dict__.update(error.__dict__)
    if "__notes__" in made.__dict__:
        made.__dict__["__notes__"] = list(made.__dict__["__notes__"])
    for part in kind.__mro__:
        for name, slot in vars(part).items():
            if type(slot) is types.MemberDescriptorType and name != "__suppress_context__":
                with contextlib.suppress(AttributeError, TypeError):  # the slot is empty, or read-only
                    if (value := slot.__get__(error)) is not None:
                        slot.__set__(made, value)
    return made
