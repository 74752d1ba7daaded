"""A pass at its driver: what is under way, how it ends, and the plan it follows."""

from __future__ import annotations

import collections
import threading

from backhaul.autograd.messages import PassSpec, Tally
from backhaul.autograd.passes import Ledger, Plan
from backhaul.autograd.runs import Run
from backhaul.crew import Task
from backhaul.runtime import Runtime


class Drive:
    """Thread-safe."""

    def __init__(self, spec: PassSpec, run: Run, runtime: Runtime) -> None:
        self.spec = spec
        self.run = run
        self.gate = runtime.gate()
        self.error: BaseException | None = None
        self.lock = threading.Lock()  # guards ledger, lost and error
        self.ledger = Ledger()
        self.lost: dict[int, str] = {}  # workers lost since the pass began, and why
        self.planning = runtime.lock()  # held while the plan is made
        self.plan: Plan | None = None
        self.attendant = 0  # the thread that reads for the pass while it waits for its end
        self.inbox: collections.deque[Task] = collections.deque()  # what it has to do

    def account(self, tally: Tally) -> int | None:
        """Messages were consumed and produced. Returns a lost worker that has to consume one of them, if any."""
        with self.lock:
            self.ledger.report(tally.consumed, tally.produced)
            over = self.ledger.over
            if self.lost:  # it was noticed before this report came
                for worker in self.ledger.outstanding.values():
                    if worker in self.lost:
                        return worker
        if over:
            self.gate.open()
        return None

    def lose(self, worker: int, reason: str) -> None:
        """A worker is lost."""
        with self.lock:
            self.lost[worker] = reason

    def due_at(self, worker: int) -> list[int]:
        """The messages that are under way there, as far as is known."""
        with self.lock:
            return [message for message, at in self.ledger.outstanding.items() if at == worker]

    def end(self, error: BaseException) -> None:
        """The pass has failed; the first error counts."""
        with self.lock:
            if self.error is None:
                self.error = error
        self.gate.open()
