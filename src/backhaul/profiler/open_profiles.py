"""The profiles that a worker takes part in: who joined, who is invited, and what was recorded for each.

A profile is identified by one number, its session. It spreads with calls and gradient messages: before a worker sends
the first of them to another worker, it asks that worker to join. Records stay on the worker that made them until the
owner of the profile collects them.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import torch

from backhaul._rpc.cluster.peers import Peer
from backhaul._rpc.node import Node
from backhaul._runtime.observer import Observer, Sessions
from backhaul._transport.base import Channel
from backhaul._worker.deadlines import deadline
from backhaul._worker.worker import current_worker
from backhaul.profiler import kineto
from backhaul.profiler.records import Records, Share, encode
from backhaul.profiler.spans import ops_for_profile, threads_of

log = logging.getLogger("backhaul")

T = TypeVar("T")

unprofiled: contextvars.ContextVar[bool] = contextvars.ContextVar("backhaul_unprofiled", default=False)
"""Whether calls made here belong to no profile, because the profiler itself makes them."""

_MAX_RECORDS = 1_000_000  # of one kind, that a worker keeps for one profile
_JOIN_SECONDS = 30.0  # the time limit for a worker to join: at first it imports much, which is slow on a busy machine


class Settings(msgspec.Struct, array_like=True, frozen=True):
    """What a profile records."""

    ops: bool = True
    shapes: bool = False
    memory: bool = False


class _OpenProfile:
    """One profile on one worker that takes part in it."""

    def __init__(self, owner: int, parent: int, settings: Settings, *, whole: bool) -> None:
        self.owner = owner
        self.parent = parent  # the worker that asked this one to join
        self.whole = whole  # everything that this worker does belongs to the profile
        self.settings = settings
        self.records = Records()
        self.joining = threading.Lock()  # held while this worker asks others to join
        self.joined = {owner: "", parent: ""}  # worker -> "" if it takes part, else why it could not join
        self.note = ""


class OpenProfiles:
    """All profiles that one worker takes part in. Thread-safe.

    While there is at least one, ``observer`` is the observer of the worker.
    """

    def __init__(self, node: Node, observer: Observer) -> None:
        self._worker = node.worker
        self._node = node
        self._observer = observer
        self.id = node.worker.info.id
        self._joining = threading.Lock()  # held until the recording of operations runs
        self._lock = threading.Lock()  # guards _open, own and _threads
        self._open: dict[int, _OpenProfile] = {}
        self._threads: dict[int, str] = {}  # the threads that did something for a profile
        self.own: Sessions = ()  # the profiles to which all belongs that this worker does
        node.worker.attach(self)
        node.peers.on_lost(self._on_lost)
        node.worker.on_close(self._close)
        node.worker.counters["num_profiles"] = lambda: len(self._open)

    def __contains__(self, session: int) -> bool:
        return session in self._open

    # Joining and leaving.

    def join(
        self,
        session: int,
        owner: int,
        parent: int,
        settings: Settings,
        *,
        local_ops: bool = True,
        whole: bool = False,
    ) -> None:
        """Start recording for a profile. ``local_ops=False``: another profiler records the operations here. ``whole``:
        record all that this worker does, as its owner does, and not only what it does for the profile.
        """
        whole = whole or owner == self.id
        made = _OpenProfile(owner, parent, settings, whole=whole)
        with self._joining:
            if session in self._open:
                return
            if settings.ops and local_ops:
                made.note = kineto.process.start((session, self.id), shapes=settings.shapes, memory=settings.memory)
            with self._lock:
                self._open[session] = made
                if whole:
                    self.own = (*self.own, session)
                self._worker.observe(self._observer)

    def leave(self, session: int) -> Share | None:
        """Stop recording and return the records. None if this worker does not take part in the profile."""
        with self._lock:
            threads = self._threads
            left = self._open.pop(session, None)
            self.own = tuple(each for each in self.own if each != session)
            if not self._open:
                self._worker.stop_observing(self._observer)
                self._threads = {}
        if left is None:
            return None
        ops, problem = kineto.process.stop((session, self.id))
        records = left.records
        names = {thread.native_id or 0: thread.name for thread in threading.enumerate()} | threads
        if left.whole:
            others = {number for number, name in names.items() if self._is_of_another(name)}
            ops = [op for op in ops if op.device or op.thread not in others]
        else:
            ops = list(ops_for_profile(ops, records, set(names)))
        return Share(
            self.id,
            self._worker.name,
            socket.gethostname(),
            os.getpid(),
            sorted(left.joined),
            {thread: names[thread] for thread in threads_of(records, ops) if thread in names},
            records,
            ops,
            left.note or problem,
        )

    def _is_of_another(self, thread: str) -> bool:
        """Whether a thread of that name belongs to another worker of this process."""
        return thread.startswith("backhaul-") and not thread.startswith(f"backhaul-{self._worker.name}-")

    def _close(self) -> None:
        for session in list(self._open):
            self.leave(session)

    # Recording.

    def keep(self, sessions: Sessions, kind: str, record: Any) -> None:
        """Add a record to the profiles ``sessions``."""
        for session in sessions:
            found = self._open.get(session)
            if found is not None:
                records = getattr(found.records, kind)
                if len(records) < _MAX_RECORDS:
                    records.append(record)
                else:
                    found.note = f"only the first {_MAX_RECORDS} {kind} were kept"

    def thread(self) -> int:
        """Return the number of the current thread, and remember the thread's name."""
        number = threading.get_native_id()
        if number not in self._threads:
            self._threads[number] = threading.current_thread().name
        return number

    # Other workers.

    def failures(self, session: int) -> dict[int, str]:
        """Return the workers that could not join, and why."""
        found = self._open.get(session)
        return {} if found is None else {worker: why for worker, why in found.joined.items() if why}

    def invite(self, sessions: Sessions, worker: int) -> None:
        """Ask a worker to join these profiles, unless it takes part already. Blocks until it has joined."""
        for session in sessions:
            found = self._open.get(session)
            if found is not None and worker != self.id and worker not in found.joined:
                self._invite(session, found, [worker])

    def invite_connected(self, session: int) -> None:
        """Ask all workers that this one has a channel to, before anything of the profile is sent."""
        peers = [peer.record.id for peer in self._node.peers if peer.channel is not None]
        self._invite(session, self._open[session], [worker for worker in peers if worker != self.id])

    def invite_all(self, session: int) -> None:
        """Ask all members to record everything that they do for the profile."""
        workers = [peer.record.id for peer in self._node.peers if not peer.lost and peer is not self._node.peers.own]
        self._invite(session, self._open[session], workers, whole=True)

    def _invite(self, session: int, found: _OpenProfile, workers: list[int], *, whole: bool = False) -> None:
        arguments = session, found.owner, self.id, found.settings, whole
        for worker in workers:
            if self._node.peers.find(worker).plain:
                found.joined.setdefault(
                    worker, "it cannot join profiles: one of the two workers does not trust the other"
                )
        with found.joining, _unprofiled():
            calls = {
                worker: self._node.client.call_async(worker, join, arguments, None, _JOIN_SECONDS)
                for worker in workers
                if worker not in found.joined
            }
            for worker, call in calls.items():
                try:
                    call.wait()
                    found.joined[worker] = ""
                except Exception as error:  # if the worker is lost, the message that was about to go there will tell
                    found.joined[worker] = f"it did not join: {error}"

    def note_member(self, sessions: Sessions, worker: int) -> None:
        """Remember that a worker takes part: something of these profiles came from there."""
        for session in sessions if worker >= 0 else ():
            found = self._open.get(session)
            if found is not None:
                found.joined.setdefault(worker, "")

    def _on_lost(self, peer: Peer, channel: Channel, reason: str) -> None:
        """Drop profiles whose owner is lost. If the worker that invited this one is lost, tell the owner."""
        lost = peer.record.id
        for session, each in list(self._open.items()):
            if lost == each.owner != self.id:
                self.drop(session)
            elif lost == each.parent != self.id:
                with _unprofiled():
                    reply = self._node.client.call_async(each.owner, adopt, (session, self.id), None, _JOIN_SECONDS)
                reply._when_done(functools.partial(self._on_adopted, session))

    def _on_adopted(self, session: int, reply: Any) -> None:
        with contextlib.suppress(Exception):
            if reply.value():
                return
        self.drop(session)

    def adopt(self, session: int, worker: int) -> bool:
        """On the owner: note a worker that lost the worker which invited it. Returns whether the profile is open."""
        found = self._open.get(session)
        if found is not None:
            found.joined.setdefault(worker, "")
        return found is not None

    def drop(self, session: int) -> None:
        """Forget a profile without an owner, and tell the workers that joined through this one."""
        found = self._open.get(session)
        if found is None or found.owner == self.id:
            return
        self.leave(session)
        for worker in set(found.joined) - {self.id, found.owner, found.parent}:
            with contextlib.suppress(Exception), _unprofiled():
                self._node.client.call_async(worker, drop, (session,), None, _JOIN_SECONDS)


