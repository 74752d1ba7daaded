"""What a fuzz target is, and the limits that all targets share."""

from __future__ import annotations

from typing import Any

import torch

from backhaul._options import Limits, Options, Security
from backhaul._rpc.security.rate_limits import over_limits
from backhaul._wire.memory import Buffer, Recycler
from backhaul.errors import ProtocolError

LIMIT_BYTES = 1 << 20
"""The largest frame of the readers here, and so the most that a target may allocate at once."""
MAX_VALUES = 4096
"""How many values a message may have."""
_UNTRUSTED = Options(security=Security(trusted=False), limits=Limits(values=MAX_VALUES))


class FindingError(Exception):
    """A target did what it must not do."""


class Target:
    """A part of Backhaul that reads bytes of a peer.

    Attributes:
        name: The name of the target, and of its folder in the corpus.
        expected: Errors that it may raise.
    """

    name = ""
    expected: tuple[type[BaseException], ...] = (ProtocolError,)

    def seeds(self) -> list[bytes]:
        """Valid inputs."""
        raise NotImplementedError

    def take(self, data: bytes) -> object:
        """Read an input."""
        raise NotImplementedError


def feed(target: Target, data: bytes) -> str:
    """Feed one input to a target. Returns what happened. Raises ``FindingError``, or an error that is not expected."""
    try:
        return "read" if target.take(data) is not None else "ignored"
    except target.expected as error:
        return type(error).__name__


def check_value_count(body: bytes) -> None:
    """Raise ``LimitError`` as a worker does that does not trust its peers."""
    if (error := over_limits("fuzzed", _UNTRUSTED, body, "an input")) is not None:
        raise error


class LimitedRecycler(Recycler):
    """Raises ``FindingError`` for an allocation that is larger than any valid frame needs."""

    limit_bytes = LIMIT_BYTES

    def allocate(self, size: int) -> Buffer:
        if size > self.limit_bytes:
            raise FindingError(f"{size} bytes were allocated, but the limit is {self.limit_bytes}")
        return super().allocate(size)


def sample_values() -> list[list[Any]]:
    """Values of all kinds that can be sent without pickle."""
    base = torch.arange(12.0)
    return [
        [],
        [1, -1, 1.5, True, None, "text", b"bytes"],
        [torch.ones(3)],
        [torch.ones(2, 3, requires_grad=True), 5],
        [torch.zeros(1).expand(4, 4)],
        [base, base[2:5], base[::3]],
        [torch.ones(4, 4).t()[1:, 1:]],
        [torch.empty(0, 3), torch.tensor(2, dtype=torch.int8), torch.ones(2, dtype=torch.complex64)],
        [torch.eye(3).to_sparse(), torch.eye(4).to_sparse_csr(), torch.eye(4).to_sparse_csc()],
        [torch.eye(4).to_sparse_bsr((2, 2)), torch.ones(2, device="meta")],
        [torch.quantize_per_tensor(torch.ones(4), 0.5, 1, torch.qint8)],
        [torch.quantize_per_channel(torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8)],
        [torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)])],
        [torch.ones(3, dtype=torch.uint16), torch.ones(2, dtype=torch.float8_e4m3fn)],
    ]
