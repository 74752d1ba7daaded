"""What every worker does in a context with replay when the worker that made the context asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backhaul._autograd.container import Container
from backhaul._autograd.failure.member_calls import PROBE_SECONDS, MemberCalls
from backhaul._autograd.failure.replay import Place
from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.calls.pending_call import SyncCall
from backhaul._worker.worker import Worker, current_worker
from backhaul.errors import ContextError, PeerLostError

if TYPE_CHECKING:
    from backhaul._autograd.backward.local_pass import LocalPass

Requests = list[tuple[Place, str, str | None]]
"""Requests to one worker: place, incarnation that answered, and why it cannot be sent again (None: it can)."""

_IDLE_POLL_SECONDS = 0.001  # between two looks at a pass that is about to end


class ReplayMember:
    """One worker's part in the recovery of contexts. Attached to the worker. Thread-safe."""

    def __init__(self, worker: Worker, client: CallClient, container: Container, calls: MemberCalls) -> None:
        self._worker = worker
        self._client = client
        self._container = container
        self._calls = calls
        worker.attach(self)

    def requests_to(self, context: int, lost: int) -> tuple[set[int], Requests]:
        """The workers known here in a context, and the requests of this worker that ``lost`` has answered."""
        found = self._container.find(context)
        if found is None or found.replay is None:
            return set(), []
        entries = found.replay.answered(lost)
        with found.lock:
            return set(found.known), [(entry.place, entry.incarnation, entry.obstacle) for entry in entries]

    def targets(self, context: int) -> tuple[set[int], dict[int, str]]:
        """The workers known here in a context, and by which incarnations the requests of this worker were answered."""
        found = self._container.find(context)
        if found is None or found.replay is None:
            return set(), {}
        targets = {entry.to: entry.incarnation for entry in found.replay.answered()}
        with found.lock:
            return set(found.known), targets

    def forget_below(self, context: int, places: list[Place]) -> None:
        """See ``ReplayLog.forget_below``."""
        found = self._container.find(context)
        if found is not None and found.replay is not None:
            found.replay.forget_below(places)

    def repeat(self, context: int, place: Place, to: int, incarnation: str) -> None:
        """Send a request that a lost worker had answered again, to the worker that took its place."""
        log = (found := self._container.get(context)).replay
        entry = log.find(place, to) if log is not None else None
        if entry is None:
            raise ContextError(f"the request at place {place} of context {context} was not kept", context=context)
        peer = self._calls.await_member(found, to, PROBE_SECONDS)
        if peer.record.incarnation != incarnation:
            name = peer.info.name
            raise PeerLostError(f"lost worker '{name}' while its share of context {context} was rebuilt", worker=name)
        self._client.repeat(SyncCall(peer, entry.timeout, entry.label), entry.again())
        entry.incarnation = peer.record.incarnation
        entry.context.renew(entry.message, entry.reply)

    def undo(self, context: int, driver: int, number: int) -> tuple[set[int], None]:
        """End a pass that has failed, and restore the gradients from before the first pass. Returns the workers known
        here in the context.
        """
        found = self._container.find(context)
        log = found.replay if found is not None else None
        if found is None or log is None:
            return set(), None
        with found.lock:
            run = found.runs.get((driver, number))
            if run is None:
                found.aborted.add((driver, number))  # no gradient of the pass has come yet; later ones are dropped
            else:
                run.failed = run.aborted = True
            known = set(found.known)
        if run is not None:
            self.await_idle(run)
        log.undo_passes(found)
        return known, None

    def await_idle(self, run: LocalPass) -> None:
        """Wait until no task of a failed pass runs here: such a task would still add to gradients."""
        with self._worker.blocking():
            while run.busy:
                self._worker.runtime.one_shot().wait(_IDLE_POLL_SECONDS)


# Functions that the maker of a context calls on other workers.


def _member() -> ReplayMember:
    return current_worker().part(ReplayMember)


def requests_to(context: int, lost: int) -> tuple[set[int], Requests]:
    """See ``ReplayMember.requests_to``."""
    return _member().requests_to(context, lost)


def targets(context: int) -> tuple[set[int], dict[int, str]]:
    """See ``ReplayMember.targets``."""
    return _member().targets(context)


def forget_below(context: int, places: list[Place]) -> None:
    """See ``ReplayLog.forget_below``."""
    _member().forget_below(context, places)


def repeat(context: int, place: Place, to: int, incarnation: str) -> None:
    """See ``ReplayMember.repeat``."""
    _member().repeat(context, place, to, incarnation)


def undo(context: int, driver: int, number: int) -> tuple[set[int], None]:
    """See ``ReplayMember.undo``."""
    return _member().undo(context, driver, number)
