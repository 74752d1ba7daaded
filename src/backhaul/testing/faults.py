"""Injects faults into the calls of a worker: it loses calls, or sends them late."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Collection, Mapping

from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.calls.pending_call import Pending
from backhaul._transport.base import ChannelClosedError


class Faults:
    """The faults of one worker's calls. ``install`` them on the worker's call client.

    Args:
        kinds_of: Returns the kinds of a call. The other arguments refer to these kinds.
        lose: Kinds whose calls are lost.
        times: How many calls are lost, for each function and called worker.
        delay: Seconds by which calls of a kind are sent late. Their timeout runs meanwhile.
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
        """Apply the faults to all calls of ``client`` from now on."""
        thread_pool, runtime = client.worker.thread_pool, client.worker.runtime

        def send_with_faults(pending: Pending, send: Callable[[], None]) -> None:
            kinds = self._kinds_of(pending)
            if not self._lose.isdisjoint(kinds) and self._loses(pending):
                raise ChannelClosedError(f"Faults lost a call of kind {' or '.join(kinds)} on purpose")
            late = sum(self._delay.get(kind, 0.0) for kind in kinds)
            if late:
                thread_pool.call_at(runtime.now() + late, lambda: _send_late(send))
            else:
                send()

        client.outlet = send_with_faults

    def _loses(self, pending: Pending) -> bool:
        key = pending.label, pending.peer.record.id
        with self._lock:
            self._lost[key] += 1
            return self._lost[key] <= self._times


def _send_late(send: Callable[[], None]) -> None:
    try:
        send()
    except ChannelClosedError:  # the loss of the channel ends the call
        return
