"""Threads that wait for replies read the channels themselves: that saves a hand-off between threads for each reply.

Knows neither how a call is sent nor what a reply means.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

from backhaul._rpc.calls.call_table import PendingCalls
from backhaul._rpc.calls.cancellation import Cancellation
from backhaul._rpc.calls.idleness import Idleness
from backhaul._rpc.calls.pending_call import Outcome, SyncCall
from backhaul._runtime import interrupts
from backhaul._runtime.runtime import OneShotEvent
from backhaul._transport.base import Lost, Received
from backhaul._wire.messages import Kind
from backhaul._worker.deadlines import FOREVER
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import Worker

_REPLIES = frozenset((int(Kind.REPLY), int(Kind.FAULT)))
_UNDISTURBED_SECONDS = 0.05  # a nested call can be cancelled only after this time: most are over, and waking is slow


class ReplyReader:
    """Waits for the outcome of a synchronous call, or of the calls of futures. Thread-safe."""

    def __init__(self, worker: Worker, pending: PendingCalls, idleness: Idleness, cancellation: Cancellation) -> None:
        self._worker = worker
        self._pending = pending
        self._idleness = idleness
        self.cancel = cancellation.cancel

    def read(self, pending: SyncCall) -> Outcome:
        """Wait for the outcome of a call. Reads the channel until the reply is there, if no other thread reads it."""
        channel, deadline, number, receiver = pending.channel, pending.deadline, pending.number, self._worker.receiver
        assert channel is not None
        try:
            if pending.outcome is not None or not channel.acquire(pending):
                return pending.outcome or self._wait(pending)
            while pending.outcome is None:
                left = None if deadline == FOREVER else deadline - self._worker.runtime.now()
                if pending.scope is not None and (left is None or left > _UNDISTURBED_SECONDS):
                    left = _UNDISTURBED_SECONDS
                event = channel.receive(left)
                if event is None:
                    break
                if type(event) is Received and len(event.frames) == 1 and not receiver.guarded:
                    frame = event.frames[0]
                    if frame.number == number and frame.kind in _REPLIES and self._pending.remove(number, None):
                        channel.release()
                        if pending.trace is not None:
                            pending.trace.received(frame.nbytes)
                        if self._idleness.callbacks:
                            self._idleness.check()
                        return frame
                receiver.take_in(event)
                if isinstance(event, Lost):
                    return pending.outcome or self._wait(pending)  # a task of the loss settles the call
            channel.release()
        except BaseException as error:
            receiver.recover_after_interrupt(error, pending, channel)
            raise
        return pending.outcome or self._wait(pending)

    def _wait(self, pending: SyncCall) -> Outcome:
        """Another thread reads the channel, or the call may be cancelled, or its time is over."""
        deadline, runtime, receiver = pending.deadline, self._worker.runtime, self._worker.receiver
        pending.one_shot = one_shot = runtime.one_shot()
        left = None if deadline == FOREVER else deadline - runtime.now()
        if pending.outcome is None and pending.scope is not None and (left is None or left > 0):
            # The call takes long and may be cancelled: read on in a way that another thread can wake.
            channel = pending.channel
            assert channel is not None
            try:
                if channel.acquire(pending):
                    receiver.attend([channel], one_shot, left, ())
            except BaseException as error:
                receiver.recover_after_interrupt(error, pending, channel)
                raise
            left = None if deadline == FOREVER else deadline - runtime.now()
        if pending.outcome is None:
            self._worker.endpoint.spin_for(one_shot, left)
            left = None if deadline == FOREVER else deadline - runtime.now()
        if pending.outcome is None and not one_shot.wait(left):
            if self._pending.give_up(pending):
                return pending.timed_out()
            one_shot.wait()  # another thread has removed the call and is about to set the outcome
        assert pending.outcome is not None
        return pending.outcome

    def wait(self, numbers: Collection[int], one_shot: OneShotEvent, timeout: float | None) -> bool:
        """Wait until ``one_shot`` opens; False if ``timeout`` seconds passed first. Meanwhile this thread reads the
        channels of the calls ``numbers``, and completes the futures whose replies it reads, unless that may be
        interrupted: then the pool completes them.
        """
        runtime = self._worker.runtime
        deadline = None if timeout is None else runtime.now() + timeout
        calls = [call for call in map(self._pending.find, numbers) if call is not None]
        channels = {call.channel for call in calls if call.channel is not None}
        completes = not interrupts.may_raise_anywhere()
        while not one_shot.opened:
            left = None if deadline is None else deadline - runtime.now()
            inbox: list[Task] = []
            try:
                held = [channel for channel in channels if channel.acquire(inbox)]
                if not held or (left is not None and left <= 0):
                    for channel in held:
                        channel.release()
                    return one_shot.wait(left)
                if completes:
                    self._pending.inboxes[threading.get_ident()] = inbox
                try:
                    self._worker.receiver.attend(held, one_shot, left, inbox)
                finally:
                    self._pending.inboxes.pop(threading.get_ident(), None)
            except BaseException as error:
                self._worker.receiver.recover_after_interrupt(error, inbox, *channels)
                for task in inbox:
                    self._worker.thread_pool.submit(task)
                raise
            self._complete(inbox)
        return True

    def _complete(self, inbox: list[Task]) -> None:
        """Run completions of futures on this thread, each as the pool would."""
        done = 0
        try:
            for task in inbox:
                done += 1
                task()
        except BaseException:  # a signal interrupted this thread
            for task in inbox[done:]:
                self._worker.thread_pool.submit(task)
            raise
