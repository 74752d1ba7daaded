"""What lender and borrower of device memory tell each other. ``_rpc.device_memory`` carries these messages."""

from __future__ import annotations

import msgspec

from backhaul._wire.messages import prepare


class Offer(msgspec.Struct, array_like=True, frozen=True, tag="offer"):
    """A segment that the receiver may open."""

    number: int
    device: str  # its identity
    slot_bytes: int
    count: int
    memory: bytes  # the handle of device memory; empty: the slots follow the pages
    process: int
    descriptor: int  # of the pages
    cookie: bytes


class SegmentReply(msgspec.Struct, array_like=True, frozen=True, tag="answer"):
    """Whether an offer was accepted."""

    number: int
    accepted: bool = False


class Retire(msgspec.Struct, array_like=True, frozen=True, tag="retire"):
    """The sender has let go of a segment, no slot of which is lent."""

    number: int


Item = Offer | SegmentReply | Retire


class SegmentUpdate(msgspec.Struct, array_like=True, frozen=True):
    """Several items in one message."""

    items: tuple[Item, ...]


prepare(SegmentUpdate)
