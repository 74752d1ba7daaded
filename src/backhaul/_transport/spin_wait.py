"""Spin before sleeping: the one loop that polls for a message without giving up the processor.

[Note: spinning] A processor that goes to sleep takes tens of microseconds to wake up, and is slow for a while after.
A thread that waits for a message therefore polls before it sleeps, if recent messages came soon. A *brief* spin takes
some hundred polls. A *long* spin takes milliseconds and needs processors that are free: in a program that computes
between calls, the next message comes after the time that the computation takes.

A spin costs others as little as possible. After each poll the thread offers the processor to others. It stops when
another thread of the process wants the interpreter: the system then says that this thread has slept, which it does only
to wait for the interpreter. A long spin also stops when other threads have had the processor. If that happens often,
the thread does not spin for a number of waits. Only one thread of an endpoint spins at a time.

The native core spins without the interpreter. So a few threads may spin while others run, if processors are free for
long spins: those that wait for a reply; one that takes requests while handlers wait; one that waits for another thread.
They watch a *signal* besides their descriptors, see ``Signal``.

Knows neither channels nor sockets: the caller passes the function that polls, and the descriptors.
"""

from __future__ import annotations

import array
import os
import resource
import threading
import time
from collections.abc import Callable
from typing import Literal, Protocol, TypeVar

from backhaul._native import core
from backhaul._transport.processors import PROCESSORS, Processors

T = TypeVar("T")
Signal = array.array
"""One 64-bit number. A thread adds 1 to it to end the spins of threads that watch it."""

BRIEF_SPINS = 300
"""How often to poll in a brief spin. One poll takes about a microsecond."""

BRIEF_SECONDS = 0.002
"""The longest time of a brief spin. It is only reached when others keep the processor."""

LONG_SECONDS = 0.02
"""The longest time of a long spin, unless ``Options.spin`` says another one."""

ANY_NUMBER = 1 << 62
"""More polls than any spin takes."""

offer = os.sched_yield
"""Called between two polls."""

_MIN_PROCESSORS = 4  # on fewer processors, no spin is long
_FREE_SPINS = 4  # polls before the first look at what others want
_CHECK_SPINS = 32  # polls from one look to the next; a power of two
_SWITCHES = 2  # so many switches to others end a spin; one may be an accident
_PREEMPTED_SECONDS = 0.001  # time without the processor, during one spin, that means that processors are scarce
_MIN_PAUSE, _MAX_PAUSE = 4, 128  # waits without spinning after processors were scarce
_READY, _OVER, _CROWDED = range(3)  # how a spin of the native core ends
_SOON_SECONDS = 0.0005  # a message that comes within this time would come sooner if the thread did not sleep


def new_signal() -> Signal[int]:
    """A signal that no thread watches."""
    return array.array("q", (0,))


