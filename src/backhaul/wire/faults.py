"""Exceptions <-> faults. An exception arrives with its own type where that can be had, and always with the
remote traceback as its cause.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Sequence

from backhaul.errors import BackhaulError, RemoteError, RemoteTraceback, SerializationError
from backhaul.wire.codec import Encoded, decode, encode
from backhaul.wire.memory import Buffer
from backhaul.wire.messages import Fault


def encode_fault(error: BaseException, worker: str) -> tuple[Fault, Encoded | None]:
    """Describe ``error`` as raised on ``worker``; never fails."""
    kind = type(error)
    if isinstance(error, BackhaulError) and getattr(error, "worker", None) is None:
        with contextlib.suppress(Exception):
            error.worker = worker
    try:
        message = str(error)
    except Exception as trouble:  # a __str__ of the user's that raises
        message = f"<a {kind.__qualname__} that cannot be shown: {type(trouble).__name__}>"
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:
        text = "".join(traceback.format_tb(error.__traceback__)) + f"{kind.__qualname__}: {message}"
    try:
        encoded: Encoded | None = encode([error], names=["exception"])
    except SerializationError:
        encoded = None
    fault = Fault(
        worker,
        _printable(f"{kind.__module__}.{kind.__qualname__}"),
        _printable(message),
        _printable(text),
        encoded.payload if encoded else None,
    )
    return fault, encoded


def _printable(text: str) -> str:
    """Text that can be sent: file names and the like may hold what is no Unicode."""
    return text.encode("utf-8", "backslashreplace").decode()


def decode_fault(fault: Fault, buffers: Sequence[Buffer]) -> BaseException:
    """Make the exception to raise at the caller; never fails."""
    error: BaseException | None = None
    if fault.payload is not None:
        try:
            (value,) = decode(fault.payload, buffers)
            error = value if isinstance(value, Exception) else None
        except BaseException:  # its type is not importable here, its constructor wants other arguments, or worse
            error = None
    if error is not None:
        try:
            _rebase_on_main(error)
            return _attribute(error, fault)
        except Exception:  # an exception that does not take notes
            error = None
    error = RemoteError(f"{fault.type_name}: {fault.message}", worker=fault.worker, type_name=fault.type_name)
    return _attribute(error, fault)


def _attribute(error: BaseException, fault: Fault) -> BaseException:
    """Say where an exception comes from."""
    error.__cause__ = RemoteTraceback(fault.worker, fault.traceback)
    error.add_note(f"raised on worker '{fault.worker}'")
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
