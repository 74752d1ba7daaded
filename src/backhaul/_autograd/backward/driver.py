"""The driver's side of a pass: run ready groups and send their gradients until the ledger balances."""

from __future__ import annotations

import contextlib
import threading

from backhaul._autograd.backward import pass_errors
from backhaul._autograd.backward.local_pass import LocalPass
from backhaul._autograd.backward.messenger import PassMessenger
from backhaul._autograd.backward.pass_ledger import PassLedger
from backhaul._autograd.backward.receiver import told_by
from backhaul._autograd.forward.functions import Grads
from backhaul._autograd.ids import ROOTS
from backhaul._autograd.messages import PassTally
from backhaul._autograd.plan.plan import Plan
from backhaul._devices import seam
from backhaul._rpc.calls.client import CallClient
from backhaul._runtime.runtime import Lock
from backhaul._worker import deadlines
from backhaul._worker.deadlines import FOREVER
from backhaul._worker.worker import Worker
from backhaul.errors import BackwardTimeoutError, PeerLostError

_ASK_SECONDS = 1.0  # how long to wait for a worker's tally of a pass that has timed out
_NOT_WOKEN = contextlib.nullcontext()


class PassDriver:
    """Runs one pass on the thread that called ``backward``. Other threads report to it.

    Attributes:
        spec: The pass.
        share: The driver's own share of it.
        ledger: The messages under way, and how the pass ends.
        plan: The plan; None until a worker asks for orders.
    """

    _planning: Lock | None = None

    def __init__(
        self, worker: Worker, client: CallClient, messenger: PassMessenger, share: LocalPass, ledger: PassLedger
    ) -> None:
        self.spec = share.spec
        self.share = share
        self.ledger = ledger
        self.plan: Plan | None = None
        self._worker = worker
        self._client = client
        self._messenger = messenger

    def run(self, seeds: Grads, timeout: float) -> None:
        """Run the pass on all workers. Return when it is over; raise if it failed."""
        observer = self._worker.observer
        if observer is None:
            self.share.start(seeds)
            self._run_until_balanced(timeout)
            return
        with observer.drive(self.spec.profiles, self.spec.context, self.spec.number):
            with self.share.observed(ROOTS):
                self.share.start(seeds)
            self._run_until_balanced(timeout)

    def _run_until_balanced(self, timeout: float) -> None:
        """Run ready groups and send what they produce, until the ledger balances or the pass fails."""
        scope, share, over, cut_by = deadlines.current.get(), self.share, self.ledger.over, None
        if scope is not None and scope.until < (FOREVER if share.deadline is None else share.deadline):
            share.deadline, cut_by = scope.until, scope.label
        if not over.opened:
            with self._worker.blocking(), _NOT_WOKEN if scope is None else scope.waking(over.open):
                while not over.opened and self._await_gradients():
                    while share.inbox:
                        share.inbox.popleft()()
            if scope is not None and scope.root.cancelled:
                raise scope.cancelled_error(f"backward of context {self.spec.context} was not done")
            if not over.opened:
                raise self._too_late(timeout, cut_by)
        seam.streams.arrive()
        if self.ledger.error is not None:
            raise self.ledger.error
        share.finish()

    def _await_gradients(self) -> bool:
        """Wait until gradients of the pass are in the inbox, or the pass is over. False if the deadline comes first.

        This thread reads the channels to the workers that gradients went to, and handles gradients of the pass that
        arrive there. That saves hand-offs between threads.
        """
        share, over = self.share, self.ledger.over
        left = None if share.deadline is None else share.deadline - self._worker.runtime.now()
        peers = [peer for to in list(share.sent_to) if (peer := self._client.peers.with_id(to)) is not None]
        channels = dict.fromkeys(channel for peer in peers for channel in peer.channels)
        try:
            held = [channel for channel in channels if channel.acquire(self)]
            if not held:
                return over.wait(left)
            share.attendant = threading.get_ident()
            in_time = self._worker.receiver.attend(held, over, left, share.inbox)
            share.attendant = 0
        except BaseException as error:
            share.attendant = 0
            self._worker.receiver.recover_after_interrupt(error, self, *channels)
            raise
        return in_time or bool(share.inbox)

    def _too_late(self, timeout: float, cut_by: str | None) -> BackwardTimeoutError:
        self._ask_around()
        waiting = {m: self._messenger.name_of(worker) for m, worker in self.ledger.outstanding.items()}
        return pass_errors.too_late(self.spec, self._worker.name, timeout, cut_by, waiting)

    def _ask_around(self) -> None:
        """Ask workers for their tallies, to find out where the pass is stuck. Tallies travel with gradients, so the
        driver may not have them yet.
        """
        asked = {self._worker.info.id, -1}
        while ahead := set(self.ledger.outstanding.values()) - asked:
            for worker in ahead:
                asked.add(worker)
                with contextlib.suppress(Exception):  # this worker may be the one that hangs
                    self.ledger.note(self._messenger.call(worker, told_by, self.spec, timeout=_ASK_SECONDS))

    def abort(self) -> None:
        """Stop the pass on this worker and on every worker that got gradients."""
        self.share.abandon()
        self._messenger.abort(self.spec, self.ledger.workers | self.share.sent_to)

    def lose(self, worker: int, name: str, reason: str, tally: PassTally | None = None) -> None:
        """A worker is lost: the pass fails if that worker took part. ``tally``: what another worker sent to it."""
        self.ledger.lose(worker, name, reason, self.share.told(worker) if tally is None else tally)

    # For the planner.

    @property
    def planning(self) -> Lock:
        """Held while the plan is made."""
        with self.share.context.lock:
            if self._planning is None:
                self._planning = self._worker.runtime.lock()
            return self._planning

    def loss_of(self, worker: int, reason: str) -> PeerLostError:
        """The error of a pass that needs a lost worker."""
        return pass_errors.peer_lost(self.spec, self._messenger.name_of(worker), reason)
