"""Every error Backhaul raises on its own account, and the carrier of a remote traceback.

One rule sorts them: the class says who has to act (caller, peer, network, cluster set-up), the
fields say what it is about. Bad arguments stay plain ``ValueError``/``TypeError``. Imports nothing of ours.
"""

from __future__ import annotations

from concurrent.futures import CancelledError


class BackhaulError(RuntimeError):
    """Root of all errors of Backhaul.

    Every field is a plain attribute with a default, so all of them pickle as any exception does.

    Attributes:
        worker: Name of the worker the error is about, where there is one.
    """

    worker: str | None

    def __init__(self, message: str, *, worker: str | None = None) -> None:
        super().__init__(message)
        self.worker = worker


class NotInitializedError(BackhaulError):
    """There is no current worker: ``init`` has not been called, or the worker was shut down."""


class UnknownWorkerError(BackhaulError, LookupError):
    """No worker of that name or id belongs to the cluster."""


class CallTimeoutError(BackhaulError, TimeoutError):
    """A call had no reply within its timeout. The other worker is told, but may have done some or all of it.

    Attributes:
        function: Label of the called function.
        timeout: The timeout in seconds.
        cut_by: Where the time was not the call's own, whose deadline it was: the label of the outer call, or
            ``bh.deadline``.
    """

    def __init__(
        self,
        message: str,
        *,
        worker: str | None = None,
        function: str | None = None,
        timeout: float | None = None,
        cut_by: str | None = None,
    ) -> None:
        super().__init__(message, worker=worker)
        self.function = function
        self.timeout = timeout
        self.cut_by = cut_by


class CallCancelledError(BackhaulError, CancelledError):
    """A call was cancelled before it had a reply, or what it was made for was. It may have been done on the other
    worker all the same. Not asyncio's error of that name, which ends tasks.

    Attributes:
        function: Label of the called function, if it was a call.
    """

    def __init__(self, message: str, *, worker: str | None = None, function: str | None = None) -> None:
        super().__init__(message, worker=worker)
        self.function = function


class PeerLostError(BackhaulError, ConnectionError):
    """The channel to a worker closed or could not be opened; what waited for it fails with this.

    Attributes:
        reason: Why the peer is thought lost.
        function: Label of the function whose call failed, if a call was waiting.
        context: Id of the context, if a backward pass was under way.
        pass_number: Number of that pass, as its driver counts.
        messages: Ids of the messages whose gradients that worker owed or was to get.
    """

    def __init__(
        self,
        text: str,
        *,
        worker: str | None = None,
        reason: str | None = None,
        function: str | None = None,
        context: int | None = None,
        pass_number: int | None = None,
        messages: tuple[int, ...] = (),
    ) -> None:
        super().__init__(text, worker=worker)
        self.reason = reason
        self.function = function
        self.context = context
        self.pass_number = pass_number
        self.messages = messages

    @property
    def message(self) -> int | None:
        """The first of the messages, where there is one."""
        return self.messages[0] if self.messages else None


class AuthenticationError(BackhaulError, ConnectionError):
    """One side of a new connection could not prove who it is: by the cluster's secret, or by a certificate."""


class ProtocolError(BackhaulError):
    """Bytes on a channel are not what the protocol allows; that channel is closed."""


class FrameTooLargeError(BackhaulError):
    """A message is larger than ``max_frame_bytes`` of one of the two workers; nothing was sent.

    Attributes:
        nbytes: Size of the message.
        limit: The limit it exceeds.
    """

    def __init__(
        self, message: str, *, worker: str | None = None, nbytes: int | None = None, limit: int | None = None
    ) -> None:
        super().__init__(message, worker=worker)
        self.nbytes = nbytes
        self.limit = limit


class LimitError(BackhaulError):
    """A peer asked for more than a worker gives to one, or sends more than it takes in one message; nothing of that
    call was done.

    Attributes:
        limit: What is limited, for people.
        option: The field of ``Options`` that sets it on the worker whose limit it is, which is ``worker``.
        value: What it is set to.
    """

    def __init__(
        self,
        message: str,
        *,
        worker: str | None = None,
        limit: str | None = None,
        option: str | None = None,
        value: int | None = None,
    ) -> None:
        super().__init__(message, worker=worker)
        self.limit = limit
        self.option = option
        self.value = value


class PermissionDeniedError(BackhaulError, PermissionError):
    """A worker does not let this caller call that function. Nothing was run.

    Attributes:
        function: The name that was asked for.
        caller: Name of the worker that asked.
    """

    def __init__(
        self, message: str, *, worker: str | None = None, function: str | None = None, caller: str | None = None
    ) -> None:
        super().__init__(message, worker=worker)
        self.function = function
        self.caller = caller


