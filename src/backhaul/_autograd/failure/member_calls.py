"""Calls to workers that may be lost or replaced while a context is recovered. Knows nothing of what is recovered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from backhaul._autograd.context import Context
from backhaul._autograd.forward.recording import enter, leave
from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.cluster.peers import Peer
from backhaul._worker import deadlines
from backhaul._worker.worker import Worker
from backhaul.errors import BackhaulError, ContextError, PeerLostError, UnknownWorkerError

T = TypeVar("T")

MAX_TRIES = 3  # attempts at something that fails because a channel is lost but no worker is
POLL_SECONDS = 0.05  # between two looks at the membership
PROBE_SECONDS = 2.0  # that a worker has to answer a probe


@contextlib.contextmanager
def outside_contexts() -> Iterator[None]:
    """Calls made inside this block belong to no context."""
    token = enter(None)
    try:
        yield
    finally:
        leave(token)


class MemberCalls:
    """Calls functions on other members, outside any context. Thread-safe."""

    def __init__(self, worker: Worker, client: CallClient) -> None:
        self._worker = worker
        self._client = client

    def call(self, worker: int, function: Callable[..., T], *args: Any, timeout: float | None = None) -> T:
        """Call a function on a worker and wait for the result."""
        with outside_contexts():
            result: T = self._client.call(worker, function, args, None, timeout, mode="internal")
            return result

    def call_member(self, context: Context, worker: int, timeout: float, function: Callable[..., T], *args: Any) -> T:
        """Call ``function(context.id, *args)`` on a worker. If the channel or the worker is lost, wait up to
        ``timeout`` seconds until a worker of that id answers, and try again.
        """
        for tries in reversed(range(MAX_TRIES)):
            try:
                return self.call(worker, function, context.id, *args)
            except (PeerLostError, UnknownWorkerError):  # the id is unknown just before a replacement joins
                if not tries:
                    raise
                self.await_member(context, worker, timeout)
        raise AssertionError

    def visit(
        self, context: Context, timeout: float, function: Callable[..., tuple[set[int], T]], *args: Any, skip: int = -1
    ) -> Iterator[tuple[int, T]]:
        """Call ``function(context.id, *args)`` on every worker that the context has reached, this one first, except
        ``skip``. The function returns the workers known there and a result. Yields each worker with its result.
        """
        todo, seen = [int(self._worker.info.id)], {skip}
        while todo:
            worker = todo.pop()
            if worker not in seen:
                seen.add(worker)
                known, result = self.call_member(context, worker, timeout, function, *args)
                todo.extend(known)
                yield worker, result

    def incarnation_of(self, worker: int) -> str:
        """The incarnation that has this id now; empty if no member has it."""
        try:
            return self._client.peers.find(worker).record.incarnation
        except UnknownWorkerError:
            return ""

    def await_member(self, context: Context, worker: int, timeout: float) -> Peer:
        """Wait until a worker of this id answers. It is a new incarnation or, if only a channel was lost, the same.

        Raises:
            PeerLostError: No worker answered within ``timeout`` seconds.
            ContextError: The context was released meanwhile.
            CallTimeoutError: The current deadline has passed.
            CallCancelledError: The current scope was cancelled.
        """
        runtime, peers = self._worker.runtime, self._client.peers
        deadline = runtime.now() + timeout
        name = f"worker {worker}"
        while True:
            with contextlib.suppress(UnknownWorkerError):
                peer = peers.find(worker)
                name = f"worker '{peer.info.name}'"
                with contextlib.suppress(BackhaulError):
                    self.call(worker, probe, timeout=min(PROBE_SECONDS, timeout) or PROBE_SECONDS)
                    if peers.find(worker) is peer:
                        return peer
            left = deadline - runtime.now()
            if left <= 0:
                raise PeerLostError(f"nobody took the place of {name} within {timeout:g} s", worker=name)
            if context.released:
                raise ContextError(f"context {context.id} was released before a worker took the place of {name}")
            with self._worker.blocking():
                deadlines.wait(runtime.one_shot(), min(POLL_SECONDS, left), f"nobody had taken the place of {name}")


def probe() -> None:
    """Runs on the probed worker. The reply shows that it answers."""
