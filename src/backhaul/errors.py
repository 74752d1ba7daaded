"""All errors that Backhaul raises, and the exception that carries a remote traceback.

The class of an error says what went wrong and what to do. The fields say which worker, call or context it is about. Bad
arguments are plain ``ValueError`` or ``TypeError``. This module imports nothing of Backhaul.
"""

# Over the limit because each error that Backhaul raises has a class here, with its fields and what to do.

from __future__ import annotations

from concurrent.futures import CancelledError


class BackhaulError(RuntimeError):
    """The base class of all errors of Backhaul. Catch it to handle any of them.

    Every field is a plain attribute with a default, so the errors pickle as any exception does.

    Attributes:
        worker: The name of the worker that the error is about, if there is one.

    Example:
        >>> import backhaul as bh
        >>> try:
        ...     bh.rpc_sync("nobody", abs, args=(-1,))
        ... except bh.BackhaulError as error:
        ...     type(error).__name__
        'NotInitializedError'
    """

    worker: str | None

    def __init__(self, message: str, *, worker: str | None = None) -> None:
        super().__init__(message)
        self.worker = worker


class NotInitializedError(BackhaulError):
    """Raised if there is no current worker, or if it was shut down. Call ``init`` or open a ``cluster`` first.

    Example:
        >>> import backhaul as bh
        >>> try:
        ...     bh.get_worker_info()
        ... except bh.errors.NotInitializedError:
        ...     print("call bh.init, or open a bh.cluster")
        call bh.init, or open a bh.cluster
    """


class UnknownWorkerError(BackhaulError, LookupError):
    """Raised if no worker of that name or id is in the cluster. Check the name, or wait until the worker has joined.

    Example:
        >>> import backhaul as bh
        >>> with bh.cluster(["first", "second"]):
        ...     try:
        ...         bh.rpc_sync("third", abs, args=(-1,))
        ...     except bh.errors.UnknownWorkerError as error:
        ...         error.worker
        'third'
    """


class CallTimeoutError(BackhaulError, TimeoutError):
    """Raised if a call had no reply within its timeout.

    Backhaul cancels the call on the other worker, but that worker may have run some or all of it. Repeat the call only
    if that is safe. Give a slow call a longer ``timeout``.

    Attributes:
        function: The label of the called function.
        timeout: The timeout in seconds.
        cut_by: What set the deadline, if it was not the call's own timeout: the label of the outer call, or
            ``bh.deadline``.

    Example:
        >>> import backhaul as bh
        >>> def wait_until_cancelled():
        ...     while not bh.cancelled():
        ...         ...
        >>> with bh.cluster(2):
        ...     try:
        ...         bh.rpc_sync("worker1", wait_until_cancelled, timeout=0.1)
        ...     except bh.CallTimeoutError as error:
        ...         error.worker, error.timeout
        ('worker1', 0.1)
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
    """Raised if a call was cancelled before it had a reply, or if the call that made it was cancelled.

    The other worker may have run the call all the same. This is not asyncio's ``CancelledError``, which ends tasks.

    Attributes:
        function: The label of the called function, if it was a call.

    Example:
        >>> import backhaul as bh
        >>> with bh.cluster(2):
        ...     future = bh.rpc_async("worker1", pow, args=(2, 3))
        ...     if future.cancel():
        ...         try:
        ...             future.wait()
        ...         except bh.CallCancelledError as error:
        ...             assert error.worker == "worker1"
    """

    def __init__(self, message: str, *, worker: str | None = None, function: str | None = None) -> None:
        super().__init__(message, worker=worker)
        self.function = function


class PeerLostError(BackhaulError, ConnectionError):
    """Raised if the connection to a worker was lost or could not be opened, in everything that waits for that worker.

    Look at the log of that worker. Restart it, or continue without it. A step in a context with ``replay`` recovers by
    itself if a new worker takes the place of the lost one.

    Attributes:
        reason: Why the peer counts as lost.
        function: The label of the function whose call failed, if a call was waiting.
        context: The id of the context, if a backward pass was under way.
        pass_number: The number of that pass, as its driver counts.
        messages: The ids of the messages whose gradients that worker had to send or to get.

    Example:
        >>> import functools, backhaul as bh
        >>> with bh.cluster(["first", "second"]) as (first, second):
        ...     second.run(functools.partial(bh.shutdown, graceful=False))  # as if it had died
        ...     try:
        ...         bh.rpc_sync("second", abs, args=(-1,))
        ...     except bh.PeerLostError as error:
        ...         error.worker
        'second'
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
        """The first of the messages, if there is one."""
        return self.messages[0] if self.messages else None


