"""Payloads of messages that have arrived: first their tensors, which layers above may replace, then their values.

The native core reads what it can. It leaves the rest to ``PayloadReader``, which has the same methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from backhaul._native import core
from backhaul._wire import nested
from backhaul._wire.codec import load
from backhaul._wire.device_link import Link, decline
from backhaul._wire.memory import Buffer
from backhaul._wire.messages import Payload, decode_payload
from backhaul._wire.tensors.reader import tensors_of


class IncomingPayload(Protocol):
    """The payload of one message."""

    def tensors(self, link: Link | None) -> list[torch.Tensor]:
        """The tensors of the message, on the memory of its buffers and of the slots of ``link``."""

    def values(self, tensors: Sequence[torch.Tensor], worker: object) -> list[Any]:
        """The values, with these tensors, for the worker ``worker``."""

    def decline(self, link: Link | None) -> None:
        """Nobody reads the message: give its slots back."""


class PayloadReader:
    """Reads a payload in Python."""

    __slots__ = ("_buffers", "_payload")

    def __init__(self, payload: Payload, buffers: Sequence[Buffer]) -> None:
        self._payload = payload
        self._buffers = buffers

    def tensors(self, link: Link | None) -> list[torch.Tensor]:
        return tensors_of(self._payload, self._buffers, link)

    def values(self, tensors: Sequence[torch.Tensor], worker: object) -> list[Any]:
        return load(self._payload, self._buffers, tensors, worker)

    def decline(self, link: Link | None) -> None:
        decline(self._payload, link)


def _read_in_python(body: Buffer, buffers: Sequence[Buffer]) -> IncomingPayload:
    return PayloadReader(decode_payload(body), buffers)


def _read(body: Buffer, buffers: Sequence[Buffer]) -> IncomingPayload:
    return core.read_payload(body, buffers) or PayloadReader(decode_payload(body), buffers)


if core is not None:
    core.set_callbacks(nested.take_apart, nested.put_together)

read_payload = _read_in_python if core is None else _read
"""Read the payload in ``body``. Raises ``MALFORMED`` if it is none."""
