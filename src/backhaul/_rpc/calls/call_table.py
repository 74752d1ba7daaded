"""The table of calls that wait for their outcome. Each call ends exactly once: by its reply, by the loss of its
channel, by its deadline, by being cancelled, or by shutdown.

Knows neither how a call is sent nor who waits for it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator

from backhaul._devices import seam
from backhaul._rpc.calls.idleness import Idleness
from backhaul._rpc.calls.pending_call import AsyncCall, Outcome, Pending, SyncCall
from backhaul._rpc.cluster.peers import Peer, Peers
from backhaul._rpc.futures import set_result
from backhaul._rpc.interceptors import Interceptors
from backhaul._rpc.security.frame_checks import ReplyCheck, check_fault
from backhaul._transport.base import Channel, ChannelClosedError
from backhaul._wire.device_link import decline
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Cancel, Kind, Reply, pack, unpack
from backhaul._worker.deadlines import FOREVER
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import Worker
from backhaul.errors import BackhaulError, NotInitializedError

_MAX_CANCELS = 1024  # calls that one message cancels: a worker takes a limited number of values, see MIN_VALUES


# Over the limit because expiry, losses and replies change one table under one lock.
class PendingCalls:
    """The calls under way, by number. Thread-safe: the thread that removes a call gives it its outcome.

    Args:
        worker: The worker that makes the calls.
        peers: The workers that it calls.
        idleness: Counts the worker as busy while calls are pending.
        interceptors: See the replies.
        fail: Ends an asynchronous call with an error.

    Attributes:
        add: ``add(number, call)``. These three are the dict's own methods: they are called for every call.
        find: ``find(number)``; None if it is not there.
        remove: ``remove(number, None)`` returns the call, or None if another thread has removed it.
        expires_at: When deadlines are next looked at.
        inboxes: By id of a thread that waits for futures and reads channels: the completions that it is to run.
    """

    add: Callable[[int, Pending], None]
    find: Callable[[int], Pending | None]
    remove: Callable[[int, None], Pending | None]

    def __init__(
        self,
        worker: Worker,
        peers: Peers,
        idleness: Idleness,
        interceptors: Interceptors,
        fail: Callable[[AsyncCall, Exception], None],
    ) -> None:
        self._worker = worker
        self._peers = peers
        self._idleness = idleness
        self._interceptors = interceptors
        self._fail = fail
        self._calls: dict[int, Pending] = {}
        self._to_complete: dict[int, AsyncCall] = {}  # have an outcome, and a task that has not begun
        self._completing: dict[Pending, Pending] = {}  # have an outcome, but their futures may not be done
        self._lock = threading.Lock()  # guards expires_at
        self.expires_at = FOREVER
        self.inboxes: dict[int, list[Task]] = {}
        self.add, self.find, self.remove = self._calls.__setitem__, self._calls.get, self._calls.pop
        idleness.watch(self._calls)
        idleness.watch(self._completing)
        worker.on_frame(Kind.REPLY, self._on_reply, check=ReplyCheck(worker.options, interceptors))
        worker.on_frame(Kind.FAULT, self._on_reply, check=check_fault)
        peers.on_lost(self._on_lost)

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[Pending]:
        return iter(list(self._calls.values()))

    def workers(self) -> set[int]:
        """The ids of the workers that have calls under way."""
        return {pending.peer.record.id for pending in self}

    # How a call ends.

    def settle(self, pending: Pending, outcome: Outcome) -> Task | None:
        """End a call, unless another thread was faster. Return a task that has to run, if there is one.

        A thread that waits for futures completes those itself whose replies it reads. It must not run callbacks of
        the user's, which may take longer than its wait.
        """
        number = pending.number
        if self._calls.pop(number, None) is None:
            return None
        if isinstance(pending, AsyncCall):
            self._completing[pending] = pending
            self._to_complete[number] = pending
            task = functools.partial(self._worker.context.copy().run, self._complete, pending, outcome)
            if self.inboxes and not pending.future.has_callbacks:
                inbox = self.inboxes.get(threading.get_ident())
                if inbox is not None:
                    inbox.append(task)
                    return None
            return task
        assert isinstance(pending, SyncCall)
        pending.settle(outcome)
        if self._idleness.callbacks:
            self._idleness.check()
        return None

    def _complete(self, pending: AsyncCall, outcome: Outcome) -> None:
        """Complete the future of a call. Runs as a task: callbacks of the future are the user's code."""
        try:
            if self._to_complete.pop(pending.number, None) is None:
                return  # ``abandon`` has completed it
            value = pending.read(outcome, self._worker, self._interceptors)
        except BaseException as error:
            self._fail(pending, error if isinstance(error, Exception) else pending.interrupted(error))
            if not isinstance(error, Exception):
                raise
        else:
            future = pending.future
            future._mark = seam.streams.mark(future._mark)
            set_result(future, value)
        finally:
            self._completing.pop(pending, None)
            if self._idleness.callbacks:
                self._idleness.check()

    def give_up(self, pending: Pending) -> bool:
        """End a call that no thread waits for any more, and tell its worker. False if its outcome is there."""
        if self._calls.pop(pending.number, None) is None:
            return False
        send_cancels([pending])
        self._idleness.check()
        return True

    def _on_reply(self, channel: Channel, frame: Frame) -> Task | None:
        pending = self._calls.get(frame.number)
        if pending is None or pending.channel is not channel:
            self._discard(channel, frame)  # the reply is too late, or answers another worker's call
            return None
        if pending.trace is not None:
            pending.trace.received(frame.nbytes)
        return self.settle(pending, frame)

    def refuse(self, channel: Channel, number: int, error: BackhaulError) -> Task | None:
        """End a call with ``error``: its reply came, but this worker does not take it."""
        pending = self._calls.get(number)
        return self.settle(pending, error) if pending is not None and pending.channel is channel else None

    def _discard(self, channel: Channel, frame: Frame) -> None:
        peer = self._peers.of(channel)
        if frame.kind == Kind.REPLY and peer is not None:
            reply = unpack(frame.body, Reply)
            decline(reply.payload, peer.link.answer(channel))
            self._interceptors.discard(peer, reply.notes)

    def _on_lost(self, peer: Peer, channel: Channel, reason: str) -> None:
        for pending in self:
            if pending.channel is channel:
                task = self.settle(pending, pending.lost(reason))
                if task is not None:
                    self._worker.thread_pool.submit(task)

    # Deadlines of asynchronous calls. The thread that waits for a synchronous call looks at the clock itself.

    def expire_at(self, deadline: float) -> None:
        """End asynchronous calls whose time is over at ``deadline``, if that is sooner than planned."""
        with self._lock:
            sooner = deadline < self.expires_at
            self.expires_at = min(deadline, self.expires_at)
        if sooner:
            self._worker.thread_pool.call_at(deadline, self._expire)

    def _expire(self) -> None:
        """End the asynchronous calls whose time is over, and plan to look again at the next deadline."""
        with self._lock:
            self.expires_at = FOREVER
        now = self._worker.runtime.now()
        soonest = FOREVER
        over = []
        for pending in self:
            if not isinstance(pending, AsyncCall):
                continue
            if pending.deadline <= now:
                task = self.settle(pending, pending.timed_out())
                if task is not None:
                    over.append(pending)
                    self._worker.thread_pool.submit(task)
            else:
                soonest = min(soonest, pending.deadline)
        send_cancels(over)
        if soonest < FOREVER:
            self.expire_at(soonest)

    # Shutdown.

    def close(self) -> None:
        """Fail all calls that are pending."""
        for pending in self:
            text = f"worker '{self._worker.name}' was shut down while its call to {pending.label} was under way"
            task = self.settle(pending, NotInitializedError(text, worker=self._worker.name))
            if task is not None:
                task()

    def abandon(self, error: Callable[[], BaseException]) -> None:
        """Complete the futures that no thread is left to complete."""
        for number in list(self._to_complete):
            pending = self._to_complete.pop(number, None)
            if pending is not None:
                pending.future.set_exception(error())


def send_cancels(calls: Iterable[Pending]) -> None:
    """Tell the workers that were called that no thread waits for these calls any more."""
    by_channel: dict[Channel, list[int]] = {}
    for pending in calls:
        if pending.channel is not None:
            by_channel.setdefault(pending.channel, []).append(pending.number)
    batches = [
        (channel, numbers[start : start + _MAX_CANCELS])
        for channel, numbers in by_channel.items()
        for start in range(0, len(numbers), _MAX_CANCELS)
    ]
    for channel, batch in batches:
        try:
            channel.send(Frame(Kind.CANCEL, 0, pack(Cancel(tuple(batch)))), timeout=0)
        except ChannelClosedError:  # then the other worker ends the calls by itself
            pass
