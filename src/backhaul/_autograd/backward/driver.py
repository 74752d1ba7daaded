"""A pass at its driver: what is under way, how it ends, and the plan it follows."""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence

from backhaul._autograd.backward.local_pass import LocalPass
from backhaul._autograd.messages import PassSpec, PassTally
from backhaul._autograd.plan.termination import Ledger, Plan
from backhaul._runtime.runtime import Runtime
from backhaul._worker.thread_pool import Task
from backhaul.errors import PeerLostError


class PassDriver:
    """Thread-safe."""

    def __init__(self, spec: PassSpec, run: LocalPass, runtime: Runtime) -> None:
        self.spec = spec
        self.run = run
        self.one_shot = runtime.one_shot()
        self.error: BaseException | None = None
        self.lock = threading.Lock()  # guards ledger, lost and error
        self.ledger = Ledger()
        self.lost: dict[int, tuple[str, str]] = {}  # workers lost since the pass began: name, and why
        self.planning = runtime.lock()  # held while the plan is made
        self.plan: Plan | None = None
        self.attendant = 0  # the thread that reads for the pass while it waits for its end
        self.inbox: collections.deque[Task] = collections.deque()  # what it has to do

    def account(self, tally: PassTally) -> PeerLostError | None:
        """Messages were consumed and produced. Returns an error if a lost worker took part; see ``lose``."""
        with self.lock:
            self.ledger.report(tally.consumed, tally.produced)
            over = self.ledger.over
            for worker in self.lost:  # it was noticed before this report came
                if (missed := self._missed(worker)) is not None:
                    return missed
        if over:
            self.one_shot.open()
        return None

    def lose(self, worker: int, name: str, reason: str, tally: PassTally | None = None) -> PeerLostError | None:
        """A worker is lost. Returns an error if the pass is, too: if gradients went there, as far as is known with
        ``tally``. It may have reported what it had not sent yet, so that it is not enough to look for what is under way
        to it.
        """
        with self.lock:
            if tally is not None:
                self.ledger.report(tally.consumed, tally.produced)
            self.lost[worker] = name, reason
            return self._missed(worker)

    def _missed(self, lost: int) -> PeerLostError | None:
        if self.ledger.over or lost not in self.ledger.workers:
            return None
        messages = tuple(m for m, worker in self.ledger.outstanding.items() if worker == lost)
        return loss_of(self.spec, *self.lost[lost], messages)

    def end(self, error: BaseException) -> None:
        """The pass has failed; the first error counts."""
        with self.lock:
            if self.error is None:
                self.error = error
        self.one_shot.open()


def loss_of(spec: PassSpec, name: str, reason: str, messages: Sequence[int] = ()) -> PeerLostError:
    """The error of a pass that needs a worker which is lost."""
    what = ", ".join(f"message {message}" for message in messages[:4])
    what += f" and {len(messages) - 4} more" if len(messages) > 4 else ""
    where = f", where {what} was due" if what else ""
    return PeerLostError(
        f"lost worker '{name}' in backward pass {spec.number} of context {spec.context}{where}: {reason}",
        worker=name,
        reason=reason,
        context=spec.context,
        pass_number=spec.number,
        messages=tuple(messages),
    )
