"""On which device of its receiver a tensor arrives. Pure: workers are what they say of themselves, devices are names.

A *route* is for the requests of one worker to another; replies and gradients take it back, the other way round. It
follows the sender's map for the receiver. Where there is none it is the way back of the receiver's map for the sender,
so that one map is enough for both; and where there is none either, a tensor arrives on the device of the same index.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from backhaul._types import DeviceMaps, device_name
from backhaul.errors import ProtocolError, SerializationError

log = logging.getLogger("backhaul")

CPU = "cpu"
MAPPED = "mapped"
EVERYONE = "*"
"""In the place of a worker's name: all for whom there is no other map."""

Maps = Mapping[str, Mapping[str, str] | str]
"""By worker: device here -> device there, or ``CPU`` where everything arrives on the CPU, both ways. With an empty map
for ``EVERYONE`` nothing of a device goes to a worker that has no other.
"""


class Party(Protocol):
    """What a worker says of itself."""

    @property
    def name(self) -> str: ...

    @property
    def devices(self) -> tuple[str, ...]:
        """What its CUDA devices are, by index, so that they can be known again."""

    @property
    def maps(self) -> Maps: ...


def maps_of(device_maps: DeviceMaps | None, devices: str) -> dict[str, dict[str, str] | str]:
    """The maps that a worker's options say, in the form in which it tells them to others."""
    made: dict[str, dict[str, str] | str] = {EVERYONE: CPU} if devices == CPU else {}
    if devices == MAPPED:
        made[EVERYONE] = {}
    for to, given in (device_maps or {}).items():
        if isinstance(given, str):
            made[to] = CPU
        else:
            made[to] = {device_name(ours): device_name(theirs) for ours, theirs in given.items()}
    return made


@dataclass(frozen=True, slots=True)
class Route:
    """Where the tensors of one worker arrive at another.

    Attributes:
        sender: Its name.
        receiver: Its name.
        map: Device of the sender -> device of the receiver. None: the same.
        there: How many CUDA devices the receiver has.
        back: Whether it is the way of replies.
    """

    sender: str
    receiver: str
    map: Mapping[str, str] | None
    there: int
    back: bool = False

    @property
    def takes_host(self) -> bool:
        """Whether CPU tensors arrive on a device."""
        return self.map is not None and self.map.get(CPU, CPU) != CPU

    def target(self, device: str) -> str:
        """Where a tensor of ``device`` arrives. Raises ``SerializationError`` that says what to do."""
        found = device if self.map is None else self.map.get(device, CPU if device == CPU else None)
        if found is None or (found != CPU and index_of(found) >= self.there):  # who joined later may not have it
            why = f"a tensor on {device} {self._why_not(device)}"
            raise SerializationError(why, worker=self.receiver, device=device)
        return found

    def _why_not(self, device: str) -> str:
        # The option is the caller's; on the way back that is the receiver.
        caller, callee = (self.receiver, self.sender) if self.back else (self.sender, self.receiver)
        whose = f" of worker '{caller}'" if self.back else ""
        entry = f"'cuda:0': '{device}'" if self.back else f"'{device}': 'cuda:0'"
        if self.map is not None:
            told = ", ".join(f"{ours} -> {theirs}" for ours, theirs in sorted(self.map.items())) or "nothing"
            have = f" and that worker has {self.there or 'no'} CUDA device{'' if self.there == 1 else 's'}"
            lacks = "" if device not in self.map else have
            trouble = f"has no place at worker '{self.receiver}': its map says {told}{lacks}"
        else:
            have = f"has {self.there or 'no'} CUDA device{'' if self.there == 1 else 's'}"
            trouble = f"has no place at worker '{self.receiver}', which {have}"
        other = f"{{'{callee}': {{{entry}}}}}" if self.there else ""
        ways = [f"Options.device_maps{whose} to {way}" for way in (other, f"{{'{callee}': 'cpu'}}") if way]
        return f"{trouble}; set {', or '.join(ways)} to have it arrive on the CPU"


def index_of(device: str) -> int:
    """The index of a CUDA device."""
    return int(device.removeprefix("cuda:"))


def _told(sender: Party, receiver: Party) -> Mapping[str, str] | str | None:
    """What the two say about the sender's requests."""
    own, other = sender.maps.get(receiver.name), receiver.maps.get(sender.name)
    rest = sender.maps.get(EVERYONE)
    if own is None and isinstance(rest, Mapping):
        own = rest
    if own is not None:
        return own if isinstance(own, str) else _sound(own)
    if other is not None:
        return other if isinstance(other, str) else _turned(other)
    return CPU if CPU in (rest, receiver.maps.get(EVERYONE)) else None


def _turned(found: Mapping[str, str]) -> dict[str, str]:
    return {theirs: ours for ours, theirs in _sound(found).items()}


def _sound(found: Mapping[str, str]) -> Mapping[str, str]:
    """A map as it is, if it can be one: the other worker may have said anything."""
    try:
        names = [device_name(name) for name in (*found, *found.values())]
    except ValueError as error:
        raise ProtocolError(f"an impossible map of devices: {error}") from None
    if names != [*found, *found.values()] or len(set(found.values())) < len(found):
        raise ProtocolError(f"an impossible map of devices: {found}")
    return found


def onward(sender: Party, receiver: Party) -> Route:
    """The route of the sender's requests."""
    return _route(sender, receiver, _told(sender, receiver), back=False)


def backward(sender: Party, receiver: Party) -> Route:
    """The route of the sender's replies to the receiver's requests."""
    told = _told(receiver, sender)
    return _route(sender, receiver, told if told is None or isinstance(told, str) else _turned(told), back=True)


def _route(sender: Party, receiver: Party, told: Mapping[str, str] | str | None, *, back: bool) -> Route:
    if isinstance(told, str):
        told = {f"cuda:{index}": CPU for index in range(len(sender.devices))}
    return Route(sender.name, receiver.name, told, len(receiver.devices), back)


def same_device(one: Party, other: Party, device: str) -> int | None:
    """The index at ``one`` of what ``other`` calls ``device``, if it is there too."""
    index = index_of(device)
    if index < len(other.devices) and other.devices[index] in one.devices:
        return one.devices.index(other.devices[index])
    return None


def check(own: Party, others: Iterable[Party]) -> None:
    """Raise ``ValueError`` if a worker's maps do not fit it and those it knows; warn of maps for nobody.

    Args:
        own: The worker.
        others: Those it knows; it may be among them.
    """
    known = {other.name: other for other in others}
    for to, found in own.maps.items():
        mine = f"device_maps of worker '{own.name}' for '{to}'"
        if to not in known and to != EVERYONE:
            log.warning("%s: there is no such worker yet; there are: %s", mine, ", ".join(sorted(known)) or "none")
        for ours, theirs in found.items() if not isinstance(found, str) else ():
            _check_exists(own, ours, mine)
            if to in known:
                _check_exists(known[to], theirs, mine)


def _check_exists(party: Party, device: str, where: str) -> None:
    if device == CPU or index_of(device) < len(party.devices):
        return
    have = ", ".join(f"cuda:{index}" for index in range(len(party.devices))) or "no CUDA devices"
    raise ValueError(f"{where} names {device} of worker '{party.name}', which has {have}")
