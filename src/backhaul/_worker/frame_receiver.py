"""Receives frames and losses of channels for one worker, and hands each to the part that registered for it.

Frames are read by the threads of the pool, or by a thread that waits for something and reads the channels itself
(``attend``). Knows what a frame's kind is, and nothing of what is inside.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from backhaul._runtime import interrupts
from backhaul._runtime.runtime import OneShotEvent, Runtime
from backhaul._transport.base import Channel, Endpoint, Event, Lost
from backhaul._transport.waiter import ChannelWaiter
from backhaul._wire.frames import Frame
from backhaul._wire.messages import MALFORMED
from backhaul._worker.listeners import Listeners
from backhaul._worker.thread_pool import Task
from backhaul.errors import ProtocolError

if TYPE_CHECKING:
    from backhaul._worker.worker import Worker

log = logging.getLogger("backhaul")

FrameHandler = Callable[[Channel, Frame], Task | None]
"""Acts on a frame while its channel is held: short, never blocks. May return a task, which runs later."""

FrameCheck = Callable[["Worker", Any, Frame], bool]
"""Checks a frame that a peer sent which this worker does not trust. Gets the worker, RPC's record of the peer, and the
frame. Returns False to ignore the frame; raises ``ProtocolError`` to close its channel, or ``LimitError`` to refuse it.
"""

FrameGuard = Callable[[FrameHandler, FrameCheck | None, Channel, Frame], Task | None]
"""Decides about one frame: calls the handler, or does not. Gets what was registered for the frame's kind."""


def fields_only(worker: Worker, peer: Any, frame: Frame) -> bool:
    """The check of a message that holds only fields of fixed types: decoding checks these already."""
    return True


def before_hello(worker: Worker, peer: Any, frame: Frame) -> bool:
    """The check of a frame with which a peer says who it is: the only frames that may come before that is known."""
    return peer is None


def checked_by_handler(worker: Worker, peer: Any, frame: Frame) -> bool:
    """The check of a frame whose handler checks it before it does anything else."""
    return True


