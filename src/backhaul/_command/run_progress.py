"""What to do when workers of ``backhaul run`` end, fail or shall end, and which failure was the first. Pure: it gets
events with their times, and returns orders.
"""

from __future__ import annotations

import enum
import re
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

MORE_FAILURES_SECONDS = 0.5
"""After the first failure, before the others are ended: to tell cause from consequence."""

TERMINATE_SECONDS, KILL_SECONDS = 1.2, 0.6
"""After SIGTERM until SIGKILL, and after SIGKILL until hosts that do not answer are given up: together below 2 s."""

_LOST_STATUS = 255  # of a worker whose host was lost; ssh ends with it too
_KEPT_LINES = 400  # of each worker, to show its failure
_SHOWN_LINES = 20  # of a worker that failed without a traceback

_TRACEBACK = re.compile(r"(?:\[rank\d+\]: ?| *\+ Exception Group )?Traceback \(most recent call last\):")
_CHAINS = ("The above exception was the direct cause", "During handling of the above exception")
# A worker that fails with one of these fails because another did.
_CONSEQUENCE = re.compile(r"(?:backhaul\.errors\.)?(?:PeerLostError|WorkersLostError|CallCancelledError)\b")


class Order(enum.Enum):
    """What to do with all workers that are still running."""

    TERMINATE = "terminate"
    KILL = "kill"
    GIVE_UP = "give up"


@dataclass(slots=True)
class WorkerLog:
    """What is known of one worker.

    Attributes:
        name: Its name.
        status: Its exit status, negative for a signal; None while it runs.
        ended_at: When it ended.
        ended_by_us: Whether it ended after it was told to.
        lost: Whether only its host was lost: how the worker ended is unknown.
        failed_at: When its last traceback began; None: there was none.
        lines: Its last lines, those of the standard error marked with True.
    """

    name: str
    status: int | None = None
    ended_at: float = 0.0
    ended_by_us: bool = False
    lost: bool = False
    failed_at: float | None = None
    lines: deque[tuple[bool, str]] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))

    @property
    def failed(self) -> bool:
        """Whether it failed by itself."""
        return bool(self.status) and not self.ended_by_us

    @property
    def failed_slowly(self) -> bool:
        """Whether it was ended after it had printed a traceback: it may have failed, and not come to its end yet."""
        return bool(self.status) and self.ended_by_us and self.failed_at is not None

    @property
    def was_killed(self) -> bool:
        """Whether a signal of somebody else killed it. It could not print why."""
        return self.status is not None and self.status < 0 and not self.ended_by_us

    def failure(self) -> list[str]:
        """The lines that say why it failed: its last traceback with the causes, or else its last lines."""
        errors = [line for is_error, line in self.lines if is_error]
        starts = [n for n, line in enumerate(errors) if _TRACEBACK.match(line)]
        if not starts or self.was_killed or self.lost:
            return [line for _, line in self.lines][-_SHOWN_LINES:]
        first = len(starts) - 1
        while first and any(each.startswith(_CHAINS) for each in errors[starts[first - 1] : starts[first]]):
            first -= 1
        return errors[starts[first] :]

    @property
    def in_chain(self) -> bool:
        """Whether the next traceback belongs to the one before it."""
        return any(is_error and line.startswith(_CHAINS) for is_error, line in list(self.lines)[-4:])

    @property
    def is_consequence(self) -> bool:
        """Whether it failed because another worker was lost."""
        return not self.was_killed and any(map(_CONSEQUENCE.match, self.failure()))

    def describe(self) -> str:
        """How it failed, for people."""
        if self.lost:
            return "was lost, with its host"
        if self.failed_slowly:
            return "raised, and was ended before it came to its end"
        return describe_status(self.status or 0)