def count_switches() -> tuple[int, int]:
    """How often the calling thread has slept, and how often it has lost the processor to another thread."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_nvcsw, usage.ru_nivcsw


class Busyness(Protocol):
    """Tells a thread that spins whether other threads want the interpreter. Endpoints do."""

    quiet: bool
    """Whether nothing runs in this process but threads that wait for messages."""

    wakes: int
    """How often a thread wanted one of the threads that poll to return."""

    spinner: object | None
    """Identifies the spin that is under way; None: no thread spins. A thread that begins to spin replaces it, and the
    other thread stops."""

    signal: Signal[int]
    """Changes with ``wakes``, and when another thread wants what a thread spins for."""

    spinners: dict[int, int]
    """The ids of the threads that spin without the interpreter."""

    blocked: int
    """How many handlers wait for something."""


class Spinning(Protocol):
    """What a thread spins for."""

    wanted: bool
    """Whether another thread waits for the spinning thread to stop."""


class SpinLimit:
    """How long the threads of one endpoint may spin. Thread-safe.

    Args:
        spin: ``"auto"`` or a number of seconds, see ``Options.spin``.
        processors: The processors that this process may use.

    Attributes:
        brief_spins: How many polls a brief spin may take; 0: threads never spin.
        brief_seconds: How long a brief spin may take.
        long_seconds: How long a long spin may take if enough processors are free; 0: no spin is long.
    """

    def __init__(self, spin: float | Literal["auto"] = "auto", processors: Processors = PROCESSORS) -> None:
        self._processors = processors
        self._automatic = spin == "auto"
        count = self._processors.count
        longest = LONG_SECONDS if spin == "auto" else float(spin)
        self.brief_spins = BRIEF_SPINS if longest and count > 1 else 0
        self.brief_seconds = min(BRIEF_SECONDS, longest)
        self.long_seconds = longest if self.brief_spins and not (self._automatic and count < _MIN_PROCESSORS) else 0.0

    @property
    def allows_company(self) -> bool:
        """Whether several threads may spin, and while others run."""
        return core is not None and self.long_seconds > 0.0

    def seconds(self) -> float:
        """How long a spin may take that is under way now. It is the longer the more processors are free: all of
        ``long_seconds`` if half of them are, nothing if one is.
        """
        if not self._automatic:
            return self.long_seconds
        share = (self._processors.free() - 1) / (self._processors.count / 2 - 1)
        return self.long_seconds * min(max(share, 0.0), 1.0)


_DEFAULT = SpinLimit()


class SpinPolicy:
    """Decides whether to spin, from how soon the last messages came. Used by one thread at a time.

    Attributes:
        waited: How many seconds the last message took to come. The thread that waited writes it; the next wait
            takes it into account. Negative: nothing to take into account.
    """

    __slots__ = (
        "_limit",
        "_long",
        "_long_pause",
        "_long_share",
        "_pause",
        "_soon_share",
        "_waits",
        "_was_soon",
        "waited",
    )

    def __init__(self, limit: SpinLimit = _DEFAULT) -> None:
        self.waited = -1.0
        self._limit = limit
        self._soon_share = 1.0  # share of the recent messages that came soon
        self._long_share = 1.0  # share of the recent messages that a long spin would have seen
        self._waits = 0
        self._pause = _Pause()
        self._long_pause = _Pause()
        self._was_soon = True  # whether a long spin would have seen the last message
        self._long = False  # whether the spin that begins now may be long

    @property
    def allows_company(self) -> bool:
        """See ``SpinLimit``."""
        return self._limit.allows_company

    def spin_if_worthwhile(
        self,
        poll: Callable[[int], list[T]],
        process: Busyness,
        purpose: Spinning,
        most: float | None = None,
        descriptors: tuple[int, ...] = (),
    ) -> list[T]:
        """``spin`` if ``should_spin``, else return nothing."""
        return self.spin(poll, process, purpose, most, descriptors) if self.should_spin() else []

    def spin(
        self,
        poll: Callable[[int], list[T]],
        process: Busyness,
        purpose: Spinning,
        most: float | None = None,
        descriptors: tuple[int, ...] = (),
    ) -> list[T]:
        """Poll until something is ready, others want the interpreter or the processor, or it takes too long. Returns
        what is ready. Call it only after ``should_spin`` has returned True.

        Args:
            poll: Returns what is ready without waiting, when called with 0.
            process: Whether other threads of this process want the interpreter.
            purpose: Whether another thread wants what this thread spins for.
            most: The longest time that the thread wants to wait; None: any time.
            descriptors: What ``poll`` polls; empty: the native core cannot do it.
        """
        if descriptors and self._limit.allows_company:
            return self._spin_natively(poll, process, most, descriptors)
        return self._spin_here(poll, process, purpose, most)

    def _spin_here(
        self, poll: Callable[[int], list[T]], process: Busyness, purpose: Spinning, most: float | None
    ) -> list[T]:
        limit, now, me = self._limit, time.perf_counter, object()
        wakes, watch = process.wakes, _Watch()
        until = watch.start + limit.brief_seconds
        left = limit.brief_spins  # polls until the spin becomes a long one, or ends
        first, long = left - _FREE_SPINS, False
        process.spinner = me
        try:
            while True:
                if not process.quiet or process.wakes != wakes or purpose.wanted or process.spinner is not me:
                    return []  # another thread wanted the interpreter: that says nothing about processors
                if ready := poll(0):
                    break
                offer()
                left -= 1
                if left == first:
                    watch.begin()
                elif not left & (_CHECK_SPINS - 1):
                    watch.look()
                    if watch.slept:
                        return []
                    if long and watch.lost:
                        self._long_pause.begin(self._waits)
                        break
                    if not left and not long:
                        until = watch.start + self._long_seconds(most)
                        long = now() < until
                        watch.begin()  # what a brief spin has lost does not count
                if now() > until:
                    break
        finally:
            if process.spinner is me:
                process.spinner = None
        if long and ready:
            self._long_pause.shorten()
        self._note_loss(watch.lost_seconds())
        return ready

    def _spin_natively(
        self, poll: Callable[[int], list[T]], process: Busyness, most: float | None, descriptors: tuple[int, ...]
    ) -> list[T]:
        """As ``spin``, without the interpreter. Another thread may want it, or want what this thread spins for: it
        changes the signal then.
        """
        limit, signal = self._limit, process.signal
        expected = signal[0]
        if ready := poll(0):
            self._pause.shorten()
            return ready
        me, pause = threading.get_ident(), self._pause
        process.spinners[me] = me
        try:
            end = core.spin(descriptors, signal, expected, limit.brief_spins, limit.brief_seconds)
            if end == _OVER and (seconds := self._long_seconds(most)) > 0.0:
                pause = self._long_pause
                end = core.spin(descriptors, signal, expected, ANY_NUMBER, seconds)
        finally:
            del process.spinners[me]
        if end == _CROWDED:
            pause.begin(self._waits)
        elif end == _READY:
            pause.shorten()
        return poll(0) if end == _READY else []

    def _long_seconds(self, most: float | None) -> float:
        """How long the spin that is under way may take altogether."""
        seconds = self._limit.seconds() if self._long else 0.0
        return seconds if most is None else min(seconds, most)

    def should_spin(self) -> bool:
        """Whether to spin in the wait that begins now. One wait of 32 spins briefly in any case, to notice changes: a
        message for which the thread sleeps seems to come later.
        """
        waited, limit = self.waited, self._limit
        if waited >= 0.0:
            self.waited = -1.0
            if waited < _SOON_SECONDS:
                self._soon_share += (1.0 - self._soon_share) / 4
            else:
                self._soon_share -= self._soon_share / 8
            self._was_soon = waited < limit.long_seconds
            self._long_share += (self._was_soon - self._long_share) / 8
        self._waits += 1
        if not limit.brief_spins or not self._pause.is_over(self._waits):
            return False
        probe = not self._waits & 31
        self._long = (
            self._was_soon  # an idle worker does not spin for long when a heartbeat comes
            and self._long_share > 0.5
            and limit.long_seconds > 0.0
            and self._long_pause.is_over(self._waits)
        )
        return self._long or probe or self._soon_share > 0.25

    def _note_loss(self, seconds: float) -> None:
        """Others had the processor for so long during a spin. If that is long, processors are scarce: pause, and the
        longer the more often that happens.
        """
        if seconds > _PREEMPTED_SECONDS:
            self._pause.begin(self._waits)
        else:
            self._pause.shorten()


class _Watch:
    """What happens to a thread while it spins.

    Attributes:
        start: When the spin began.
        slept: Whether the thread has slept since ``begin``.
        lost: Whether the thread has lost the processor to others since ``begin``.
    """

    __slots__ = ("_processor", "_switches", "lost", "slept", "start")

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.slept = self.lost = False
        self._processor: float | None = None  # the processor time of the thread after the first polls
        self._switches = (0, 0)

    def begin(self) -> None:
        """Count from here on. Not called before the first polls: most messages have come by then."""
        if self._processor is None:
            self._processor = time.thread_time()
        self._switches = count_switches()

    def look(self) -> None:
        """Set ``slept`` and ``lost``."""
        slept, lost = count_switches()
        self.slept = slept >= self._switches[0] + _SWITCHES
        self.lost = lost >= self._switches[1] + _SWITCHES

    def lost_seconds(self) -> float:
        """How long the thread has been without the processor; exact only if that is long."""
        seconds = time.perf_counter() - self.start
        if self._processor is None or seconds <= _PREEMPTED_SECONDS:
            return seconds
        return seconds - (time.thread_time() - self._processor)


class _Pause:
    """Waits without spinning, because processors were scarce."""

    __slots__ = ("_length", "_until")

    def __init__(self) -> None:
        self._until = 0  # do not spin before this many waits
        self._length = _MIN_PAUSE

    def begin(self, waits: int) -> None:
        """Pause after so many waits, for twice as long as the last time."""
        self._until = waits + self._length
        self._length = min(2 * self._length, _MAX_PAUSE)

    def is_over(self, waits: int) -> bool:
        """Whether a thread may spin in this wait."""
        return waits > self._until

    def shorten(self) -> None:
        """Processors were free: the next pause is shorter."""
        if self._length > _MIN_PAUSE:
            self._length -= 1
