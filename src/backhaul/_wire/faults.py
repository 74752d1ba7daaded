"""Exceptions <-> faults. An exception arrives with its own type where that can be had, and always with the
remote traceback as its cause.

Where nothing may be pickled, an exception travels as the name of its type and plain data, and is made again only if
that type is one of a fixed table: Python's own and Backhaul's.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from backhaul import errors
from backhaul._runtime import interrupts
from backhaul._wire.codec import Encoded, decode, encode
from backhaul._wire.memory import Buffer
from backhaul._wire.messages import Fault, Payload
from backhaul.errors import BackhaulError, RemoteError, RemoteTraceback

_HIDDEN = "(this worker keeps its tracebacks to itself)"

_BUILTIN: dict[str, type[Exception]] = {
    f"builtins.{kind.__name__}": kind
    for kind in vars(builtins).values()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    # Those two steer generators, and a group would have to be made of exceptions.
    and not issubclass(kind, (StopIteration, StopAsyncIteration, BaseExceptionGroup))
}
_OWN: dict[str, type[BackhaulError]] = {
    f"{kind.__module__}.{kind.__name__}": kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, BackhaulError)
}


_NO_GRADIENT = (
    "this graph reaches back to a tensor that came with an exception of another worker, which carries no gradient; "
    "return the tensor instead, or detach() it if no gradient is meant"
)


def encode_fault(
    error: BaseException, worker: str, *, plain: bool = False, tracebacks: bool = True
) -> tuple[Fault, Encoded | None]:
    """Describe ``error`` as raised on ``worker``; never fails.

    Args:
        error: What was raised.
        worker: Where.
        plain: Whether nothing may be pickled.
        tracebacks: Whether to say where in the program.
    """
    if isinstance(error, BackhaulError):
        with _trying():
            if getattr(error, "worker", None) is None:
                error.worker = worker
    fault = _describe(error, worker, tracebacks)
    encoded: Encoded | None = None
    with _trying():
        encoded = encode([_essence(error) if plain else error], names=["exception"], plain=plain)
    if encoded is None and plain:
        encoded = encode([[fault.message]], names=["exception"], plain=True)
    if encoded is not None:
        fault = msgspec.structs.replace(fault, payload=encoded.payload)
    return fault, encoded


def _describe(error: BaseException, worker: str, tracebacks: bool) -> Fault:
    """An exception in words."""
    kind = type(error)
    message = f"<a {kind.__qualname__} that cannot be shown>"
    with _trying():
        message = str(error)
    text = "" if tracebacks else _HIDDEN
    with _trying():
        text = text or "".join(traceback.format_exception(error))
    text = text or "".join(traceback.format_tb(error.__traceback__)) + f"{kind.__qualname__}: {message}"
    type_name = f"{kind.__module__}.{kind.__qualname__}"
    return Fault(worker, _printable(type_name), _printable(message), _printable(text), None)


@contextlib.contextmanager
def _trying() -> Iterator[None]:
    """Go on after whatever is raised inside: code of the user's runs there. Signals get through."""
    try:
        yield
    except BaseException as error:
        if interrupts.from_signal(error):
            raise


def described(error: BaseException, worker: str) -> BaseException:
    """The ``RemoteError`` that stands for an exception which cannot be raised itself; never fails. ``worker`` may be
    empty.
    """
    return decode_fault(_describe(error, worker, tracebacks=True), ())


def foreign(error: BaseException, worker: str) -> BaseException:
    """What other workers get in the place of an exception of ``worker``; never fails. It is the exception itself if
    they can rebuild it, else a ``RemoteError``.
    """
    fault, encoded = encode_fault(error, worker)
    if encoded is not None and encoded.parcels:  # they stand for something, so they must not be decoded in vain
        return error
    made = decode_fault(fault, encoded.buffers if encoded is not None else ())
    return error if type(made) is type(error) else made


def _essence(error: BaseException) -> list[Any] | dict[str, Any]:
    """What to make an exception again of: the fields of one of ours, the arguments of another."""
    return dict(vars(error)) if isinstance(error, BackhaulError) else list(error.args)


def _printable(text: str) -> str:
    """Text that can be sent: file names and the like may hold what is no Unicode."""
    return text.encode("utf-8", "backslashreplace").decode()


def decode_fault(fault: Fault, buffers: Sequence[Buffer]) -> BaseException:
    """Make the exception to raise at the caller; never fails."""
    error: BaseException | None = None
    if fault.payload is not None and fault.payload.plain is not None:
        error = _rebuild(fault, fault.payload, buffers)
    elif fault.payload is not None:
        with _trying():  # its type is not importable here, its constructor wants other arguments, or worse
            (value,) = decode(fault.payload, buffers, why=_NO_GRADIENT)
            error = value if isinstance(value, Exception) else None
    if error is not None:
        with _trying():  # an exception that does not take notes
            _rebase_on_main(error)
            return _attribute(error, fault)
    error = RemoteError(f"{fault.type_name}: {fault.message}", worker=fault.worker or None, type_name=fault.type_name)
    return _attribute(error, fault)


def _rebuild(fault: Fault, payload: Payload, buffers: Sequence[Buffer]) -> BaseException | None:
    """Make an exception of plain data, if its type is in the table."""
    try:
        (essence,) = decode(payload, buffers, why=_NO_GRADIENT)
        if (own := _OWN.get(fault.type_name)) is not None:
            error = own(fault.message)
            for name in vars(error).keys() & essence.keys() if type(essence) is dict else ():
                setattr(error, name, essence[name])
            return error
        builtin = _BUILTIN.get(fault.type_name)
        if builtin is not None and type(essence) is list:
            return builtin(*essence)
    except Exception:  # its constructor wants other arguments, or they are not what they should be
        return None
    return None


def _attribute(error: BaseException, fault: Fault) -> BaseException:
    """Say where an exception comes from."""
    error.__cause__ = RemoteTraceback(fault.worker, fault.traceback)
    note = f"raised on worker '{fault.worker}'"
    if fault.worker and note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    return error


def _rebase_on_main(error: BaseException) -> None:
    """A class of ``__main__`` comes by value; where our own ``__main__`` has it, mean that one."""
    kind = type(error)
    own = getattr(sys.modules.get("__main__"), kind.__qualname__, None)
    if kind.__module__ == "__main__" and own is not kind and isinstance(own, type):
        try:
            error.__class__ = own
        except TypeError:  # another layout: then it is another class
            return
