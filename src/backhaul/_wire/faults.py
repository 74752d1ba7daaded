"""Exceptions <-> faults. An exception arrives with its own type if the receiver can rebuild it, and always with the
remote traceback as its cause.

Where pickle is forbidden, an exception is sent as the name of its type and plain data. The receiver rebuilds it only if
the type is in a fixed table: the exceptions of Python and of Backhaul.
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

_HIDDEN = "(this worker does not send tracebacks)"

_BUILTIN: dict[str, type[Exception]] = {
    f"builtins.{kind.__name__}": kind
    for kind in vars(builtins).values()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    # The first two control generators. A group consists of exceptions, which are not plain data.
    and not issubclass(kind, (StopIteration, StopAsyncIteration, BaseExceptionGroup))
}
_OWN: dict[str, type[BackhaulError]] = {
    f"{kind.__module__}.{kind.__name__}": kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, BackhaulError)
}


_NO_GRADIENT = (
    "the graph of this tensor leads to another worker's exception, which carries no gradient; return the tensor from "
    "the call instead of raising it, or detach() it if you need no gradient"
)


def encode_fault(
    error: BaseException, worker: str, *, plain: bool = False, tracebacks: bool = True
) -> tuple[Fault, Encoded | None]:
    """Describe ``error`` as raised on ``worker``; never fails.

    Args:
        error: The exception.
        worker: The name of the worker that raised it.
        plain: Whether pickle is forbidden.
        tracebacks: Whether to include the traceback.
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
    """Describe an exception as text."""
    kind = type(error)
    message = f"<a {kind.__qualname__} whose str() failed>"
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
    """Suppress all exceptions of the block, which runs user code, except those raised by signal handlers."""
    try:
        yield
    except BaseException as error:
        if interrupts.from_signal(error):
            raise


def described(error: BaseException, worker: str) -> BaseException:
    """The ``RemoteError`` to raise in place of an exception; never fails. ``worker`` may be empty."""
    return decode_fault(_describe(error, worker, tracebacks=True), ())


def foreign(error: BaseException, worker: str) -> BaseException:
    """What other workers get for an exception of ``worker``; never fails.

    It is the exception itself if they can rebuild it, else a ``RemoteError``.
    """
    fault, encoded = encode_fault(error, worker)
    if encoded is not None and encoded.parcels:  # decoding would act on them
        return error
    made = decode_fault(fault, encoded.buffers if encoded is not None else ())
    return error if type(made) is type(error) else made


def _essence(error: BaseException) -> list[Any] | dict[str, Any]:
    """The data to rebuild an exception from: the fields of a ``BackhaulError``, the arguments of any other."""
    return dict(vars(error)) if isinstance(error, BackhaulError) else list(error.args)


def _printable(text: str) -> str:
    """Replace what is not valid Unicode, for example in file names."""
    return text.encode("utf-8", "backslashreplace").decode()


def decode_fault(fault: Fault, buffers: Sequence[Buffer]) -> BaseException:
    """Build the exception to raise in the caller; never fails."""
    error: BaseException | None = None
    if fault.payload is not None and fault.payload.plain is not None:
        error = _rebuild(fault, fault.payload, buffers)
    elif fault.payload is not None:
        with _trying():  # the type may not be importable here, and its constructor may fail
            (value,) = decode(fault.payload, buffers, why=_NO_GRADIENT)
            error = value if isinstance(value, Exception) else None
    if error is not None:
        with _trying():  # an exception may refuse notes
            _rebase_on_main(error)
            return _attribute(error, fault)
    error = RemoteError(f"{fault.type_name}: {fault.message}", worker=fault.worker or None, type_name=fault.type_name)
    return _attribute(error, fault)


def _rebuild(fault: Fault, payload: Payload, buffers: Sequence[Buffer]) -> BaseException | None:
    """Build an exception from plain data, if its type is in the table."""
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
    except Exception:  # the constructor does not accept this data
        return None
    return None


def _attribute(error: BaseException, fault: Fault) -> BaseException:
    """Add the remote traceback and the name of the worker to an exception."""
    error.__cause__ = RemoteTraceback(fault.worker, fault.traceback)
    note = f"raised on worker '{fault.worker}'"
    if fault.worker and note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    return error


def _rebase_on_main(error: BaseException) -> None:
    """Replace a class of ``__main__`` that came by value with the class of the same name in this ``__main__``."""
    kind = type(error)
    own = getattr(sys.modules.get("__main__"), kind.__qualname__, None)
    if kind.__module__ == "__main__" and own is not kind and isinstance(own, type):
        try:
            error.__class__ = own
        except TypeError:  # the classes have different layouts, so they are not the same
            return
