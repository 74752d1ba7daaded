"""How much one peer may ask of a worker at once. Pure but for a lock: counts in, refusals out."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from backhaul.errors import LimitError
from backhaul.types import Options

_UNTRUSTED = {
    "max_tensors": 1 << 14,
    "max_calls": 1 << 10,
    "max_bytes_in_flight": 1 << 30,
    "max_contexts": 1 << 10,
}


@dataclass(frozen=True, slots=True)
class Quotas:
    """The limits that hold on one worker; None: none. See ``Options``."""

    tensors: int | None
    calls: int | None
    nbytes: int | None
    contexts: int | None

    @classmethod
    def of(cls, options: Options) -> Quotas:
        """Those that are given, and where peers are not trusted the defaults."""
        found = [
            getattr(options, field) if options.trusted or getattr(options, field) is not None else default
            for field, default in _UNTRUSTED.items()
        ]
        return cls(*found)

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return any(limit is not None for limit in (self.tensors, self.calls, self.nbytes, self.contexts))


def beyond(worker: str, limit: str, option: str, value: int, asked: str) -> LimitError:
    """The error of a peer that asked for too much."""
    return LimitError(
        f"worker '{worker}' refused: {asked}, and its limit is {value} {limit} (Options.{option} there)",
        worker=worker,
        limit=limit,
        option=option,
        value=value,
    )


class Ledger:
    """What the peers of one worker have under way there. Thread-safe."""

    def __init__(self, worker: str, quotas: Quotas) -> None:
        self._worker = worker
        self._quotas = quotas
        self._lock = threading.Lock()  # guards the table
        self._open: dict[int, tuple[int, int]] = {}  # peer -> its calls, and their bytes

    def take(self, peer: int, name: str, nbytes: int, *, must: bool = False) -> None:
        """A call came. Raises ``LimitError`` unless it ``must`` be taken, and counts nothing then."""
        quotas = self._quotas
        with self._lock:
            calls, held = self._open.get(peer, (0, 0))
            if quotas.calls is not None and calls >= quotas.calls and not must:
                asked = f"'{name}' has {calls} calls under way there"
                raise beyond(self._worker, "calls of one peer at once", "max_calls", quotas.calls, asked)
            if quotas.nbytes is not None and calls and held + nbytes > quotas.nbytes and not must:
                asked = f"'{name}' has calls of {held} bytes under way there and sent another of {nbytes}"
                raise beyond(
                    self._worker, "bytes of one peer's calls at once", "max_bytes_in_flight", quotas.nbytes, asked
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
        """How many are under way."""
        with self._lock:
            return sum(calls for calls, _ in self._open.values())