class AuthenticationError(BackhaulError, ConnectionError):
    """Raised if one side of a new connection could not prove its identity with the secret or with a certificate.

    Give all workers the same secret, or certificates of the same authority.

    Example:
        >>> import backhaul as bh
        >>> try:
        ...     bh.init("late", join="tcp://host1:7000")  # doctest: +SKIP
        ... except bh.errors.AuthenticationError:
        ...     print("BACKHAUL_SECRET differs from that of the cluster")
    """


class ProtocolError(BackhaulError):
    """Raised if a peer sent bytes that the protocol does not allow. The channel to that peer is closed.

    Install the same version of Backhaul on all workers. If the versions are equal, report it as a bug.

    Example:
        >>> import backhaul as bh
        >>> issubclass(bh.errors.ProtocolError, bh.BackhaulError)
        True
    """


class FrameTooLargeError(BackhaulError):
    """Raised if a message is larger than ``limits.frame_bytes`` of one of the two workers. Nothing was sent.

    Split the message over several calls, or raise ``limits.frame_bytes`` on both workers.

    Attributes:
        nbytes: The size of the message.
        limit: The limit that it exceeds.

    Example:
        >>> import torch, backhaul as bh
        >>> with bh.cluster(2, options=bh.Options(limits=bh.Limits(frame_bytes=1 << 16))):
        ...     try:
        ...         bh.rpc_sync("worker1", torch.sum, args=(torch.ones(1 << 16),))
        ...     except bh.errors.FrameTooLargeError as error:
        ...         error.limit
        65536
    """

    def __init__(
        self, message: str, *, worker: str | None = None, nbytes: int | None = None, limit: int | None = None
    ) -> None:
        super().__init__(message, worker=worker)
        self.nbytes = nbytes
        self.limit = limit


