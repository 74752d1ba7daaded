"""What a message needs to carry tensors of a device: the ``Link`` between two workers, as the codec sees it, and what
is done with the memory of one message on its way out and in. Knows no CUDA: any link will do, also one over CPU memory.

Device memory travels as flat stretches of bytes, in one of two ways. It is *lent*: copied into a *slot* of device
memory that the receiver has opened, and named in the message; or *staged*: copied to the host, and put into the frame's
buffers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from backhaul._wire.memory import Buffer, block_type
from backhaul.errors import ProtocolError

if TYPE_CHECKING:
    from backhaul._wire.messages import Payload
    from backhaul._wire.tensors.specs import Part

Slot = tuple[int, int]
"""A segment's number and the index of a slot in it."""

_DEVICE = re.compile(r"cuda:(0|[1-9][0-9]{0,2})")


def is_device(name: str) -> bool:
    """Whether ``name`` is in the form that devices have in messages."""
    return _DEVICE.fullmatch(name) is not None


class Form(NamedTuple):
    """How a tensor lies in its memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Link(Protocol):
    """What two workers share for device memory, as one of them sees it. Thread-safe; nothing of it waits for the peer.

    All that is done to tensors here is done on the current streams of the thread that calls.

    Attributes:
        takes_host: Whether it takes CPU tensors as well, because they are to arrive on a device.
    """

    takes_host: bool

    def takes(self, device: torch.device) -> bool:
        """Whether tensors of a device go through this link."""

    def name(self, device: torch.device) -> str:
        """What the peer calls the device on which a tensor of this one is to arrive; "": its CPU.

        Raises:
            SerializationError: There is none, and what to do about it.
        """

    def device(self, name: str) -> torch.device:
        """The device here that the peer means. Raises ``ProtocolError`` if there is none."""

    def lend(self, flat: torch.Tensor) -> Slot | None:
        """Copy bytes into a slot; None if there is none for them now."""

    def lend_whole(self, tensor: torch.Tensor, nbytes: int) -> Slot | None:
        """The same for what a tensor without holes consists of."""

    def stage(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy bytes to the host. Once this returns, they are there."""

    def borrow(self, slot: Slot, nbytes: int, device: torch.device) -> torch.Tensor:
        """The bytes in a slot, as a tensor with a storage of its own: the slot goes back when that is gone.

        Raises ``ProtocolError`` unless the slot is lent, that large, on that device, and not borrowed already.
        """

    def borrow_whole(self, slot: Slot, nbytes: int, device: torch.device, form: Form) -> torch.Tensor:
        """The same as a tensor of that form, which has so many bytes."""

    def unstage(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy bytes from the host to a device, into a storage of their own."""

    def take_back(self, slots: Sequence[Slot]) -> None:
        """Slots that were lent and never named to the peer are free again. Takes no lock: called by destructors."""

    def decline(self, slots: Iterable[Slot]) -> None:
        """Slots that the peer has lent, in a message which nobody is going to read, go back to it."""


class Lease:
    """The slots that one message takes with it. They go back with this, unless the message was handed to a channel:
    from then on they are the receiver's to return.
    """

    __slots__ = ("link", "sent", "slots")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.slots: list[Slot] = []
        self.sent = False

    def end(self) -> None:
        """The message is not going to be sent: its slots are free again, at once."""
        slots, self.slots = self.slots, []
        if slots and not self.sent:
            self.link.take_back(slots)

    def __del__(self) -> None:
        self.end()


def flat_bytes(tensor: torch.Tensor, start: int, nbytes: int) -> torch.Tensor:
    """A stretch of the storage behind a tensor, as bytes."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(tensor.untyped_storage(), start, (nbytes,), (1,))


class Shipment:
    """Device memory of one message on its way out: what finds no slot is staged, all of it together."""

    __slots__ = ("_link", "_waiting", "lease")

    def __init__(self, link: Link) -> None:
        self._link = link
        self._waiting: list[tuple[int, torch.Tensor]] = []
        self.lease = Lease(link)

    def put(self, flat: torch.Tensor, name: str, buffers: list[Buffer]) -> tuple[int, Slot | None]:
        """Put bytes into a slot, or keep a place for them among ``buffers``; which buffer, and which slot."""
        slot = self._link.lend(flat) if name else None
        if slot is not None:
            self.lease.slots.append(slot)
            return -1, slot
        self._waiting.append((len(buffers), flat))
        buffers.append(b"")
        return len(buffers) - 1, None

    def finish(self, buffers: list[Buffer], keep: list[torch.Tensor]) -> None:
        """Fill the places among ``buffers``."""
        if not self._waiting:
            return
        staged = self._link.stage([flat for _, flat in self._waiting])
        for (place, _), host in zip(self._waiting, staged, strict=True):
            buffers[place] = block_type(len(host)).from_address(host.data_ptr())
            keep.append(host)


class Arrival:
    """Device memory of one message that has come in. Each stretch is fetched once, whatever lies on it."""

    __slots__ = ("_fetched", "_link", "_reach")

    def __init__(self, link: Link) -> None:
        self._link = link
        self._reach: dict[Slot | int, tuple[int, str]] = {}  # of each stretch: size and device
        self._fetched: dict[Slot | int, torch.Tensor] = {}

    def announce(self, key: Slot | int, nbytes: int, device: str) -> None:
        """Something lies in the first ``nbytes`` of a slot or, with ``key`` its number, of a buffer."""
        size, known = self._reach.get(key, (0, device))
        if known != device:
            raise ProtocolError(f"one stretch of memory on both {known!r} and {device!r}")
        self._reach[key] = max(size, nbytes), device

    def device(self, name: str) -> torch.device:
        """The device that the peer means."""
        return self._link.device(name)

    def fetch(self, key: Slot | int, buffers: Sequence[Buffer]) -> torch.Tensor:
        """The bytes of a stretch, at the beginning of a storage of their own."""
        found = self._fetched.get(key)
        if found is None:
            size, name = self._reach[key]
            device = self._link.device(name)
            if isinstance(key, tuple):
                found = self._link.borrow(key, size, device)
            else:
                found = self._link.unstage(torch.frombuffer(buffers[key], dtype=torch.uint8), device)
            self._fetched[key] = found
        return found


class TrialEncoding:
    """Stands for another link to find out what can travel over it: nothing is copied and no slot taken."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.takes_host = link.takes_host

    def takes(self, device: torch.device) -> bool:
        return self._link.takes(device)

    def name(self, device: torch.device) -> str:
        return self._link.name(device)

    def device(self, name: str) -> torch.device:
        return self._link.device(name)

    def lend(self, flat: torch.Tensor) -> Slot | None:
        return 0, 0

    def lend_whole(self, tensor: torch.Tensor, nbytes: int) -> Slot | None:
        return 0, 0

    def stage(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.empty(1, dtype=torch.uint8) for _ in flats]

    def borrow(self, slot: Slot, nbytes: int, device: torch.device) -> torch.Tensor:
        raise NotImplementedError("a trial receives nothing")

    def borrow_whole(self, slot: Slot, nbytes: int, device: torch.device, form: Form) -> torch.Tensor:
        raise NotImplementedError("a trial receives nothing")

    def unstage(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        raise NotImplementedError("a trial receives nothing")

    def take_back(self, slots: Sequence[Slot]) -> None:
        """Nothing was lent."""

    def decline(self, slots: Iterable[Slot]) -> None:
        """Nothing was borrowed."""


class Grounded:
    """A link for receiving only, without slots: what is staged stays on the host, to be looked at first."""

    takes_host = False

    def takes(self, device: torch.device) -> bool:
        return False

    def name(self, device: torch.device) -> str:
        raise NotImplementedError("nothing is sent from here")

    def device(self, name: str) -> torch.device:
        return torch.device("cpu")

    def lend(self, flat: torch.Tensor) -> Slot | None:
        return None

    def lend_whole(self, tensor: torch.Tensor, nbytes: int) -> Slot | None:
        return None

    def stage(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        raise NotImplementedError("nothing is sent from here")

    def borrow(self, slot: Slot, nbytes: int, device: torch.device) -> torch.Tensor:
        raise ProtocolError(f"slot {slot}, where no device memory is shared")

    def borrow_whole(self, slot: Slot, nbytes: int, device: torch.device, form: Form) -> torch.Tensor:
        return self.borrow(slot, nbytes, device)

    def unstage(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        return host

    def take_back(self, slots: Sequence[Slot]) -> None:
        """Nothing was lent."""

    def decline(self, slots: Iterable[Slot]) -> None:
        """Nothing was borrowed."""


def decline(payload: Payload, link: Link | None) -> None:
    """A message is not going to be read: let its slots go."""
    table = payload.tensors
    if link is not None and (table.parts or table.lent):
        slots = slots_of(table.parts) | {(segment, index) for segment, index, _ in table.lent}
        if slots:
            link.decline(slots)


def slots_of(parts: Iterable[Part]) -> set[Slot]:
    """The slots that parts lie in."""
    return {part.slot for part in parts if part.slot is not None}
