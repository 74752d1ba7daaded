"""The account of a pass at its driver: the ledger, the workers that are lost, and how the pass ends."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from backhaul._autograd.backward import pass_errors
from backhaul._autograd.messages import PassSpec, PassTally
from backhaul._autograd.plan.termination import Ledger
from backhaul._runtime.runtime import Runtime
from backhaul.errors import PeerLostError


class PassLedger:
    """Thread-safe. It does not refer to the ``LocalPass``, which refers to it.

    Attributes:
        over: Opens when the ledger balances, or when the pass has failed.
        error: Why the pass has failed.
    """

    def __init__(self, spec: PassSpec, runtime: Runtime) -> None:
        self.over = runtime.one_shot()
        self.error: BaseException | None = None
        self._spec = spec
        self._lock = threading.Lock()  # guards error, _ledger and _lost
        self._ledger = Ledger()
        self._lost: dict[int, tuple[str, str]] = {}  # workers lost since the pass began: name, and why

    def account(self, consumed: Iterable[int], produced: Mapping[int, int]) -> PeerLostError | None:
        """Messages were consumed and produced. Ends the pass if a lost worker took part, and returns that error."""
        with self._lock:
            balanced = self._ledger.report(consumed, produced)
            loss = self._loss() if self._lost else None  # a worker may be lost before a report says that it took part
        if loss is not None:
            self.end(loss)
        elif balanced:
            self.over.open()
        return loss

    def lose(self, worker: int, name: str, reason: str, tally: PassTally | None = None) -> PeerLostError | None:
        """A worker is lost. Ends the pass if gradients went to that worker, and returns that error.

        ``tally`` is what is known besides. A worker may have reported messages that it had not sent yet, so it is not
        enough to look for messages that are under way to the lost worker.
        """
        with self._lock:
            if tally is not None:
                self._ledger.report(tally.consumed, tally.produced)
            self._lost[worker] = name, reason
            loss = self._missed(worker)
        if loss is not None:
            self.end(loss)
        return loss

    def _loss(self) -> PeerLostError | None:
        for worker in self._lost:
            if (missed := self._missed(worker)) is not None:
                return missed
        return None

    def _missed(self, lost: int) -> PeerLostError | None:
        if self._ledger.over or lost not in self._ledger.workers:
            return None
        messages = tuple(m for m, worker in self._ledger.outstanding.items() if worker == lost)
        return pass_errors.peer_lost(self._spec, *self._lost[lost], messages)

    def note(self, tally: PassTally) -> None:
        """As ``account``, for a pass that is too late: it does not end any more."""
        with self._lock:
            self._ledger.report(tally.consumed, tally.produced)

    def end(self, error: BaseException) -> None:
        """The pass has failed; the first error counts."""
        with self._lock:
            if self.error is None:
                self.error = error
        self.over.open()

    @property
    def outstanding(self) -> dict[int, int]:
        """Messages under way, with the worker that each went to."""
        with self._lock:
            return self._ledger.outstanding

    @property
    def workers(self) -> set[int]:
        """All workers that gradients went to, as far as reports say."""
        with self._lock:
            return self._ledger.workers
