"""Both ends of the device memory that two processes share over one channel."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from backhaul._devices.backend import Ipc
from backhaul._devices.borrowing import DeviceBorrower
from backhaul._devices.device_context import DeviceContext
from backhaul._devices.lending import DeviceLender
from backhaul._devices.segment_messages import Item, Offer, SegmentReply


class SharedSlots:
    """A lender for what this process sends, and a borrower for what it receives. Thread-safe."""

    def __init__(self, device_context: DeviceContext, ipc: Ipc) -> None:
        slot_order, identities = device_context.stream_order.slot_order, device_context.own.devices
        self.lender = DeviceLender(ipc, slot_order, identities, device_context.budget)
        self.borrower = DeviceBorrower(ipc, slot_order, identities)
        self.lend = self.lender.lend
        self.take_back = self.lender.take_back
        self.borrow = self.borrower.borrow
        self.decline = self.borrower.decline

    @property
    def news(self) -> collections.deque[Item]:
        """What the peer is to be told."""
        return self.lender.news

    def take_in(self, items: Iterable[Item]) -> list[Offer]:
        """Note what the peer has told; return the offers that are to be opened. Raises ``ProtocolError``."""
        offers = []
        for item in items:
            if isinstance(item, Offer):
                self.borrower.check(item)
                offers.append(item)
            elif isinstance(item, SegmentReply):
                self.lender.answered(item)
            else:
                self.borrower.retired(item.number)
        return offers

    def open(self, offers: Iterable[Offer]) -> None:
        """Open what the peer offers, which takes milliseconds."""
        self.news.extend(map(self.borrower.open, offers))

    def close(self) -> None:
        """The channel is lost."""
        self.borrower.close()  # first: the lender may wait for a thread that waits for the peer
        self.lender.close()
