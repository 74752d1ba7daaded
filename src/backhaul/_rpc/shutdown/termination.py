"""Detects that all workers are done. Pure logic of a graceful shutdown, as the leader (the first by seniority) sees it.

1. Every worker says READY when its program has called ``shutdown``.
2. When all are ready, the leader asks for a tally of calls sent and served. Each worker answers when it is idle.
3. If two tallies in a row are the same, nothing happened between them, so nothing is under way anywhere: all may exit.
   One tally is not enough: a worker that was idle when asked may since have been called by a worker that was not.

Workers that are lost count as gone, and counting begins again. If only a channel was lost, the leader repeats what is
unanswered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestTallies:
    """Send COUNT to these workers."""

    wave: int
    to: frozenset[int]


@dataclass(frozen=True, slots=True)
class AllowExit:
    """Send LEAVE to these workers: the shutdown is complete."""

    to: frozenset[int]


class TerminationDetector:
    """Events in, instructions out.

    Attributes:
        over: Whether all may exit.
    """

    def __init__(self, members: Iterable[int]) -> None:
        self._members = set(members)
        self._unready = set(self._members)
        self._wave = 0
        self._asked: set[int] = set()  # in the current wave
        self._tallies: dict[int, tuple[int, int]] = {}  # of the current wave: calls sent and served
        self._before: dict[int, tuple[int, int]] = {}  # of the wave before
        self.over = False

    @property
    def waiting_for(self) -> frozenset[int]:
        """The workers that have not done what was last asked of all."""
        return frozenset(self._unready or self._members - self._tallies.keys())

    def ready(self, who: int) -> RequestTallies | AllowExit | None:
        """A worker has called ``shutdown``. If it says so again, it has lost its channel, and perhaps a request."""
        self._unready.discard(who)
        return self._advance() or self.again(who)

    def again(self, who: int) -> RequestTallies | AllowExit | None:
        """What to repeat to a worker after a channel to it was lost. A second answer does no harm: it comes before the
        next wave begins, or is ignored.
        """
        if who not in self._members:
            return None
        if self.over:
            return AllowExit(frozenset({who}))
        return RequestTallies(self._wave, frozenset({who})) if who in self._asked - self._tallies.keys() else None

    def joined(self, who: int) -> None:
        """There is one more worker to wait for. A worker that only came back need not say READY again."""
        if who not in self._members:
            self._members.add(who)
            self._unready.add(who)
            self._before = {}

    def gone(self, who: int) -> RequestTallies | AllowExit | None:
        """A worker is lost."""
        if who not in self._members:
            return None
        self._members.discard(who)
        self._unready.discard(who)
        self._asked.discard(who)
        # It may have sent calls that nobody has counted: two more tallies have to agree.
        self._before = {}
        return self._advance()

    def counted(self, who: int, wave: int, sent: int, served: int) -> RequestTallies | AllowExit | None:
        """A worker has answered. Answers to earlier waves are ignored."""
        if wave != self._wave or who not in self._members:
            return None
        self._tallies[who] = (sent, served)
        return self._advance()

    def _advance(self) -> RequestTallies | AllowExit | None:
        if self.over or self._unready:
            return None
        missing = self._members - self._tallies.keys()
        if missing & self._asked:
            return None
        # A worker that joined during a wave was not asked in it. Then all are asked once more.
        same = (
            not missing and bool(self._before) and all(self._tallies[w] == self._before.get(w) for w in self._members)
        )
        if same or not self._members:
            self.over = True
            return AllowExit(frozenset(self._members))
        self._wave += 1
        self._before, self._tallies = self._tallies, {}
        self._asked = set(self._members)
        return RequestTallies(self._wave, frozenset(self._members))
