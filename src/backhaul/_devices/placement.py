"""On which device of its receiver a tensor arrives. Pure: workers are their records, devices are names.

A *route* is for the requests of one worker to another; replies and their gradients take it in the other direction. A
route follows the sender's map for the receiver. If there is no such map, it follows the receiver's map for the sender
in reverse, so one map is enough for both. If there is neither, a tensor arrives on the device of the same index.
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
"""Instead of a worker's name: all workers without a map of their own."""

Maps = Mapping[str, Mapping[str, str] | str]
"""For each worker: device here -> device there, or ``CPU`` if everything arrives on the CPU, in both directions. With
an empty map for ``EVERYONE``, no tensor of a device can go to a worker without a map of its own.
"""


class Party(Protocol):
    """A worker's record, as far as placement needs it."""

    @property
    def name(self) -> str: ...

    @property
    def devices(self) -> tuple[str, ...]:
        """The identities of its CUDA devices, by index. Equal identities mean the same hardware."""

    @property
    def maps(self) -> Maps: ...


def maps_of(device_maps: DeviceMaps | None, devices: str) -> dict[str, dict[str, str] | str]:
    """The maps of a worker's options, in the form in which the worker announces them to others."""
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
        sender: Name of the sender.
        receiver: Name of the receiver.
        map: Device of the sender -> device of the receiver. None: the same index.
        there: How many CUDA devices the receiver has.
        back: Whether it is the direction of replies.
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
        """Where a tensor of ``device`` arrives. Raises ``SerializationError``, which says what to do."""
        found = device if self.map is None else self.map.get(device, CPU if device == CPU else None)
        # The receiver may have joined after the map was checked, and may not have the device.
        if found is None or (found != CPU and index_of(found) >= self.there):
            why = f"a tensor on {device} {self._why_not(device)}"
            raise SerializationError(why, worker=self.receiver, device=device)
        return found

    def _why_not(self, device: str) -> str:
        # The option is the caller's. In the direction of replies the caller is the receiver.
        caller, callee = (self.receiver, self.sender) if self.back else (self.sender, self.receiver)
        whose = f" of worker '{caller}'" if self.back else ""
        entry = f"'cuda:0': '{device}'" if self.back else f"'{device}': 'cuda:0'"
        if self.map is not None:
            entries = ", ".join(f"{ours} -> {theirs}" for ours, theirs in sorted(self.map.items())) or "nothing"
            have = f" and that worker has {self.there or 'no'} CUDA device{'' if self.there == 1 else 's'}"
            lacks = "" if device not in self.map else have
            trouble = f"has no place at worker '{self.receiver}': its map says {entries}{lacks}"
        else:
            have = f"has {self.there or 'no'} CUDA device{'' if self.there == 1 else 's'}"
            trouble = f"has no place at worker '{self.receiver}', which {have}"
        other = f"{{'{callee}': {{{entry}}}}}" if self.there else ""
        ways = [f"Options.devices.maps{whose} to {way}" for way in (other, f"{{'{callee}': 'cpu'}}") if way]
        return f"{trouble}; set {', or '.join(ways)} to have it arrive on the CPU"


def index_of(device: str) -> int:
    """The index of a CUDA device."""
    return int(device.removeprefix("cuda:"))


def _map_of_requests(sender: Party, receiver: Party) -> Mapping[str, str] | str | None:
    """The map for the sender's requests, by the maps of both workers."""
    own, other = sender.maps.get(receiver.name), receiver.maps.get(sender.name)
    rest = sender.maps.get(EVERYONE)
    if own is None and isinstance(rest, Mapping):
        own = rest
    if own is not None:
        return own if isinstance(own, str) else _checked(own)
    if other is not None:
        return other if isinstance(other, str) else _reversed(other)
    return CPU if CPU in (rest, receiver.maps.get(EVERYONE)) else None


def _reversed(found: Mapping[str, str]) -> dict[str, str]:
    return {theirs: ours for ours, theirs in _checked(found).items()}


def _checked(found: Mapping[str, str]) -> Mapping[str, str]:
    """Return a map if it is possible; raise ``ProtocolError`` if not, as it may come from another worker."""
    try:
        names = [device_name(name) for name in (*found, *found.values())]
    except ValueError as error:
        raise ProtocolError(f"a worker announces an impossible map of devices: {error}") from None
    if names != [*found, *found.values()] or len(set(found.values())) < len(found):
        raise ProtocolError(f"a worker announces an impossible map of devices: {found}")
    return found


def onward(sender: Party, receiver: Party) -> Route:
    """The route of the sender's requests."""
    return _route(sender, receiver, _map_of_requests(sender, receiver), back=False)


def backward(sender: Party, receiver: Party) -> Route:
    """The route of the sender's replies to the receiver's requests."""
    found = _map_of_requests(receiver, sender)
    reverse = found if found is None or isinstance(found, str) else _reversed(found)
    return _route(sender, receiver, reverse, back=True)


def _route(sender: Party, receiver: Party, found: Mapping[str, str] | str | None, *, back: bool) -> Route:
    if isinstance(found, str):
        found = {f"cuda:{index}": CPU for index in range(len(sender.devices))}
    return Route(sender.name, receiver.name, found, len(receiver.devices), back)


def same_device(one: Party, other: Party, device: str) -> int | None:
    """The index at ``one`` of the hardware that ``other`` calls ``device``; None if ``one`` does not see it."""
    index = index_of(device)
    if index < len(other.devices) and other.devices[index] in one.devices:
        return one.devices.index(other.devices[index])
    return None


def check(own: Party, others: Iterable[Party]) -> None:
    """Raise ``ValueError`` if a worker's maps name devices that it or another worker does not have. Warn about maps for
    workers that do not exist.

    Args:
        own: The worker.
        others: The workers that it knows; it may be among them.
    """
    known = {other.name: other for other in others}
    for to, found in own.maps.items():
        where = f"device_maps of worker '{own.name}' for '{to}'"
        if to not in known and to != EVERYONE:
            log.warning(
                "%s: there is no worker of that name yet; known workers: %s", where, ", ".join(sorted(known)) or "none"
            )
        for ours, theirs in found.items() if not isinstance(found, str) else ():
            _check_exists(own, ours, where)
            if to in known:
                _check_exists(known[to], theirs, where)


def _check_exists(party: Party, device: str, where: str) -> None:
    if device == CPU or index_of(device) < len(party.devices):
        return
    have = ", ".join(f"cuda:{index}" for index in range(len(party.devices))) or "no CUDA devices"
    raise ValueError(f"{where} names {device} of worker '{party.name}', which has {have}")
