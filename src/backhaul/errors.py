"""Every error Backhaul raises on its own account, and the carrier of a remote traceback.

One rule sorts them: the class says who has to act (caller, peer, network, cluster set-up), the
fields say what it is about. Bad arguments stay plain ``ValueError``/``TypeError``. Imports nothing of ours.
"""

from __future__ import annotations


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
    """A call had no reply within its timeout. What it does on the other worker is unknown.

    Attributes:
        function: Label of the called function.
        timeout: The timeout in seconds.
    """

    def __init__(
        self,
        message: str,
        *,
        worker: str | None = None,
        function: str | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__(message, worker=worker)
        self.function = function
        self.timeout = timeout


class PeerLostError(BackhaulError, ConnectionError):
    """The channel to a worker closed or could not be opened; what waited for it fails with this.

    Attributes:
        reason: Why the peer is thought lost.
        function: Label of the function whose call failed, if a call was waiting.
        context: Of a backward pass that failed: its context.
        number: Likewise: which pass of its driver it was.
        messages: Likewise: the messages whose gradients were due at that worker.
    """

    def __init__(
        self,
        message: str,
        *,
        worker: str | None = None,
        reason: str | None = None,
        function: str | None = None,
        context: int | None = None,
        number: int | None = None,
        messages: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message, worker=worker)
        self.reason = reason
        self.function = function
        self.context = context
        self.number = number
        self.messages = messages


class AuthenticationError(BackhaulError, ConnectionError):
    """One side of a new connection could not prove that it knows the cluster secret."""


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


class SerializationError(BackhaulError, TypeError):
    """An argument or result cannot travel. Raised at the caller; the message names the object.

    Attributes:
        path: Where the object sits, for example ``args[1]['lock']``.
    """

    def __init__(self, message: str, *, worker: str | None = None, path: str | None = None) -> None:
        super().__init__(message, worker=worker)
        self.path = path


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


class GraphFreedError(ContextError):
    """A pass reached a graph a second time that an earlier one freed; that one needed ``retain_graph=True``."""


class BackwardTimeoutError(ContextError, TimeoutError):
    """A backward pass reached its deadline.

    Attributes:
        outstanding: Messages that were under way, each with the name of the worker it was at.
    """

    def __init__(
        self,
        text: str,
        *,
        worker: str | None = None,
        context: int | None = None,
        message: int | None = None,
        outstanding: dict[int, str] | None = None,
    ) -> None:
        super().__init__(text, worker=worker, context=context, message=message)
        self.outstanding = outstanding or {}