class FrameReceiver:
    """Routes each frame by its kind. Thread-safe; handlers are registered before the worker starts.

    Attributes:
        guarded: Whether every frame goes through a guard. Then no thread may act on a frame except through ``route``
            and ``accept``.
        on_gone: Hears of each channel that is gone, at once, before tasks that came through it and wait have begun.
            Must not block. Returns a task to run later, or None.
        on_lost: Hears of each channel that is gone, and why, in a task. May block.
    """

    def __init__(self, endpoint: Endpoint, runtime: Runtime) -> None:
        self._endpoint = endpoint
        self._runtime = runtime
        self._handlers: dict[int, FrameHandler] = {}
        self._checks: dict[int, FrameCheck | None] = {}
        self._submit: Callable[[Task], None]
        self.guarded = False
        self.on_gone: Listeners[[Channel], Task | None] = Listeners()
        self.on_lost: Listeners[[Channel, str], None] = Listeners()
        self._ended = False
        self._waiters: list[ChannelWaiter] = []  # not in use; ``attend`` takes one and puts it back

    def submit_to(self, submit: Callable[[Task], None]) -> None:
        """Set where ``take_in`` leaves tasks. Called once, by the worker."""
        self._submit = submit

    # Which part handles which frame.

    def register(self, kind: int, handler: FrameHandler, *, check: FrameCheck | None) -> None:
        """Route frames of ``kind`` to ``handler``.

        Args:
            kind: The kind of frame.
            handler: Acts on the frame.
            check: What a frame must pass if the peer is not trusted; None: such a peer must not send this kind.
        """
        if self.guarded:
            raise RuntimeError(
                f"the guard is set already: register the handler of kind {kind} before the worker starts"
            )
        self._handlers[kind] = handler
        self._checks[kind] = check

    def guard(self, guard: FrameGuard) -> None:
        """Let ``guard`` decide about each frame, from now on. Called once, after all handlers are registered."""
        self._handlers = {
            kind: functools.partial(guard, handler, self._checks[kind]) for kind, handler in self._handlers.items()
        }
        self.guarded = True

    # Frames and losses, as the threads of the pool read them.

    def deliver(self, event: Event) -> list[Task]:
        """Act on an event that a thread of the pool has polled; return the tasks that follow."""
        if isinstance(event, Lost):
            return self.accept(event)
        tasks: list[Task] = []
        try:
            tasks = self.accept(event)
            return tasks
        finally:
            if len(tasks) > 1:  # the calling thread runs them first; see ``ThreadPool``
                event.channel.park()
            else:
                event.channel.release()

    def accept(self, event: Event) -> list[Task]:
        """Act on an event while its channel is held; return the tasks that follow."""
        if isinstance(event, Lost):
            self.forget_waiters()  # they refer to channels, and these to the calls that read them last
            later = self.on_gone.notify(event.channel)
            return [functools.partial(self._tell_lost, event), *(task for task in later if task is not None)]
        channel, frames, tasks = event.channel, event.frames, []
        for frame in frames:
            try:  # repeats ``route``, without a call: most frames come through here
                task = self._handlers.get(frame.kind, _refuse)(channel, frame)
            except Exception as error:
                _close_after(channel, error)
            else:
                if task is not None:
                    tasks.append(task)
        return tasks

    def _tell_lost(self, event: Lost) -> None:
        self.on_lost.notify(event.channel, event.reason)

    def route(self, channel: Channel, frame: Frame) -> Task | None:
        """Hand one frame to its handler; close the channel if there is none, or if the frame is wrong."""
        try:
            return self._handlers.get(frame.kind, _refuse)(channel, frame)
        except Exception as error:
            _close_after(channel, error)
            return None

    # Threads that wait for something, and read channels themselves meanwhile.

    def take_in(self, event: Event) -> None:
        """Act on an event that a waiting thread has read. The pool runs the tasks that follow."""
        try:
            for task in self.accept(event):
                self._submit(task)
        except BaseException:  # a signal interrupted this thread; all parts still have to hear of a loss
            if isinstance(event, Lost):
                self.see_to(event)
            raise  # the holder of the channel calls ``recover_after_interrupt``

    def see_to(self, loss: Lost) -> None:
        """Act on a loss and return when all parts have heard of it. Parts that have heard of it already ignore it."""
        for task in self.accept(loss):
            task()

    def attend(
        self, channels: Collection[Channel], one_shot: OneShotEvent, timeout: float | None, inbox: Collection[Task]
    ) -> bool:
        """Read channels that the calling thread holds until ``one_shot`` opens or ``inbox`` has a task. Return False if
        the time is over before.

        Releases the channels. If this is interrupted, the caller has to call ``recover_after_interrupt``.
        """
        held = list(channels)
        deadline = None if timeout is None else self._runtime.now() + timeout
        try:
            waiter = self._waiters.pop()
        except IndexError:
            waiter = self._endpoint.make_waiter()
        in_time = True
        try:
            waiter.claim()
            one_shot.on_open = waiter.wake
            while not one_shot.opened and not inbox:
                left = None if deadline is None else deadline - self._runtime.now()
                if left is not None and left <= 0:
                    in_time = False
                    break
                for channel in waiter.wait(held, left, spin=self._endpoint.quiet):
                    event = channel.take()
                    if event is None:
                        continue
                    self.take_in(event)
                    if isinstance(event, Lost):
                        held.remove(channel)
                        waiter.register(held)
            for channel in held:
                channel.release()
        except BaseException:  # a signal interrupted this thread; the waiter's state is not known
            one_shot.on_open = None
            waiter.close()
            raise
        one_shot.on_open = None
        self._waiters.append(waiter)
        if self._ended:
            self.forget_waiters()  # ``close`` may have come before the waiter was put back
        return in_time

    def recover_after_interrupt(self, error: BaseException, holder: object, *channels: Channel) -> None:
        """Put channels in order after ``error`` interrupted a thread that read them, or was about to.

        See ``Channel.recover_after_interrupt``. A loss that follows is acted on before this returns: what the program
        does next must not be taken for a part of it.
        """
        for channel in channels:
            loss = channel.recover_after_interrupt(holder, whole=interrupts.in_wait(error))
            if loss is not None:
                self.see_to(loss)

    def forget_waiters(self) -> None:
        """Free what ``attend`` has kept for its next use, which makes it anew."""
        while self._waiters:
            with contextlib.suppress(IndexError):  # another thread took it
                self._waiters.pop().close()

    def close(self) -> None:
        """Keep nothing from now on. Threads may still be in ``attend``."""
        self._ended = True
        self.forget_waiters()


def _refuse(channel: Channel, frame: Frame) -> Task | None:
    raise ProtocolError(f"no part of this worker takes frames of kind {frame.kind}")


def _close_after(channel: Channel, error: Exception) -> None:
    """Close a channel after a handler raised. The frames that came with the bad one are still handled."""
    if isinstance(error, (ProtocolError, *MALFORMED)):
        log.warning("closing the channel to %s: %s", channel.peer, error, extra={"peer": channel.peer})
    else:
        text, fields = "closing the channel to %s: a handler of its frames failed", {"peer": channel.peer}
        log.error(text, channel.peer, exc_info=error, extra=fields)
    channel.close()
