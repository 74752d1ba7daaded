"""One call that this worker serves, and what may be said about the functions that serve calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from backhaul._rpc.cluster.peers import Peer
from backhaul._rpc.interceptors import Interceptor
from backhaul._runtime import runtime
from backhaul._runtime.observer import ServeTrace
from backhaul._transport.base import Channel
from backhaul._wire.callables import label_of
from backhaul._worker import deadlines
from backhaul._worker.deadlines import CancelScope

F = TypeVar("F", bound=Callable[..., Any])

never_dropped_names: set[str] = set()


def never_dropped(function: F) -> F:
    """Mark a function of a layer above that has to see every call. It runs even if no caller waits for it any more, and
    is not cancelled when its caller is lost.
    """
    never_dropped_names.add(f"{function.__module__}:{function.__qualname__}")
    return function


def reply_as_it_is() -> None:
    """Send the result of the call that runs on this thread, if any, without a codec: the state of a module, say."""
    scope = deadlines.current.get()
    if scope is not None and isinstance(scope.root, ServedCall):
        scope.root.exact = True


def run_here(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of the user's for a handler. If it forks, the child process ends with the function."""
    with runtime.UserCode():
        return function(*args, **kwargs)


# Over the limit because each attribute is what one part keeps for a call, and most calls need few of them.
class ServedCall(CancelScope):
    """One request: where its reply goes, what the reply needs, and how long the caller waits for it."""

    function: Any = None  # once it is known
    kept: Sequence[tuple[Interceptor, Any]] = ()  # values that interceptors keep for the reply
    trace: ServeTrace | None = None
    waiting: Collection[int] = ()  # the numbers of the requests of its channel that wait for a thread
    later = False  # no thread runs it any more; its reply follows when a future is done
    orphaned = False  # the channel that it came through is gone
    spared = False  # it goes on even if its channel is gone
    loans: Sequence[Any] = ()  # what the caller has lent to the call; of a layer above
    exact = False  # the result travels as it is, without a codec
    charge = 0  # bytes that count against the peer's limit until the call is over

    def __init__(self, peer: Peer, channel: Channel, number: int, now: Callable[[], float]) -> None:
        self.peer = peer
        self.channel = channel
        self.number = number
        self.now = now
        self.arrived = now()

    @property
    def label(self) -> str:  # type: ignore[override]
        """The function's name for people."""
        return "a function" if self.function is None else label_of(self.function)

    @property
    def decoding(self) -> bool:
        """Whether the request is still being decoded."""
        return self.function is None

    def spare(self) -> None:
        """Let the call go on even if its caller is lost."""
        # In this order: ``lose_channel`` does the reverse, so the thread that is last sees what the other has set.
        self.spared = True
        if self.orphaned:
            self.cancelled = False

    def lose_channel(self) -> None:
        """Cancel the call because no reply can go back, unless it is spared."""
        self.orphaned = True
        self.cancelled = not self.spared
        if self.spared:  # another thread has called ``spare`` just now
            self.cancelled = False
