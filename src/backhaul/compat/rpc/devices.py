"""What workers say of their devices, which the reference lets all of them check, for all, before any of them starts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

import msgspec
from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from backhaul._devices.cuda import process
from backhaul._devices.placement import CPU, EVERYONE, index_of
from backhaul._rpc.cluster.membership_table import WorkerRecord
from backhaul._rpc.cluster.rendezvous import values_of
from backhaul._types import device_name
from backhaul.compat.rpc.options import TensorPipeRpcBackendOptions
from backhaul.errors import RendezvousError


class Said(msgspec.Struct, frozen=True):
    """What one worker says.

    Attributes:
        name: Its name.
        count: How many devices it has.
        maps: By worker, device here -> device there.
        devices: Those it uses, if it says so.
    """

    name: str
    count: int
    maps: Mapping[str, Mapping[str, str]]
    devices: Sequence[str] = ()


_said = msgspec.json.Decoder(Said)


def of_options(name: str, given: TensorPipeRpcBackendOptions) -> Said:
    """What a worker with these options says."""
    maps = {
        to: {device_name(ours): device_name(theirs) for ours, theirs in found.items()}
        for to, found in given.device_maps.items()
    }
    return Said(name, len(process.identities()), maps, [device_name(device) for device in given.devices])


def of_record(record: WorkerRecord) -> Said:
    """What a worker that is there already has said."""
    maps = {to: found for to, found in record.maps.items() if to != EVERYONE and not isinstance(found, str)}
    return Said(record.name, len(record.devices), maps)


def exchange(own: Said, rank: int, world_size: int, store: Store, timeout: float) -> list[Said]:
    """Tell the others; return what everyone says, by rank. Raises ``RendezvousError``."""
    began = time.monotonic()
    try:
        store.set_timeout(timedelta(seconds=timeout))
        store.set(f"devices/{rank}", msgspec.json.encode(own).decode())
    except (DistError, RuntimeError) as error:
        raise RendezvousError(f"the store does not answer: {error}") from error
    found = values_of(store, [f"devices/{other}" for other in range(world_size)], "devices", world_size, timeout, began)
    return [_said.decode(text) for text in found]


def check(everyone: Iterable[Said], *, complete: bool) -> None:
    """Raise ``ValueError`` if something that one of them says cannot be, the same at all of them.

    Args:
        everyone: Those who are there.
        complete: Whether there are no others.
    """
    known = {said.name: said for said in everyone}
    for said in known.values():
        _check_devices(said)
    for said in known.values():
        if complete and not said.maps.keys() <= known.keys():
            raise ValueError(
                f"Node {said.name} has invalid target node names in its device maps: they are for "
                f"{', '.join(sorted(said.maps))}, and there are {', '.join(sorted(known))}"
            )
        for to, found in said.maps.items():
            _check_map(said, known.get(to), to, found)


def _check_devices(said: Said) -> None:
    if len(set(said.devices)) < len(said.devices):
        raise ValueError(f"Node {said.name} has duplicated devices: {', '.join(said.devices)}")
    if not _has(said.count, said.devices):
        raise ValueError(f"Node {said.name} has devices with invalid indices: {_told(said.devices, said.count)}")


def _check_map(said: Said, other: Said | None, to: str, found: Mapping[str, str]) -> None:
    where = f"in its device map for {to}"
    if len(set(found.values())) < len(found):
        raise ValueError(f"Node {said.name} has duplicated target devices {where}: {dict(found)}")
    for side, owner, devices in (("source", said, found.keys()), ("target", other, found.values())):
        if owner is None:  # it may come later
            continue
        if owner.devices and not {*devices} <= {*owner.devices, CPU}:
            raise ValueError(
                f"Node {said.name} has unexpected {side} devices {where}: {', '.join(devices)}, where {owner.name} "
                f"uses {', '.join(owner.devices)}"
            )
        if not _has(owner.count, devices):
            raise ValueError(
                f"Node {said.name} has {side} devices with invalid indices {where}: {_told(devices, owner.count)}"
            )


def _has(count: int, devices: Iterable[str]) -> bool:
    return all(device == CPU or index_of(device) < count for device in devices)


def _told(devices: Iterable[str], count: int) -> str:
    return f"{', '.join(devices)}, where there are {count}"
