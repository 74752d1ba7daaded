"""Converts Backhaul's errors to errors with the reference's texts, for programs that compare the text.

The reference raises ``RuntimeError`` for nearly everything. The cause of each converted error is Backhaul's own error,
with its fields.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

import torch

from backhaul._wire.callables import SCRIPT
from backhaul.errors import (
    BackhaulError,
    CallTimeoutError,
    FunctionNotFoundError,
    NotInitializedError,
    RemoteError,
    RendezvousError,
    SerializationError,
    ShutdownTimeoutError,
    UnknownContextError,
    UnknownWorkerError,
)

NOT_INITIALIZED = "RPC has not been initialized. Call backhaul.compat.rpc.init_rpc first."
NO_AGENT = "Current RPC agent is not set! Did you initialize the RPC framework (by calling `rpc.init_rpc`)?"

NO_MAP = (
    "TensorPipe RPC backend only supports CPU tensors by default. Move tensors to the CPU before they are sent, or "
    "call `set_device_map` on `TensorPipeRpcBackendOptions` to say where they arrive."
)


def reworded(error: BaseException) -> BaseException:
    """The error to raise in place of ``error``: ``error`` itself if the reference has no text for this case."""
    text = _text(error) if isinstance(error, BackhaulError) else None
    if isinstance(error, torch.jit.Error):
        text = str(error)
    if text is None:
        return error
    made = RuntimeError(text)
    made.__cause__ = error
    return made


def _text(error: BackhaulError) -> str | None:
    if isinstance(error, CallTimeoutError):
        timeout_ms = round((error.timeout or 0) * 1000)
        return f"RPC ran for more than set timeout ({timeout_ms} ms) and will now be marked with an error: {error}"
    if isinstance(error, UnknownWorkerError):
        return f"could not find destination: {error}"
    if isinstance(error, UnknownContextError):
        return f"Could not find autograd context with id: {error.context}"
    if isinstance(error, FunctionNotFoundError) and (error.function or "").startswith(SCRIPT):
        return f"attempted to get undefined function {(error.function or '').rpartition('.')[2]}: {error}"
    if isinstance(error, FunctionNotFoundError):
        return f"{error} Default RPC pickler does not serialize function code. Define it on both sides."
    if isinstance(error, NotInitializedError):
        return f"{NOT_INITIALIZED} ({error})"
    if isinstance(error, SerializationError) and error.device is not None:
        which = "Response" if (error.path or "").startswith("result") else "Request"
        return f"{NO_MAP} {which} device mapping is not available: {error}"
    if isinstance(error, SerializationError) and "(a Future)" in str(error):
        return f"Can not pickle torch.futures.Future: {error}"
    if isinstance(error, RendezvousError) and error.worker is not None:
        return f"Worker name {error.worker} is not unique: {error}"
    if isinstance(error, RemoteError):
        return f"Failed to create original exception type. Original exception on remote side was {error}"
    if isinstance(error, ShutdownTimeoutError):
        return f"Timed out waiting for the other workers: {error}"
    return None


@contextlib.contextmanager
def rewording() -> Iterator[None]:
    """Convert the errors that are raised inside the ``with`` block."""
    try:
        yield
    except CONVERTED as error:
        raise_reworded(error)


CONVERTED = (BackhaulError, torch.jit.Error)
"""The errors to convert."""


def raise_reworded(error: BaseException) -> NoReturn:
    """Raise a converted error. For ``except`` clauses on the path of each call, where ``rewording`` would cost more."""
    other = reworded(error)
    if other is error:
        raise error
    raise other from error
