"""Faults on purpose: calls of a worker that get lost, or that are sent late."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Collection, Mapping

from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.calls.pending import Pending
from backhaul._transport.base import ChannelClosedError


class Faults:
    """What goes wrong with the calls of one worker; ``install`` it on the worker's agent.

    Args:
        kinds_of: The kinds that a call is of, by which the others name it.
        lose: Kinds whose calls get lost.
        times: How often, for each function and worker called.
        delay: Seconds by which calls of a kind are late. Their time runs meanwhile.
    """

    def __init__(
        self,
        kinds_of: Callable[[Pending], Collection[str]],
        *,
        lose: Collection[str] = (),
        times: int = 1,
        delay: Mapping[str, float] | None = None,
    ) -> None:
        self._kinds_of = kinds_of
        self._lose = frozenset(lose)
        self._times = times
        self._delay = dict(delay or {})
        self._lost: collections.Counter[tuple[str, int]] = collections.Counter()
        self._lock = threading.Lock()  # guards _lost

    def install(self, client: CallClient) -> None:
        """Let all calls of ``agent`` from now on go through here."""
        thread_pool, runtime = client.worker.thread_pool, client.worker.runtime

        def let_out(pending: Pending, send: Callable[[], None]) -> None:
            kinds = self._kinds_of(pending)
            if not self._lose.isdisjoint(kinds) and self._is_due(pending):
                raise ChannelClosedError(f"a call of kind {' or '.join(kinds)} was lost on purpose")
            late = sum(self._delay.get(kind, 0.0) for kind in kinds)
            if late:
                thread_pool.call_at(runtime.now() + late, lambda: _send_late(send))
            else:
                send()

        client.outlet = let_out

    def _is_due(self, pending: Pending) -> bool:
        key = pending.label, pending.peer.record.id
        with self._lock:
            self._lost[key] += 1
            return self._lost[key] <= self._times


def _send_late(send: Callable[[], None]) -> None:
    try:
        send()
    except ChannelClosedError:  # whoever waits for the reply learns of it otherwise
        return
