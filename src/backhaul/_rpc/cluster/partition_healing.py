"""Members that had lost each other, and meet again: they compare whom they know.

Each lets those of whom the other has not heard show themselves to it, and forgets those that have left, which needs no
trust where there is a proof (``departure``). Who is admitted and who is believed is not decided here, see ``peers`` and
``membership``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading

from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.calls.served_call import ServedCall
from backhaul._rpc.cluster.membership import Membership
from backhaul._rpc.cluster.membership_table import Standing, WorkerRecord
from backhaul._rpc.cluster.peers import Peer
from backhaul._rpc.security.policy import internal
from backhaul._rpc.security.rate_limits import over_limits
from backhaul._rpc.shutdown.graceful_shutdown import GracefulShutdown
from backhaul._wire.messages import pack, unpack
from backhaul._worker import deadlines
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import Worker, current_worker
from backhaul.errors import BackhaulError

log = logging.getLogger("backhaul")

_MAX_TASKS = 1024  # that wait
_MAX_SHOWN = 64  # of them, to how many workers one member wants this one to show itself
_TOLD = 3.0  # seconds that the other, and those who are to show themselves to it, have to hear of it


class PartitionHealing:
    """One worker's part in it. Thread-safe."""

    def __init__(
        self, worker: Worker, client: CallClient, graceful_shutdown: GracefulShutdown, membership: Membership
    ) -> None:
        self._worker = worker
        self._agent = client
        self._peers = client.peers
        self._farewell = graceful_shutdown
        self._membership = membership
        self._lock = threading.Lock()  # guards _tasks and _working
        self._tasks: dict[tuple[str, str], Task] = {}  # what is to be done, and about which incarnation
        self._working = False  # one after the other: many may meet again at the same time
        self._peers.regained = self._on_regained
        worker.attach(self)

    def _soon(self, what: str, about: WorkerRecord, task: Task, most: int = _MAX_TASKS) -> None:
        """Do something, unless ``most`` things of that kind wait, or too many of all kinds."""
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
                    log.debug("a member that is there again was not told all: %s", error)
                except Exception:
                    log.exception("a member that is there again was not told all")

    def _next(self) -> Task | None:
        with self._lock:
            self._working = bool(self._tasks) and not self._worker.closed
            return self._tasks.pop(next(iter(self._tasks))) if self._working else None

    def _on_regained(self, peer: Peer) -> None:
        if not self._farewell.started:
            self._soon("compare", peer.record, functools.partial(self._compare, peer))

    def _compare(self, peer: Peer) -> None:
        if peer.channel is None:
            return  # refused, or lost again; to open another would bring us here once more
        told = (pack(self._peers.standing),)
        answer = self._agent.call(peer.info, compare, told, None, _TOLD, mode="internal")
        if isinstance(answer, bytes):
            if error := over_limits(self._worker.name, self._worker.options, answer, f"what '{peer.info.name}' knows"):
                raise error
            self._heed(peer, unpack(answer, Standing))

    def compare(self, caller: Peer, standing: Standing) -> Standing:
        """A member that has found this worker again says whom it knows; returns whom this one does."""
        self._soon("heed", caller.record, functools.partial(self._heed, caller, standing))
        return self._peers.standing

    def _heed(self, caller: Peer, standing: Standing) -> None:
        """Make up for what either of the two has missed, as far as this worker can."""
        self._peers.take_proofs(standing.proven)
        self._forget(caller, set(standing.left))
        proven = (left.incarnation for left in standing.proven)
        self._let_show(caller, {*standing.members, *standing.left, *proven})

    def _forget(self, caller: Peer, left: set[str]) -> None:
        """A member says that these have left, and has no proof."""
        meant = [peer for peer in self._others(caller) if peer.lost and peer.record.incarnation in left]
        if not self._peers.credulous:
            meant = [peer for peer in meant if not peer.record.seal]  # the others could have given a proof
        if meant and self._membership.believes(caller):
            for peer in meant:
                self._peers.dismiss(peer)

    def _let_show(self, to: Peer, known: set[str]) -> None:
        """Let those of whom a member has not heard show themselves to it, and it to them: one of the two may believe us
        where the other does not.
        """
        calls, now = [], self._worker.runtime.now
        deadline = now() + _TOLD
        for peer in self._others(to):
            if peer.record.incarnation in known or peer.lost:
                continue
            for asked, shown in ((peer, to), (to, peer)):
                with contextlib.suppress(BackhaulError):
                    left, told = max(deadline - now(), 0.001), (pack(shown.record),)
                    calls.append(self._agent.call_async(asked.info, show, told, None, left, mode="internal"))
        for call in calls:
            with contextlib.suppress(BackhaulError):
                call.wait()

    def _others(self, caller: Peer) -> list[Peer]:
        return [peer for peer in self._peers if peer is not caller and peer is not self._peers.own]

    def show(self, caller: Peer, record: WorkerRecord) -> None:
        """A member says that the worker of that record has not heard of this one."""
        what = f"show, as {caller.record.incarnation} says"
        self._soon(what, record, functools.partial(self._show, caller, record), _MAX_SHOWN)

    def _show(self, caller: Peer, record: WorkerRecord) -> None:
        found = self._peers.in_life(record.id, record.incarnation)
        if found is None and not self._membership.believes(caller):
            self._peers.approach(record)
            return
        if found is None:
            found = self._peers.learn(record)
        if isinstance(found, Peer) and found.channel is None:
            self._membership.show_to(found, self._peers.patience)


@internal(bytes)
def compare(standing: bytes) -> bytes:
    """Called by a member that has found this worker again."""
    answer, partition_healing = deadlines.current.get(), current_worker().part(PartitionHealing)
    assert isinstance(answer, ServedCall)
    return pack(partition_healing.compare(answer.peer, unpack(standing, Standing)))


@internal(bytes)
def show(record: bytes) -> None:
    """Called by a member: another has not heard of this worker."""
    answer, partition_healing = deadlines.current.get(), current_worker().part(PartitionHealing)
    assert isinstance(answer, ServedCall)
    partition_healing.show(answer.peer, unpack(record, WorkerRecord))
