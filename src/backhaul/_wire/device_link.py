"""What a message needs to carry tensors of a device: the ``Link`` between two workers, as the codec sees it, and the
handling of the device memory of one message on its way out and in. Knows no CUDA: tests use a link over CPU memory.

Device memory travels as contiguous bytes, in one of two ways. It is *lent*: copied into a *slot* of device memory that
the receiver has opened, and the message names the slot. Or it is *staged*: copied to the host and put into the frame's
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
"""The number of a segment, and the index of a slot in it."""

_DEVICE = re.compile(r"cuda:(0|[1-9][0-9]{0,2})")


def is_device(name: str) -> bool:
    """Whether ``name`` names a device in the form that messages use."""
    return _DEVICE.fullmatch(name) is not None


class Form(NamedTuple):
    """The layout of a tensor in its memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Link(Protocol):
    """How device memory travels between two workers, as one of them sees it. Thread-safe; no method waits for the peer.

    All work on tensors is queued on the current streams of the calling thread.

    Attributes:
        takes_host: Whether CPU tensors go through the link too, because they are to arrive on a device.
    """

    takes_host: bool

    def takes(self, device: torch.device) -> bool:
        """Whether tensors of a device go through this link."""

    def name(self, device: torch.device) -> str:
        """The peer's name of the device on which tensors of ``device`` arrive; "": its CPU.

        Raises:
            SerializationError: The tensor has no place at the peer. The error says what to do about it.
        """

    def device(self, name: str) -> torch.device:
        """The device of this worker that the peer names. Raises ``ProtocolError`` if there is none."""

    def lend(self, flat: torch.Tensor) -> Slot | None:
        """Copy bytes into a slot; None if there is no slot for them now."""

    def lend_whole(self, tensor: torch.Tensor, nbytes: int) -> Slot | None:
        """Copy the bytes of a tensor without gaps into a slot; None if there is no slot for them now."""

    def stage(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy bytes to the host. Once this returns, the copies are complete."""

    def borrow(self, slot: Slot, nbytes: int, device: torch.device) -> torch.Tensor:
        """The bytes in a slot, as a tensor with a storage of its own. The slot goes back when that storage is gone.

        Raises ``ProtocolError`` unless the slot is lent, that large, on that device, and not borrowed already.
        """

    def borrow_whole(self, slot: Slot, nbytes: int, device: torch.device, form: Form) -> torch.Tensor:
        """The first ``nbytes`` bytes of a slot as a tensor of that form."""

    def unstage(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy bytes from the host to a device, into a new storage."""

    def take_back(self, slots: Sequence[Slot]) -> None:
        """Free slots that were lent and never named to the peer. Takes no lock: destructors call it."""

    def decline(self, slots: Iterable[Slot]) -> None:
        """Give slots back to the peer that it has lent in a message which nobody reads."""


class Lease:
    """The slots that one message takes with it. They are freed with this object, unless the message was handed to a
    channel: from then on the receiver returns them.
    """

    __slots__ = ("link", "sent", "slots")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.slots: list[Slot] = []
        self.sent = False

    def end(self) -> None:
        """Free the slots at once, because the message is not going to be sent."""
        slots, self.slots = self.slots, []
        if slots and not self.sent:
            self.link.take_back(slots)

    def __del__(self) -> None:
        self.end()


def flat_bytes(tensor: torch.Tensor, start: int, nbytes: int) -> torch.Tensor:
    """A part of the storage behind a tensor, as bytes."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(tensor.untyped_storage(), start, (nbytes,), (1,))


class Shipment:
    """Device memory of one message on its way out. Memory without a slot is staged, all of it together."""

    __slots__ = ("_link", "_waiting", "lease")

    def __init__(self, link: Link) -> None:
        self._link = link
        self._waiting: list[tuple[int, torch.Tensor]] = []
        self.lease = Lease(link)

    def put(self, flat: torch.Tensor, name: str, buffers: list[Buffer]) -> tuple[int, Slot | None]:
        """Put bytes into a slot, or reserve a place in ``buffers``; return the buffer's index, and the slot."""
        slot = self._link.lend(flat) if name else None
        if slot is not None:
            self.lease.slots.append(slot)
            return -1, slot
        self._waiting.append((len(buffers), flat))
        buffers.append(b"")
        return len(buffers) - 1, None

    def finish(self, buffers: list[Buffer], keep: list[torch.Tensor]) -> None:
        """Fill the reserved places in ``buffers``."""
        if not self._waiting:
            return
        staged = self._link.stage([flat for _, flat in self._waiting])
        for (place, _), host in zip(self._waiting, staged, strict=True):
            buffers[place] = block_type(len(host)).from_address(host.data_ptr())
            keep.append(host)


class Arrival:
    """Device memory of one message that has come in. Each slot or buffer is fetched once for all tensors on it."""

    __slots__ = ("_fetched", "_link", "_reach")

    def __init__(self, link: Link) -> None:
        self._link = link
        self._reach: dict[Slot | int, tuple[int, str]] = {}  # of each slot or buffer: size and device
        self._fetched: dict[Slot | int, torch.Tensor] = {}

    def announce(self, key: Slot | int, nbytes: int, device: str) -> None:
        """A tensor uses the first ``nbytes`` of a slot or, if ``key`` is a number, of that buffer."""
        size, known = self._reach.get(key, (0, device))
        if known != device:
            raise ProtocolError(f"the message places {key} both on {known!r} and on {device!r}")
        self._reach[key] = max(size, nbytes), device

    def device(self, name: str) -> torch.device:
        """The device of this worker that the peer names."""
        return self._link.device(name)

    def fetch(self, key: Slot | int, buffers: Sequence[Buffer]) -> torch.Tensor:
        """The bytes of a slot or buffer, at the beginning of a storage of their own."""
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
    """Stands in for another link, to find out what can travel over it. Copies nothing and takes no slot."""

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
        raise NotImplementedError("TrialEncoding receives nothing")

    def borrow_whole(self, slot: Slot, nbytes: int, device: torch.device, form: Form) -> torch.Tensor:
        raise NotImplementedError("TrialEncoding receives nothing")

    def unstage(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        raise NotImplementedError("TrialEncoding receives nothing")

    def take_back(self, slots: Sequence[Slot]) -> None:
        """Nothing was lent."""

    def decline(self, slots: Iterable[Slot]) -> None:
        """Nothing was borrowed."""


class HostLink:
    """A link that only receives, without slots. Staged memory stays on the host, to be checked first."""

    takes_host = False

    def takes(self, device: torch.device) -> bool:
        return False

    def name(self, device: torch.device) -> str:
        raise NotImplementedError("HostLink sends nothing")

    def device(self, name: str) -> torch.device:
        return torch.device("cpu")

    def lend(self, flat: torch.Tensor) -> Slot | None:
        return None

    def lend_whole(self, tensor: torch.Tensor, nbytes: int) -> Slot | None:
        return None

    def stage(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        raise NotImplementedError("HostLink sends nothing")

    def borrow(self, slot: Slot, nbytes: int, device: torch.device) -> torch.Tensor:
        raise ProtocolError(f"the peer names slot {slot}, but no device memory is shared with it")

    def borrow_whole(self, slot: Slot, nbytes: int, device: torch.device, form: Form) -> torch.Tensor:
        return self.borrow(slot, nbytes, device)

    def unstage(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        return host

    def take_back(self, slots: Sequence[Slot]) -> None:
        """Nothing was lent."""

    def decline(self, slots: Iterable[Slot]) -> None:
        """Nothing was borrowed."""


def decline(payload: Payload, link: Link | None) -> None:
    """Give back the slots of a message that nobody reads."""
    table = payload.tensors
    if link is not None and (table.parts or table.lent):
        slots = slots_of(table.parts) | {(segment, index) for segment, index, _ in table.lent}
        if slots:
            link.decline(slots)


def slots_of(parts: Iterable[Part]) -> set[Slot]:
    """The slots in which parts lie."""
    return {part.slot for part in parts if part.slot is not None}
