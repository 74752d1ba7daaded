"""Spins of threads that wait for another thread of their worker, and which threads may spin beside others.

See [Note: spinning] in ``spin_wait``.
"""

from __future__ import annotations

import threading

from backhaul._native import core
from backhaul._transport.spin_wait import ANY_NUMBER, Busyness, Signal, SpinLimit

_MAX_SPINNERS = 3  # threads of an endpoint that spin without the interpreter


class SignalWait:
    """Decides whether threads spin that wait for another thread. Threads may race here: a race does no harm."""

    def __init__(self, limit: SpinLimit) -> None:
        self._limit = limit
        self._soon_share = 1.0  # share of the recent waits that a long spin would have seen the end of

    def spin(self, process: Busyness, signal: Signal[int], most: float | None) -> None:
        """Spin until ``signal``, which was 0 at first, has changed, or it takes too long. Does nothing where no spin is
        worthwhile.

        Args:
            process: The endpoint.
            signal: Changed by the thread that is waited for.
            most: The longest time that the thread wants to wait; None: any time.
        """
        limit = self._limit
        if not limit.allows_company or len(process.spinners) >= _MAX_SPINNERS:
            return
        if self._soon_share < 0.25:
            self._soon_share += 0.01  # tries again after a while
            return
        seconds, me = limit.seconds(), threading.get_ident()
        if seconds > 0.0:
            process.spinners[me] = me
            try:
                core.spin((), signal, 0, ANY_NUMBER, seconds if most is None else min(seconds, most))
            finally:
                del process.spinners[me]
            self._soon_share += ((signal[0] != 0) - self._soon_share) / 8


def may_spin_idly(process: Busyness) -> bool:
    """Whether a thread may spin that waits for whatever comes. Where handlers wait, it takes the next request."""
    return not process.spinners or (process.blocked > 0 and len(process.spinners) < _MAX_SPINNERS)