class LimitError(BackhaulError):
    """Raised if a call exceeds a limit that a worker sets for each peer or for each message. Nothing of it was run.

    Send less, wait until earlier calls are done, or raise the ``option`` on ``worker``.

    Attributes:
        limit: What is limited, as text.
        option: The option of ``worker`` that sets the limit.
        value: The limit.

    Example:
        >>> import backhaul as bh
        >>> options = bh.Options(security=bh.Security(trusted=False), limits=bh.Limits(values=5000))
        >>> with bh.cluster(2, options=options):
        ...     try:
        ...         bh.rpc_sync("worker1", "f", args=(list(range(10_000)),))
        ...     except bh.errors.LimitError as error:
        ...         error.option
        'limits.values'
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
    """Raised if the policy of a worker does not let this caller call that function. Nothing was run.

    Allow the function in the options of the called worker.

    Attributes:
        function: The name of the function.
        caller: The name of the calling worker.

    Example:
        >>> import backhaul as bh
        >>> with bh.cluster(2, options=bh.Options(security=bh.Security(trusted=False))):
        ...     try:
        ...         bh.rpc_sync("worker1", abs, args=(-1,))
        ...     except bh.errors.PermissionDeniedError as error:
        ...         error.caller, error.worker
        ('worker0', 'worker1')
    """

    def __init__(
        self, message: str, *, worker: str | None = None, function: str | None = None, caller: str | None = None
    ) -> None:
        super().__init__(message, worker=worker)
        self.function = function
        self.caller = caller


class SerializationError(BackhaulError, TypeError):
    """Raised in the caller if an argument or a result cannot be sent. The text names the object and the reason.

    Send something else in its place, as the text says.

    Attributes:
        path: The path to the object, for example ``args[1]['lock']``.
        device: The device of a tensor for which the receiver has no device; see the option ``device_maps``.

    Example:
        >>> import threading, backhaul as bh
        >>> with bh.cluster(2):
        ...     try:
        ...         bh.rpc_sync("worker1", print, args=(threading.Lock(),))
        ...     except bh.errors.SerializationError as error:
        ...         error.path
        'args[0]'
    """

    def __init__(
        self, message: str, *, worker: str | None = None, path: str | None = None, device: str | None = None
    ) -> None:
        super().__init__(message, worker=worker)
        self.path = path
        self.device = device


class FunctionNotFoundError(BackhaulError, AttributeError):
    """Raised if the called function does not exist on the worker that should run it.

    Use the same code on all workers, and import the module there.

    Attributes:
        function: The ``module:qualname`` that the worker did not find.

    Example:
        >>> import backhaul as bh
        >>> with bh.cluster(2):
        ...     try:
        ...         bh.rpc_sync("worker1", "a name that nobody has exposed")
        ...     except bh.errors.FunctionNotFoundError as error:
        ...         error.worker
        'worker1'
    """

    def __init__(self, message: str, *, worker: str | None = None, function: str | None = None) -> None:
        super().__init__(message, worker=worker)
        self.function = function


class RemoteError(BackhaulError):
    """Raised in place of an exception of a remote function whose type the caller cannot rebuild.

    ``error.__cause__`` has the remote traceback. To get the type itself, define it in a module that both workers import
    and make it picklable.

    Attributes:
        type_name: The ``module.qualname`` of the original exception.

    Example:
        >>> import threading, backhaul as bh
        >>> def fail():
        ...     error = ValueError("no")
        ...     error.lock = threading.Lock()  # cannot travel
        ...     raise error
        >>> with bh.cluster(2):
        ...     try:
        ...         bh.rpc_sync("worker1", fail)
        ...     except bh.RemoteError as error:
        ...         print(error)
        builtins.ValueError: no
    """

    def __init__(self, message: str, *, worker: str | None = None, type_name: str | None = None) -> None:
        super().__init__(message, worker=worker)
        self.type_name = type_name


class RendezvousError(BackhaulError):
    """Raised if the workers of a cluster did not find each other in time, or if two use the same name or id.

    Start all workers with the same address and number of workers, and give each its own name.

    Example:
        >>> import torch, backhaul as bh
        >>> options = bh.Options(rendezvous_timeout=0.1)
        >>> try:
        ...     bh.init("first", rank=0, world_size=2, store=torch.distributed.HashStore(), options=options)
        ... except bh.errors.RendezvousError:
        ...     print("rank 1 has not started")
        rank 1 has not started
    """


class ShutdownTimeoutError(BackhaulError, TimeoutError):
    """Raised if a graceful shutdown reached its deadline before all workers were done. This worker is closed.

    Look at what the workers in ``waiting_for`` still do, or use a longer timeout.

    Attributes:
        waiting_for: The names of the workers that were not done.

    Example:
        >>> import functools, backhaul as bh
        >>> with bh.cluster(["first", "second"]) as (first, second):
        ...     try:
        ...         first.run(functools.partial(bh.shutdown, timeout=0.1))
        ...     except bh.errors.ShutdownTimeoutError as error:
        ...         error.waiting_for
        ('second',)
    """

    def __init__(self, message: str, *, worker: str | None = None, waiting_for: tuple[str, ...] = ()) -> None:
        super().__init__(message, worker=worker)
        self.waiting_for = waiting_for


class WorkersLostError(BackhaulError):
    """Raised by ``serve`` and ``shutdown`` if workers were lost before all were done. This worker is closed.

    The work may be unfinished: end the process with an error, so that its launcher restarts the job.

    Attributes:
        reasons: By name, why each worker was lost.

    Example:
        >>> import functools, backhaul as bh
        >>> with bh.cluster(["first", "second"]) as (first, second):
        ...     bh.rpc_sync("second", abs, args=(-1,))
        ...     second.run(functools.partial(bh.shutdown, graceful=False))  # as if it had died
        ...     try:
        ...         first.run(bh.serve)
        ...     except bh.errors.WorkersLostError as error:
        ...         list(error.reasons)
        1
        ['second']
    """

    def __init__(self, message: str, *, worker: str | None = None, reasons: dict[str, str] | None = None) -> None:
        super().__init__(message, worker=worker)
        self.reasons = reasons or {}


class LeakError(BackhaulError):
    """Raised if a worker was shut down while other workers still had references (``RRef``) to its values.

    Drop the references before the shutdown.

    Example:
        >>> import torch, backhaul as bh
        >>> worker = bh.init("alone", rank=0, world_size=1, store=torch.distributed.HashStore())
        >>> try:
        ...     bh.shutdown(ignore_rref_leak=False)
        ... except bh.errors.LeakError:
        ...     print("other workers still refer to values of this one")
    """


class WorkerFailedError(BackhaulError):
    """Raised if a process that ``launch`` started ended without a result, or if Ray did not start a worker or has given
    it up. Look at the output of that process.

    Attributes:
        exitcode: The exit code of the process, if it is known. Negative: the signal that ended it.

    Example:
        >>> import os, backhaul as bh
        >>> try:
        ...     bh.launch(os._exit, workers=2, args=(3,))  # doctest: +SKIP
        ... except bh.errors.WorkerFailedError as error:
        ...     error.exitcode
        3
    """

    def __init__(self, message: str, *, worker: str | None = None, exitcode: int | None = None) -> None:
        super().__init__(message, worker=worker)
        self.exitcode = exitcode


class UnsupportedTorchError(BackhaulError, ImportError):
    """Raised if the installed torch is too old, or lacks private names that Backhaul or one of its features uses.

    Install a version of torch that Backhaul supports.

    Attributes:
        torch_version: The installed version.
        missing: The names that it lacks.

    Example:
        >>> try:
        ...     import backhaul
        ... except ImportError as error:  # its subclass cannot be imported before
        ...     print(error.missing)
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
    """The traceback of an exception that another worker raised. It is the ``__cause__`` of the local exception.

    It is never raised itself.

    Attributes:
        worker: The name of the worker that raised the exception.
        text: The formatted traceback.

    Example:
        >>> import backhaul as bh
        >>> with bh.cluster(2):
        ...     try:
        ...         bh.rpc_sync("worker1", divmod, args=(1, 0))
        ...     except ZeroDivisionError as error:
        ...         error.__cause__.worker
        'worker1'
    """

    def __init__(self, worker: str, text: str) -> None:
        super().__init__(worker, text)
        self.worker = worker
        self.text = text

    def __str__(self) -> str:
        return f"on worker '{self.worker}':\n\n{self.text.rstrip()}"