class SerializationError(BackhaulError, TypeError):
    """An argument or result cannot travel. Raised at the caller; the message names the object.

    Attributes:
        path: Where the object sits, for example ``args[1]['lock']``.
        device: The device it is on, if it is a tensor for which the receiver has no place; see ``Options.device_maps``.
    """

    def __init__(
        self, message: str, *, worker: str | None = None, path: str | None = None, device: str | None = None
    ) -> None:
        super().__init__(message, worker=worker)
        self.path = path
        self.device = device


class FunctionNotFoundError(BackhaulError, AttributeError):
    """The called function exists at the caller but not on the worker that should run it.

    Attributes:
        function: The ``module:qualname`` that was looked up.
    """

    def __init__(self, message: str, *, worker: str | None = None, function: str | None = None) -> None:
        super().__init__(message, worker=worker)
        self.function = function


class RemoteError(BackhaulError):
    """An exception of a remote function whose own type cannot be rebuilt at the caller.

    Attributes:
        type_name: ``module.qualname`` of the original exception.
    """

    def __init__(self, message: str, *, worker: str | None = None, type_name: str | None = None) -> None:
        super().__init__(message, worker=worker)
        self.type_name = type_name


class RendezvousError(BackhaulError):
    """The workers did not find each other: some never came, or two took the same name."""


class ShutdownTimeoutError(BackhaulError, TimeoutError):
    """A graceful shutdown reached its deadline before everyone was done; this worker is closed.

    Attributes:
        waiting_for: Names of the workers that were not done.
    """

    def __init__(self, message: str, *, worker: str | None = None, waiting_for: tuple[str, ...] = ()) -> None:
        super().__init__(message, worker=worker)
        self.waiting_for = waiting_for


class LeakError(BackhaulError):
    """A worker was shut down while others still referred to values of its."""


class WorkerFailedError(BackhaulError):
    """A process started by ``launch`` ended without a result.

    Attributes:
        exitcode: Its exit code; negative: the signal that ended it.
    """

    def __init__(self, message: str, *, worker: str | None = None, exitcode: int | None = None) -> None:
        super().__init__(message, worker=worker)
        self.exitcode = exitcode


class UnsupportedTorchError(BackhaulError, ImportError):
    """The installed torch is too old, or lacks private names that Backhaul or one of its features uses.

    Attributes:
        torch_version: The installed version.
        missing: The names that it lacks.
    """

    def __init__(
        self,
        message: str,
        *,
        worker: str | None = None,
        torch_version: str | None = None,
        missing: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message, worker=worker)
        self.torch_version = torch_version
        self.missing = missing


class RemoteTraceback(Exception):
    """Cause of an exception that was raised on another worker: that worker's traceback as text.

    It is never raised itself; find it as ``error.__cause__``.

    Attributes:
        worker: Name of the worker that raised.
        text: The formatted traceback.
    """

    def __init__(self, worker: str, text: str) -> None:
        super().__init__(worker, text)
        self.worker = worker
        self.text = text

    def __str__(self) -> str:
        return f"on worker '{self.worker}':\n\n{self.text.rstrip()}"


class ContextError(BackhaulError):
    """Something is wrong with an autograd context.

    Attributes:
        context: Id of the context.
        message: Id of the message it is about, where there is one.
    """

    def __init__(
        self, text: str, *, worker: str | None = None, context: int | None = None, message: int | None = None
    ) -> None:
        super().__init__(text, worker=worker)
        self.context = context
        self.message = message


class UnknownContextError(ContextError, LookupError):
    """The context was released, or this worker never saw it."""


class ForeignGraphError(ContextError):
    """A gradient would have to go through a tensor that was received in another context, or outside any.

    Attributes:
        origin: Id of the context that the tensor was received in; None: outside any.
        sender: Name of the worker that sent the tensor.
        root: Which of the roots depends on it, if one does.
    """

    def __init__(
        self,
        text: str,
        *,
        worker: str | None = None,
        context: int | None = None,
        message: int | None = None,
        origin: int | None = None,
        sender: str | None = None,
        root: int | None = None,
    ) -> None:
        super().__init__(text, worker=worker, context=context, message=message)
        self.origin = origin
        self.sender = sender
        self.root = root


class GraphFreedError(ContextError):
    """A pass reached a graph a second time that an earlier one freed; that one needed ``retain_graph=True``."""


class BackwardTimeoutError(ContextError, TimeoutError):
    """A backward pass reached its deadline.

    Attributes:
        outstanding: Messages that were under way, each with the name of the worker it was at.
        cut_by: As of ``CallTimeoutError``.
    """

    def __init__(
        self,
        text: str,
        *,
        worker: str | None = None,
        context: int | None = None,
        message: int | None = None,
        outstanding: dict[int, str] | None = None,
        cut_by: str | None = None,
    ) -> None:
        super().__init__(text, worker=worker, context=context, message=message)
        self.outstanding = outstanding or {}
        self.cut_by = cut_by
