"""Calls that are made again when they fail. ``Retry`` decides when, without I/O; ``Attempts`` makes the calls."""

from __future__ import annotations

import contextvars
import functools
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.futures import Future
from backhaul._wire.callables import label_of
from backhaul._worker import deadlines
from backhaul._worker.deadlines import FOREVER, Block
from backhaul.errors import BackhaulError, CallCancelledError, CallTimeoutError, PeerLostError, UnknownWorkerError

log = logging.getLogger("backhaul")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How often a call is made again if its worker is lost, and how long the pauses are. Only for functions that may
    run twice: the caller does not know whether a failed attempt ran.

    All attempts and pauses together must end within the time of the call (its ``timeout``, and the time that is left to
    the handler or block around it). No attempt begins after that. Each attempt sends the arguments again, so they must
    not be changed before the call is over. Each attempt looks up the worker again.

    Attributes:
        attempts: The largest number of attempts, including the first.
        backoff: Seconds before the second attempt.
        factor: How much longer each pause is than the one before.
        longest: The longest pause, in seconds.
        jitter: Which part of each pause is random, 0 to 1. A pause of 1 s with 0.5 takes between 0.5 and 1 s, so
            workers that failed together do not try again together.
        timeout: Seconds for each attempt; None: all the time that is left.
        on: The errors after which to try again: ``PeerLostError``, ``CallTimeoutError`` (which needs ``timeout``), or
            classes derived from them.

    Example:
        >>> import operator, backhaul as bh
        >>> with bh.cluster(2):
        ...     bh.rpc_sync("worker1", operator.add, args=(1, 2), retry=bh.Retry(attempts=5, backoff=0.5))
        3
        >>> [round(bh.Retry(attempts=4, jitter=0).pause(n), 3) for n in (1, 2, 3)]
        [0.1, 0.2, 0.4]
    """

    attempts: int = 3
    backoff: float = 0.1
    factor: float = 2.0
    longest: float = 30.0
    jitter: float = 0.5
    timeout: float | None = None
    on: type[BackhaulError] | tuple[type[BackhaulError], ...] = (PeerLostError,)

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts must be at least 1, got {self.attempts}")
        if not (0 <= self.backoff < FOREVER and 0 <= self.longest < FOREVER):
            raise ValueError(f"pauses must not be negative, got {self.backoff} to {self.longest}")
        if not 1 <= self.factor < FOREVER:
            raise ValueError(f"factor must be at least 1, got {self.factor}")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter must be between 0 and 1, got {self.jitter}")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"the timeout of an attempt must be positive, got {self.timeout}")
        for kind in self.on if isinstance(self.on, tuple) else (self.on,):
            if not (isinstance(kind, type) and issubclass(kind, (PeerLostError, CallTimeoutError))):
                raise TypeError(f"on must be a tuple of PeerLostError and CallTimeoutError, got {self.on!r}")
            if issubclass(kind, CallTimeoutError) and self.timeout is None:
                raise ValueError(
                    "to try again after CallTimeoutError, set the timeout of an attempt: Retry(timeout=...)"
                )

    def pause(self, attempt: int, chance: float = 1.0) -> float:
        """Seconds between an attempt that has failed and the next attempt.

        Args:
            attempt: The number of the attempt that has failed, from 1.
            chance: A random number between 0 and 1: where in its random part the pause ends.
        """
        try:
            full = min(self.backoff * self.factor ** (attempt - 1), self.longest)
        except OverflowError:
            full = self.longest
        return full * (1 - self.jitter * (1 - chance))

    def next(self, attempt: int, error: BaseException, left: float, chance: float = 1.0) -> float | None:
        """Seconds to pause before the next attempt; None: there is no next attempt.

        Args:
            attempt: The number of the attempt that has failed, from 1.
            error: The error of that attempt.
            left: Seconds that are left to all attempts.
            chance: As for ``pause``.
        """
        # A worker that has left the cluster may come back under its name. A name that was never known will not.
        expected = isinstance(error, self.on) or (attempt > 1 and isinstance(error, UnknownWorkerError))
        if not expected or attempt >= self.attempts:
            return None
        pause = self.pause(attempt, chance)
        return pause if pause < left else None


class Attempts:
    """One call with all its attempts.

    Args:
        client: Makes the calls.
        retry: Decides when to try again.
        to: The worker to call.
        function: The function to call.
        args: Positional arguments.
        kwargs: Keyword arguments.
        timeout: Seconds for all attempts together; None: the worker's default.
        options: Other arguments of ``CallClient.call``, for each attempt.
    """

    def __init__(  # noqa: PLR0917 (the arguments of rpc_sync)
        self,
        client: CallClient,
        retry: Retry,
        to: Any,
        function: Callable[..., Any] | str,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float | None,
        **options: Any,
    ) -> None:
        if not isinstance(retry, Retry):
            raise TypeError(f"retry must be a Retry, not a {type(retry).__name__}")
        total = client.timeout if timeout is None else timeout
        if total < 0:
            raise ValueError(f"timeout must not be negative, got {total}; 0 means none")
        self._client = client
        self._retry = retry
        self._to = getattr(to, "name", to)
        self._label = options.get("label") or (label_of(function) if callable(function) else "the call")
        self._call = (to, function, args, kwargs, retry.timeout or 0.0)
        self._options = options
        self._number = 0  # the number of the last attempt
        now = client.worker.runtime.now
        self._scope = Block(f"all attempts at {self._label}", total or FOREVER, now, deadlines.current.get())

    def run(self) -> Any:
        """Make the call, again if needed, and wait for its value."""
        token = deadlines.current.set(self._scope)
        try:
            pause = 0.0
            while True:
                try:
                    if pause:
                        with self._client.worker.blocking():
                            one_shot = self._client.worker.runtime.one_shot()
                            deadlines.wait(one_shot, pause, f"{self._label} was not tried again")
                    self._number += 1
                    return self._client.call(*self._call, **self._options)
                except BackhaulError as error:
                    again = self._next(error)
                    if again is None:
                        raise
                    pause = again
        finally:
            deadlines.current.reset(token)

    def start(self) -> Future[Any]:
        """Make the call; return a future that gets the outcome of the last attempt."""
        made: Future[Any] = Future()
        made._cancel = functools.partial(self._cancel, made)
        self._context = contextvars.copy_context()
        self._context.run(deadlines.current.set, self._scope)
        self._records = torch.is_grad_enabled()  # belongs to the thread; later attempts run on others
        self._under_way: Future[Any] | None = None
        self._watch(made, self._context.run(self._attempt))  # raises if the call itself is wrong
        return made

    def _attempt(self) -> Future[Any]:
        self._number += 1
        with torch.set_grad_enabled(self._records):
            self._under_way = future = self._client.call_async(*self._call, **self._options)
        return future

    def _watch(self, made: Future[Any], future: Future[Any]) -> None:
        future._when_done(functools.partial(self._done, made))

    def _done(self, made: Future[Any], future: Future[Any]) -> None:
        try:
            value = future.value()
        except BaseException as error:
            self._fail(made, error)
        else:
            if not made.done():
                made.set_result(value)

    def _fail(self, made: Future[Any], error: BaseException) -> None:
        if made.done():
            return  # the future was cancelled
        pause = self._next(error)
        if pause is None:
            made.set_exception(error)
            return
        worker = self._client.worker
        self._client.idleness.begin()  # a shutdown waits for the next attempt
        self._client.paused.add(made)
        again = functools.partial(self._context.copy().run, self._again, made)
        worker.thread_pool.call_at(worker.runtime.now() + pause, functools.partial(worker.thread_pool.submit, again))

    def _again(self, made: Future[Any]) -> None:
        if not self._client.paused.remove(made):
            return
        try:
            if not made.done():
                self._watch(made, self._attempt())
        except BaseException as error:
            self._fail(made, error)
        finally:
            self._client.idleness.end()

    def _cancel(self, made: Future[Any]) -> bool:
        under_way = self._under_way
        if under_way is not None and under_way.cancel():
            return True
        if made.done():
            return False
        try:
            text = f"{self._label} on worker '{self._to}' was cancelled before it was tried again"
            made.set_exception(CallCancelledError(text, function=self._label))
        except RuntimeError:  # another thread has completed it just now
            return False
        if self._client.paused.remove(made):
            self._client.idleness.end()
        return True

    def _next(self, error: BaseException) -> float | None:
        """Seconds until the next attempt; None: there is none. Logs the decision."""
        scope, number = self._scope, self._number
        left = 0.0 if scope.root.cancelled else scope.until - scope.now()
        pause = self._retry.next(number, error, left, random.random())
        if pause is not None:
            self._client.paused.count_retry()
            log.warning(
                "%s on worker '%s' failed (attempt %d of %d), trying again in %.2g s: %s",
                *(self._label, self._to, number, self._retry.attempts, pause, error),
                extra={"peer": str(self._to)},
            )
        elif number > 1 and isinstance(error, BackhaulError):
            error.add_note(f"{number} attempts were made, of {self._retry.attempts} allowed")
        return pause


def start(client: CallClient, *call: Any, **options: Any) -> Future[Any]:
    """Start an asynchronous call. The last element of ``call`` is a ``Retry``, or None."""
    *rest, retry = call
    if retry is None:
        return client.call_async(*rest, **options)
    to, function, args, kwargs, timeout = rest
    return Attempts(client, retry, to, function, args, kwargs, timeout, **options).start()
