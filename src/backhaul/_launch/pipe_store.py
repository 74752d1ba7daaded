"""Where the workers of one launch meet: a table in the process that started them, asked over the pipes it has to them.

Torch's TCP store would do, but asks the name server for both ends of every connection, one after the other; where that
is slow or away, it takes seconds for each worker. Here one message tells, and one asks for everything.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import pickle
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True, slots=True)
class Put:
    """Let a key have a value."""

    key: str
    value: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Add:
    """Add to the number that a key stands for, and tell it."""

    number: int
    key: str
    amount: int


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """Tell the values of all keys: when all are there, or (not ``wait``) at once, None for those that are not."""

    number: int
    keys: tuple[str, ...]
    wait: bool


Request = Put | Add | Ask


class Table:
    """The parent's side. Used by one thread."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: list[tuple[Connection, Ask]] = []

    def serve(self, pipe: Connection, request: Request) -> None:
        """Do what the worker at the other end of ``pipe`` wants, and answer whoever can be answered now."""
        if isinstance(request, Ask):
            self._waiting.append((pipe, request))
        elif isinstance(request, Put):
            self._values[request.key] = request.value
        else:
            total = int(self._values.get(request.key, b"0")) + request.amount
            self._values[request.key] = str(total).encode()
            _answer(pipe, request.number, [self._values[request.key]])
        waiting, self._waiting = self._waiting, []
        for who, ask in waiting:
            if ask.wait and not self._values.keys() >= set(ask.keys):
                self._waiting.append((who, ask))
            else:
                _answer(who, ask.number, [self._values.get(key) for key in ask.keys])


def _answer(pipe: Connection, number: int, values: list[bytes | None]) -> None:
    try:
        pipe.send_bytes(pickle.dumps((number, values)))
    except OSError:  # it is gone, which its own pipe tells
        pass


class PipeStore(Store):
    """A worker's side: of a store, what a meeting needs. Used by one thread, and while nobody else uses the pipe."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self._pipe = pipe
        self._numbers = itertools.count(1)
        self._patience = 300.0  # seconds, as of torch's own stores

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """How long to wait for an answer."""
        self._patience = timeout.total_seconds()

    def set(self, key: str, value: str | bytes) -> None:
        """Returns before the parent knows."""
        self._send(Put(key, value.encode() if isinstance(value, str) else bytes(value)))

    def add(self, key: str, amount: int) -> int:
        """The sum so far."""
        (total,) = self._ask(Add(next(self._numbers), key, amount))
        assert total is not None
        return int(total)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Waits for all of the keys."""
        found = self._ask(Ask(next(self._numbers), tuple(keys), wait=True))
        return [value for value in found if value is not None]

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Waits until all of the keys are there, so long at most."""
        seconds = self._patience if timeout is None else timeout.total_seconds()
        self._ask(Ask(next(self._numbers), tuple(keys), wait=True), seconds)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of the keys are there."""
        return None not in self._ask(Ask(next(self._numbers), tuple(keys), wait=False))

    def _send(self, request: Request) -> None:
        try:
            self._pipe.send_bytes(pickle.dumps(request))
        except OSError as error:
            raise DistStoreError(f"the process that started this worker is gone: {error}") from error

    def _ask(self, request: Add | Ask, patience: float | None = None) -> list[bytes | None]:
        self._send(request)
        patience = self._patience if patience is None else patience
        deadline = time.monotonic() + patience
        try:
            while self._pipe.poll(max(deadline - time.monotonic(), 0.0)):
                number, values = pickle.loads(self._pipe.recv_bytes())
                if number == request.number:  # else it comes too late
                    return list(values)
        except (EOFError, OSError) as error:
            raise DistStoreError("the process that started this worker is gone") from error
        raise DistStoreError(f"no answer within {patience:g} s")
