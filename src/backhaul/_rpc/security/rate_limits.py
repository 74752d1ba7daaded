"""Limits how much one peer may ask of a worker at once. Pure except for a lock: counts in, refusals out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from backhaul._options import Options
from backhaul._wire.frames import Frame
from backhaul._wire.memory import Buffer
from backhaul._wire.value_count import LEVELS, Bounds, excess, most_buffers
from backhaul.errors import LimitError

_UNTRUSTED_DEFAULTS = {
    "tensors": 1 << 14,
    "calls": 1 << 10,
    "bytes_in_flight": 1 << 30,
    "contexts": 1 << 10,
}


@dataclass(frozen=True, slots=True)
class RateLimits:
    """The limits of one worker; None: no limit. See ``Options``."""

    tensors: int | None
    calls: int | None
    nbytes: int | None
    contexts: int | None
    values: int | None = None

    @classmethod
    def of(cls, options: Options) -> RateLimits:
        """The limits in the options; where peers are not trusted, the defaults fill in what is not given."""
        tensors, calls, nbytes, contexts = (
            default
            if getattr(options.limits, name) is None and not options.security.trusted
            else getattr(options.limits, name)
            for name, default in _UNTRUSTED_DEFAULTS.items()
        )
        return cls(tensors, calls, nbytes, contexts, options.value_limit)

    @property
    def any(self) -> bool:
        """Whether there is any limit."""
        return any(limit is not None for limit in (self.values, self.tensors, self.calls, self.nbytes, self.contexts))


def beyond(worker: str, limit: str, option: str, value: int, asked: str) -> LimitError:
    """The error for a peer that asked for too much."""
    return LimitError(
        f"worker '{worker}' refused: {asked}, and its limit is {value} {limit} (Options.{option} there)",
        worker=worker,
        limit=limit,
        option=option,
        value=value,
    )


_COUNTED = {"limits.values": "values in one message", "limits.depth": "levels of nesting", "limits.tensors": "tensors"}


def bounds_of(options: Options) -> Bounds | None:
    """What a worker tells others about the messages that it accepts; None: it accepts any."""
    limits = RateLimits.of(options)
    if limits.values is None and limits.tensors is None:
        return None
    return Bounds(limits.values or 0, options.limits.depth if limits.values else 0, limits.tensors or 0)


def over_limits(worker: str, options: Options, body: Buffer, what: str) -> LimitError | None:
    """The reason not to decode a message: it has too many values, or they are nested too deeply. None: decode it."""
    values, depth = options.value_limit, options.limits.depth
    option = "" if values is None else excess(body, values, depth + LEVELS)
    if values is None or not option:
        return None
    asked = f"{what} has more values" if option == "limits.values" else f"{what} is nested deeper"
    return beyond(worker, _COUNTED[option], option, values if option == "limits.values" else depth, asked)


def over_bounds(frame: Frame, bounds: Bounds, worker: str, what: Callable[[], str]) -> LimitError | None:
    """The reason not to send a frame: its receiver would refuse it. None: send it. ``what`` describes the frame."""
    option, value = "", 0
    if bounds.values > 0:
        option = excess(frame.body, bounds.values, bounds.depth + LEVELS)
        value = bounds.depth if option == "limits.depth" else bounds.values
    if not option and bounds.tensors > 0 and len(frame.buffers) > most_buffers(bounds.tensors):
        option, value = "limits.tensors", bounds.tensors
    if not option:
        return None
    has = "is nested deeper" if option == "limits.depth" else f"has more {_COUNTED[option].split()[0]}"
    return LimitError(
        f"{what()} {has} than worker '{worker}' takes: {value} {_COUNTED[option]} (Options.{option} there); "
        "it was not sent",
        worker=worker,
        limit=_COUNTED[option],
        option=option,
        value=value,
    )


class PeerUsage:
    """The calls that peers have under way on one worker. Thread-safe."""

    def __init__(self, worker: str, limits: RateLimits) -> None:
        self._worker = worker
        self._limits = limits
        self._lock = threading.Lock()  # guards _open
        self._open: dict[int, tuple[int, int]] = {}  # by peer: the number of its calls, and their bytes

    def take(self, peer: int, name: str, nbytes: int, *, must: bool = False) -> None:
        """Count a call that came. Raises ``LimitError`` if it exceeds a limit, and does not count it then. A call that
        ``must`` be served is counted and never refused.
        """
        limits = self._limits
        with self._lock:
            calls, held = self._open.get(peer, (0, 0))
            if limits.calls is not None and calls >= limits.calls and not must:
                asked = f"'{name}' has {calls} calls under way there"
                raise beyond(self._worker, "calls of one peer at once", "limits.calls", limits.calls, asked)
            if limits.nbytes is not None and calls and held + nbytes > limits.nbytes and not must:
                asked = f"'{name}' has calls of {held} bytes under way there and sent another of {nbytes}"
                raise beyond(
                    self._worker, "bytes of one peer's calls at once", "limits.bytes_in_flight", limits.nbytes, asked
                )
            self._open[peer] = calls + 1, held + nbytes

    def give_back(self, peer: int, nbytes: int) -> None:
        """The call was answered."""
        with self._lock:
            calls, held = self._open[peer]
            if calls == 1:
                del self._open[peer]
            else:
                self._open[peer] = calls - 1, held - nbytes

    @property
    def calls(self) -> int:
        """How many calls are under way."""
        with self._lock:
            return sum(calls for calls, _ in self._open.values())
