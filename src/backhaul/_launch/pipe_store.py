"""The store of one launch: a table in the process that started the workers, which they query over their pipes to it.

Torch's TCP store would do, but it asks the name server about both ends of every connection, one after the other; where
the name server is slow or missing, that takes seconds for each worker. Here one message puts a value, and one message
asks for all values.
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
    """Set the value of a key."""

    key: str
    value: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Add:
    """Add to the number that a key holds, and answer with the sum."""

    number: int
    key: str
    amount: int


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """Answer with the values of all keys: with ``wait`` once all are there, else at once with None for missing keys."""

    number: int
    keys: tuple[str, ...]
    wait: bool


Request = Put | Add | Ask


class Table:
    """The side of the parent process. Used by one thread."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: list[tuple[Connection, Ask]] = []

    def serve(self, pipe: Connection, request: Request) -> None:
        """Serve a request of the worker at the other end of ``pipe``; answer all requests that can be answered now."""
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
    except OSError:  # the worker is gone; the thread that reads its pipe notices that
        pass


class PipeStore(Store):
    """The side of a worker: the part of a store that a rendezvous needs. Used by one thread, which alone uses the pipe
    meanwhile.

    Attributes:
        names_missing: The parent says which workers have not come. So no worker has to.
    """

    names_missing = True

    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self._pipe = pipe
        self._numbers = itertools.count(1)
        self._timeout_seconds = 300.0  # as in torch's own stores

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set how long to wait for an answer."""
        self._timeout_seconds = timeout.total_seconds()

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key. Returns before the parent has it."""
        self._send(Put(key, value.encode() if isinstance(value, str) else bytes(value)))

    def add(self, key: str, amount: int) -> int:
        """Add to the number that a key holds; returns the sum."""
        (total,) = self._ask(Add(next(self._numbers), key, amount))
        assert total is not None
        return int(total)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for all keys and return their values."""
        found = self._ask(Ask(next(self._numbers), tuple(keys), wait=True))
        return [value for value in found if value is not None]

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all keys are there, at most for ``timeout``."""
        seconds = self._timeout_seconds if timeout is None else timeout.total_seconds()
        self._ask(Ask(next(self._numbers), tuple(keys), wait=True), seconds)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return None not in self._ask(Ask(next(self._numbers), tuple(keys), wait=False))

    def _send(self, request: Request) -> None:
        try:
            self._pipe.send_bytes(pickle.dumps(request))
        except OSError as error:
            raise DistStoreError(f"the process that started this worker is gone: {error}") from error

    def _ask(self, request: Add | Ask, seconds: float | None = None) -> list[bytes | None]:
        self._send(request)
        seconds = self._timeout_seconds if seconds is None else seconds
        deadline = time.monotonic() + seconds
        try:
            while self._pipe.poll(max(deadline - time.monotonic(), 0.0)):
                number, values = pickle.loads(self._pipe.recv_bytes())
                if number == request.number:  # otherwise it is a late answer to an earlier request
                    return list(values)
        except (EOFError, OSError) as error:
            raise DistStoreError("the process that started this worker is gone") from error
        raise DistStoreError(f"no answer of the process that started this worker within {seconds:g} s")