@contextlib.contextmanager
def _unprofiled() -> Iterator[None]:
    """Calls made inside belong to no profile and no context, and do not inherit a deadline."""
    token = unprofiled.set(True)
    try:
        with torch.no_grad(), deadline(None):
            yield
    finally:
        unprofiled.reset(token)


def run_unprofiled(function: Callable[..., T], *args: Any) -> T:
    """Call ``function(*args)``; the calls that it makes belong to no profile."""
    with _unprofiled():
        return function(*args)


# Functions that other workers call.


def join(session: int, owner: int, parent: int, settings: Settings, whole: bool = False) -> None:
    """Join a profile. The caller is about to send a message of the profile here."""
    current_worker().part(OpenProfiles).join(session, owner, parent, settings, whole=whole)


def collect(session: int) -> bytes | None:
    """Leave a profile and return the records, encoded. The owner of the profile calls this."""
    share = current_worker().part(OpenProfiles).leave(session)
    return None if share is None else encode(share)


def adopt(session: int, worker: int) -> bool:
    """See ``OpenProfiles.adopt``."""
    return current_worker().part(OpenProfiles).adopt(session, worker)


def drop(session: int) -> None:
    """Forget a profile. The worker that invited this one calls this when the owner is lost."""
    current_worker().part(OpenProfiles).drop(session)


def clock() -> int:
    """Return the time of this process, in nanoseconds."""
    return time.time_ns()
