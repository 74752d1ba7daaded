"""Members that lost each other and meet again compare which workers they know.

Each asks the members unknown to the other to contact it, and removes the workers that have left; a proof makes trust
unnecessary there (``departure``). Who is admitted and who is believed is decided in ``admission`` and ``membership``.
"""

from __future__ import annotations

import functools
import logging
import threading

from backhaul._rpc.cluster.admission import Admission
from backhaul._rpc.cluster.internal_calls import InternalCalls, caller
from backhaul._rpc.cluster.membership import Membership
from backhaul._rpc.cluster.membership_table import Standing, WorkerRecord
from backhaul._rpc.cluster.peers import Peer, Peers
from backhaul._rpc.security.policy import internal
from backhaul._rpc.security.rate_limits import over_limits
from backhaul._wire.messages import pack, unpack
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import Worker, current_worker
from backhaul.errors import BackhaulError

log = logging.getLogger("backhaul")

_MAX_TASKS = 1024  # that wait
_MAX_CONTACTS = 64  # workers that one member may ask this worker to contact, of the tasks that wait
_CALL_SECONDS = 3.0  # for a member to compare, and for others to hear that they are to contact a member


class PartitionHealing:
    """One worker's part in it. Thread-safe."""

    def __init__(
        self, worker: Worker, peers: Peers, admission: Admission, membership: Membership, calls: InternalCalls
    ) -> None:
        self._worker = worker
        self._peers = peers
        self._admission = admission
        self._membership = membership
        self._calls = calls
        self._lock = threading.Lock()  # guards _tasks and _working
        self._tasks: dict[tuple[str, str], Task] = {}  # by what to do, and about which incarnation
        self._working = False  # tasks run one after the other: many members may be regained at the same time
        peers.on_regained(self.compare_with)
        worker.attach(self)

    # Tasks.

    def _submit(self, what: str, about: WorkerRecord, task: Task, most: int = _MAX_TASKS) -> None:
        """Run a task later, unless ``most`` tasks of that kind wait, or too many of all kinds."""
        with self._lock:
            if len(self._tasks) < _MAX_TASKS and sum(kind == what for kind, _ in self._tasks) < most:
                self._tasks[what, about.incarnation] = task
            start, self._working = not self._working, True
        if start:
            self._worker.thread_pool.submit(self._work)

    def _work(self) -> None:
        with self._worker.thread_pool.blocking():
            while (task := self._next()) is not None:
                try:
                    self._worker.run(task)
                except BackhaulError as error:
                    log.debug("cannot reconcile with a member that was lost: %s", error)
                except Exception:
                    log.exception("cannot reconcile with a member that was lost")

    def _next(self) -> Task | None:
        with self._lock:
            self._working = bool(self._tasks) and not self._worker.closed
            return self._tasks.pop(next(iter(self._tasks))) if self._working else None

    # Comparing.

    def compare_with(self, peer: Peer) -> None:
        """A member that was lost can be reached again: compare with it, soon."""
        if not self._peers.ending:
            self._submit("compare", peer.record, functools.partial(self._compare, peer))

    def _compare(self, peer: Peer) -> None:
        if peer.channel is None:
            return  # it refused, or is lost again; opening another channel would only lead here once more
        answer = self._calls.call(peer, compare, (pack(self._peers.standing),), _CALL_SECONDS)
        if isinstance(answer, bytes):
            what = f"the list of workers that '{peer.info.name}' knows"
            if error := over_limits(self._worker.name, self._worker.options, answer, what):
                raise error
            self._reconcile(peer, unpack(answer, Standing))

    def compare(self, caller: Peer, standing: Standing) -> Standing:
        """A member that has found this worker again says which workers it knows. Returns which ones this worker
        knows.
        """
        self._submit("reconcile", caller.record, functools.partial(self._reconcile, caller, standing))
        return self._peers.standing

    def _reconcile(self, caller: Peer, standing: Standing) -> None:
        """Make up for what either of the two missed, as far as this worker can."""
        self._peers.take_proofs(standing.proven)
        self._forget(caller, set(standing.left))
        proven = (left.incarnation for left in standing.proven)
        self._bring_together(caller, {*standing.members, *standing.left, *proven})

    def _forget(self, caller: Peer, left: set[str]) -> None:
        """A member says, without a proof, that these workers have left."""
        meant = [peer for peer in self._others(caller) if peer.lost and peer.record.incarnation in left]
        if not self._admission.trusts_any_member:
            meant = [peer for peer in meant if not peer.record.seal]  # a worker with a seal would have given a proof
        if meant and self._membership.believes(caller):
            for peer in meant:
                self._peers.dismiss(peer)

    def _bring_together(self, member: Peer, known: set[str]) -> None:
        """Ask the members unknown to ``member`` to contact it, and ask it to contact them: one of the two may believe
        this worker where the other does not.
        """
        asked = (
            call
            for peer in self._others(member)
            if peer.record.incarnation not in known and not peer.lost
            for call in ((peer, (pack(member.record),)), (member, (pack(peer.record),)))
        )
        self._calls.call_each(asked, contact, self._worker.runtime.now() + _CALL_SECONDS)

    def _others(self, caller: Peer) -> list[Peer]:
        return [peer for peer in self._peers if peer is not caller and peer is not self._peers.own]

    # Contacting.

    def contact(self, caller: Peer, record: WorkerRecord) -> None:
        """A member says that the worker with that record does not know this one: contact it, soon."""
        what = f"contact for {caller.record.incarnation}"
        self._submit(what, record, functools.partial(self._contact, caller, record), _MAX_CONTACTS)

    def _contact(self, caller: Peer, record: WorkerRecord) -> None:
        found = self._peers.in_life(record.id, record.incarnation)
        if found is None and not self._membership.believes(caller):
            self._admission.approach(record)
            return
        if found is None:
            found = self._admission.learn(record)
        if isinstance(found, Peer) and found.channel is None:
            self._membership.introduce_to(found, self._peers.connections.answer_seconds)


@internal(bytes)
def compare(standing: bytes) -> bytes:
    """Called by a member that has found this worker again."""
    member, healing = caller(), current_worker().part(PartitionHealing)
    assert member is not None
    return pack(healing.compare(member, unpack(standing, Standing)))


@internal(bytes)
def contact(record: bytes) -> None:
    """Called by a member: the worker with this record does not know this worker."""
    member, healing = caller(), current_worker().part(PartitionHealing)
    assert member is not None
    healing.contact(member, unpack(record, WorkerRecord))
