"""Device memory that two processes share: the sender's *segments*, which the receiver opens once, cut into *slots*.

A ``Lender`` is the sending end of one direction of a channel, a ``Borrower`` the receiving end, as in
``transport.shm``; what is free is seen in a page of host memory that both have mapped. Here is what they have in
common: the ``News`` they tell each other, which others carry, and ``Ipc``, all that is needed of CUDA.

    sender                                        receiver
    Offer: memory, an event for each slot      -> opens it
                                               <- Answer: whether it could, and an event for each slot
    copies a tensor into a slot, records the
    slot's *ready*; a message names the slot   -> its stream waits for *ready*; tensors are views of the slot
    (finds the slot free) its stream waits        records *done* behind all that may use them, and clears the slot's
    for *done* before it writes there             state, when the last of them is gone
    Retire                                     -> closes it

The host waits for nothing. A slot is free when its state says so, although the receiver's device may still read it: who
writes there next waits for *done*, on the device.

[Note: graves] Memory is let go when all events on it have passed, not before: what the device does may lie ahead.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import torch

from backhaul.cuda.streams import Event
from backhaul.wire.messages import prepare

SMALLEST = 4096
"""Slots have a multiple of so many bytes."""


class Handle(msgspec.Struct, array_like=True, frozen=True):
    """How another process opens device memory. What it says is between the two ends of an ``Ipc``."""

    memory: bytes
    nbytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    synchronize: bool


class Offer(msgspec.Struct, array_like=True, frozen=True, tag="offer"):
    """A segment that the receiver may open."""

    number: int
    device: str  # its identity
    slot_bytes: int
    handle: Handle
    ready: tuple[bytes, ...]  # an event for each slot
    process: int
    descriptor: int  # of the page with the states
    cookie: bytes


class Answer(msgspec.Struct, array_like=True, frozen=True, tag="answer"):
    """Whether an offer was accepted; then with an event for each slot."""

    number: int
    done: tuple[bytes, ...] = ()


class Retire(msgspec.Struct, array_like=True, frozen=True, tag="retire"):
    """The sender has let go of a segment, of which nothing is lent."""

    number: int


Item = Offer | Answer | Retire


class News(msgspec.Struct, array_like=True, frozen=True):
    """What the two ends of a link have to tell each other."""

    items: tuple[Item, ...]


prepare(News)


class Ipc(Protocol):
    """Device memory and events that other processes can open. All of it raises ``RuntimeError`` where it cannot."""

    def allocate(self, device: int, nbytes: int) -> torch.Tensor:
        """Bytes on a device."""

    def export(self, memory: torch.Tensor) -> Handle:
        """How others open memory that ``allocate`` has made."""

    def open(self, handle: Handle, device: int) -> Any:
        """Memory of another process; it is closed when nothing refers to it any more."""

    def view(self, memory: Any, offset: int, nbytes: int) -> tuple[torch.Tensor, object]:
        """A stretch of opened memory as a tensor with a storage of its own, and an object that dies with that."""

    def copy(self, memory: torch.Tensor, offset: int, flat: torch.Tensor) -> None:
        """Copy bytes to a place in memory of this process, on the current streams."""

    def event(self, device: int) -> tuple[Event, bytes]:
        """A new event, and how others open it."""

    def open_event(self, handle: bytes, device: int) -> Event:
        """An event of another process."""


_graves: collections.deque[tuple[Sequence[Event], Any]] = collections.deque()


def bury(events: Sequence[Event], memory: Any) -> None:
    """Keep memory until all events have passed. See [Note: graves]."""
    _graves.append((events, memory))


def visit_graves() -> None:
    """Let memory go whose events have passed."""
    for _ in range(len(_graves)):
        try:
            events, memory = _graves.popleft()
        except IndexError:
            return
        if not all(event.query() for event in events):
            _graves.append((events, memory))
