"""What ``_rpc`` and ``_autograd`` call of devices: the order of streams.

The rooms above call these objects and never ask whether there are devices. Where there are none, the null objects here
serve them. Owns the interfaces and the null objects. Must not import what only a worker with devices needs.

[Note: null callables] Every call and every pass uses these objects, so a null method must not run a Python function.
The null objects are instances whose attributes are C functions that do nothing.
"""

from __future__ import annotations

import collections
import operator
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from backhaul._devices.backend import DeviceEvent, Key

T = TypeVar("T")

# See [Note: null callables].
_without_argument: Callable[[], None] = [].clear
_ignore: Callable[[Any], None] = collections.deque[Any](maxlen=0).append  # keeps nothing
_ignore_two: Callable[[Any, Any], object] = operator.is_
_return_second: Callable[[Any, Any], Any] = dict[Any, Any]().get  # the first argument must be hashable


class Mark:
    """What was under way on a thread's streams when it handed a value on. Made by ``ProcessStreams.mark``."""

    __slots__ = ("_events",)

    def __init__(self, events: list[tuple[Key, DeviceEvent]]) -> None:
        self._events = events

    @property
    def pending(self) -> list[tuple[Key, DeviceEvent]]:
        """What of it is still under way."""
        if self._events:
            self._events = [(key, event) for key, event in self._events if not event.query()]
        return self._events


class ProcessStreams(Protocol):
    """The order of work on the device streams of this process. The real one is ``StreamOrder``."""

    def depart(self) -> object:
        """A message, or a value for another thread, leaves this thread."""

    def arrive(self) -> object:
        """This thread goes on with what others have sent."""

    def adopt(self, value: Any, /) -> object:
        """This thread uses tensors that another thread has made."""

    def mark(self, earlier: Mark | None, /) -> Mark | None:
        """What this thread has begun, and what is pending of an earlier mark. None: no device is in use."""

    def join(self, mark: Mark | None, value: T, /) -> T:
        """This thread goes on with a value that came with ``mark``. Returns the value."""

    def carry(self, value: object, /) -> Callable[[], None]:
        """A value leaves this thread. Another thread calls the result before it uses the value."""

    def value_of(self, future: Any, /) -> Any:
        """The value of a future that is done."""

    def explain(self, error: BaseException, worker: str, /) -> object:
        """Add a note to an error of a device, which says whether the worker is still usable."""


class _NoStreams:
    __slots__ = ("adopt", "arrive", "depart", "explain", "join", "mark", "value_of")

    def __init__(self) -> None:
        self.depart = self.arrive = _without_argument
        self.adopt = self.mark = _ignore
        self.join = _return_second
        self.value_of: Callable[[Any], Any] = torch._C.Future.wait
        self.explain = _ignore_two

    @staticmethod
    def carry(value: object) -> Callable[[], None]:
        return _without_argument


NO_STREAMS: ProcessStreams = _NoStreams()

streams: ProcessStreams = NO_STREAMS
"""The order of this process's streams. The first worker with devices replaces it: streams belong to a process. Read it
at each use, never at import.
"""


def _forget() -> None:
    global streams
    streams = NO_STREAMS  # CUDA does not work in a forked child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