class ContextError(BackhaulError):
    """Raised if an autograd context, or a graph recorded in it, cannot be used as asked. The text says what to change.

    Attributes:
        context: The id of the context.
        message: The id of the message that the error is about, if there is one.

    Example:
        >>> import backhaul as bh
        >>> with bh.cluster(2), bh.context():
        ...     try:
        ...         with bh.context():
        ...             ...
        ...     except bh.errors.ContextError:
        ...         print("contexts do not nest")
        contexts do not nest
    """

    def __init__(
        self, text: str, *, worker: str | None = None, context: int | None = None, message: int | None = None
    ) -> None:
        super().__init__(text, worker=worker)
        self.context = context
        self.message = message


class UnknownContextError(ContextError, LookupError):
    """Raised if a context was released, or if this worker never took part in it.

    Read gradients and call ``ctx.backward`` inside the ``with bh.context()`` block.

    Example:
        >>> import torch, backhaul as bh
        >>> with bh.cluster(2):
        ...     with bh.context() as ctx:
        ...         pass
        ...     try:
        ...         bh.get_gradients(ctx)
        ...     except bh.errors.UnknownContextError as error:
        ...         error.context == ctx
        True
    """


class ForeignGraphError(ContextError):
    """Raised if a gradient would have to pass a tensor that was received in another context, or outside any context.

    Receive the tensor inside the context of the backward pass, or ``detach()`` it.

    Attributes:
        origin: The id of the context in which the tensor was received; None: outside any context.
        sender: The name of the worker that sent the tensor.
        root: The index of the root that depends on the tensor, if one does.

    Example:
        >>> import torch, backhaul as bh
        >>> x = torch.ones(2, requires_grad=True)
        >>> with bh.cluster(2):
        ...     with bh.context():
        ...         y = bh.rpc_sync("worker1", torch.mul, args=(x, 3))
        ...     with bh.context() as ctx:
        ...         try:
        ...             ctx.backward(y.sum())
        ...         except bh.errors.ForeignGraphError as error:
        ...             error.sender
        'worker1'
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
    """Raised if a backward pass reaches a graph that an earlier pass has freed.

    Call the earlier ``backward`` with ``retain_graph=True``.

    Example:
        >>> import torch, backhaul as bh
        >>> x = torch.ones(2, requires_grad=True)
        >>> with bh.cluster(2):
        ...     loss = bh.rpc_sync("worker1", torch.mul, args=(x, 3)).sum()
        ...     loss.backward()
        ...     try:
        ...         loss.backward()
        ...     except RuntimeError as error:  # as in one process
        ...         print("a second pass needs retain_graph=True in the first")
        a second pass needs retain_graph=True in the first
    """


class BackwardTimeoutError(ContextError, TimeoutError):
    """Raised if a backward pass reached its deadline. Look at the workers in ``outstanding``, or use a longer timeout.

    Attributes:
        outstanding: The messages that were under way, each with the name of the worker that had it.
        cut_by: See ``CallTimeoutError``.

    Example:
        >>> import torch, backhaul as bh
        >>> x = torch.ones(2, requires_grad=True)
        >>> with bh.cluster(2), bh.context() as ctx:
        ...     y = bh.rpc_sync("worker1", torch.mul, args=(x, 3))
        ...     try:
        ...         ctx.backward(y.sum(), timeout=1e-6)
        ...     except bh.errors.BackwardTimeoutError:
        ...         print("it takes longer than a microsecond")
        it takes longer than a microsecond
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