class RunProgress:
    """The workers of one run. Used by one thread."""

    def __init__(self, names: Sequence[str]) -> None:
        self.workers = [WorkerLog(name) for name in names]
        self.signal: signal.Signals | None = None
        self.wake_at: float | None = None
        """When ``on_time`` wants to be called; None: not at all."""
        self._next: Order | None = None  # at ``wake_at``
        self._ended_at: float | None = None  # when the workers were told to end

    @property
    def done(self) -> bool:
        """Whether all workers have ended."""
        return all(worker.status is not None for worker in self.workers)

    def on_line(self, rank: int, text: str, *, is_error: bool, now: float) -> None:
        """A worker has printed a line."""
        worker = self.workers[rank]
        if is_error and _TRACEBACK.match(text) and not worker.in_chain:
            worker.failed_at = now
        worker.lines.append((is_error, text))

    def on_end(self, rank: int, status: int, now: float) -> None:
        """A worker has ended. A failure makes the others end, a little later."""
        worker = self.workers[rank]
        if worker.status is not None:
            return
        worker.status, worker.ended_at = status, now
        if self._ended_at is not None:
            killed = status in (-signal.SIGTERM, -signal.SIGKILL)
            worker.ended_by_us = killed or worker.failed_at is None or worker.failed_at > self._ended_at
        elif status and self._next is None:
            self._next, self.wake_at = Order.TERMINATE, now + MORE_FAILURES_SECONDS
        if self.done:
            self._next = self.wake_at = None

    def on_host_lost(self, rank: int, said: Sequence[str], now: float) -> None:
        """The process that runs the host of a worker has ended, or the connection to it. ``said``: its last lines."""
        worker = self.workers[rank]
        if worker.status is None:
            worker.lost = True
            worker.lines.extend((True, line) for line in said)
            self.on_end(rank, _LOST_STATUS, now)

    def on_signal(self, number: signal.Signals, now: float) -> Order | None:
        """The user, or who has started the command, wants it to end. A second signal does not wait."""
        again, self.signal = self.signal is not None, self.signal or number
        if self.done:
            return None
        return self._order(Order.KILL if again else Order.TERMINATE, now)

    def on_enough(self, now: float) -> Order | None:
        """The run has served its purpose. Workers that are still running end, and have not failed."""
        return None if self.done else self._order(Order.TERMINATE, now)

    def on_time(self, now: float) -> Order | None:
        """Time has passed. What to do now, if ``wake_at`` is over."""
        if self.wake_at is None or now < self.wake_at:
            return None
        assert self._next is not None
        return self._order(self._next, now)

    def _order(self, order: Order, now: float) -> Order:
        self._ended_at = now if self._ended_at is None else self._ended_at
        if order is Order.TERMINATE:
            self._next, self.wake_at = Order.KILL, now + TERMINATE_SECONDS
        elif order is Order.KILL:
            self._next, self.wake_at = Order.GIVE_UP, now + KILL_SECONDS
        else:
            self._next = self.wake_at = None
        return order

    def first_failure(self) -> WorkerLog | None:
        """The worker whose failure made the others fail; None: no worker failed by itself.

        A worker that fails may take long to end, while others lose it and end at once. So if all failures are
        consequences, the worker counts that has printed a traceback last before them, and was ended then. Otherwise it
        does not: its traceback may be one that the program has handled and logged.
        """
        failed = sorted((worker for worker in self.workers if worker.failed), key=_failure_time)
        causes = [worker for worker in failed if not worker.is_consequence]
        if causes or not failed:
            return causes[0] if causes else None
        until = _failure_time(failed[0])
        slow = [each for each in self.workers if each.failed_slowly and _failure_time(each) <= until]
        return max((each for each in slow if not each.is_consequence), key=_failure_time, default=failed[0])

    def exit_status(self) -> int:
        """That of the first failure, as shells write it; 0 if there was none."""
        if self.signal is not None:
            return 128 + self.signal
        first = self.first_failure()
        if first is None or first.status is None:
            return 0
        if first.failed_slowly:
            return 1  # as Python ends after a traceback
        return 128 - first.status if first.status < 0 else first.status


def _failure_time(worker: WorkerLog) -> float:
    return worker.ended_at if worker.was_killed or worker.failed_at is None else worker.failed_at


def describe_status(status: int) -> str:
    """An exit status for people.

    Example:
        >>> describe_status(1), describe_status(-9)
        ('ended with exit status 1', 'was killed by SIGKILL')
    """
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
