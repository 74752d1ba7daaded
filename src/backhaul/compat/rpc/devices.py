"""The devices and device maps that workers declare.

As in the reference, every worker checks the declarations of all workers before any of them starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from backhaul._devices.cuda import process
from backhaul._devices.placement import CPU, EVERYONE, index_of
from backhaul._rpc.cluster.membership_table import WorkerRecord
from backhaul._rpc.cluster.rendezvous import StoreRendezvous
from backhaul._types import device_name
from backhaul.compat.rpc.options import TensorPipeRpcBackendOptions


class DeviceDeclaration(msgspec.Struct, frozen=True):
    """The devices of one worker.

    Attributes:
        name: The worker's name.
        count: How many devices it has.
        maps: By callee: device of this worker -> device of the callee.
        devices: The devices it uses. Empty if its options do not list them.
    """

    name: str
    count: int
    maps: Mapping[str, Mapping[str, str]]
    devices: Sequence[str] = ()


_decoder = msgspec.json.Decoder(DeviceDeclaration)


def from_options(name: str, options: TensorPipeRpcBackendOptions) -> DeviceDeclaration:
    """The declaration of this process, as a worker with these options."""
    maps = {
        to: {device_name(source): device_name(target) for source, target in device_map.items()}
        for to, device_map in options.device_maps.items()
    }
    devices = [device_name(device) for device in options.devices]
    return DeviceDeclaration(name, len(process.identities()), maps, devices)


def from_record(record: WorkerRecord) -> DeviceDeclaration:
    """The declaration of a worker that is already a member."""
    maps = {to: found for to, found in record.maps.items() if to != EVERYONE and not isinstance(found, str)}
    return DeviceDeclaration(record.name, len(record.devices), maps)


def exchange(
    own: DeviceDeclaration, rank: int, world_size: int, store: Store, timeout: float
) -> list[DeviceDeclaration]:
    """Publish the declaration of this worker; return those of all workers, by rank. Raises ``RendezvousError``."""
    rendezvous = StoreRendezvous(PrefixStore("devices", store), rank, world_size, timeout)
    return [_decoder.decode(text) for text in rendezvous.meet(msgspec.json.encode(own))]


def check(declarations: Iterable[DeviceDeclaration], *, complete: bool) -> None:
    """Raise ``ValueError`` if a declaration is invalid. All workers raise the same error.

    Args:
        declarations: One of each worker that has joined.
        complete: Whether no other worker can join.
    """
    known = {each.name: each for each in declarations}
    for each in known.values():
        _check_devices(each)
    for each in known.values():
        if complete and not each.maps.keys() <= known.keys():
            raise ValueError(
                f"Node {each.name} has invalid target node names in its device maps: it has device maps for "
                f"{', '.join(sorted(each.maps))}, but the workers are {', '.join(sorted(known))}"
            )
        for to, device_map in each.maps.items():
            _check_map(each, known.get(to), to, device_map)


def _check_devices(own: DeviceDeclaration) -> None:
    if len(set(own.devices)) < len(own.devices):
        raise ValueError(f"Node {own.name} has duplicated devices: {', '.join(own.devices)}")
    if not _has(own.count, own.devices):
        raise ValueError(
            f"Node {own.name} has devices with invalid indices: {_list_of_devices(own.devices)}, but the worker has "
            f"{own.count} devices"
        )


def _check_map(
    own: DeviceDeclaration, callee: DeviceDeclaration | None, to: str, device_map: Mapping[str, str]
) -> None:
    where = f"in its device map for {to}"
    if len(set(device_map.values())) < len(device_map):
        raise ValueError(f"Node {own.name} has duplicated target devices {where}: {dict(device_map)}")
    for side, owner, devices in (("source", own, device_map.keys()), ("target", callee, device_map.values())):
        if owner is None:  # the callee may join later
            continue
        if owner.devices and not {*devices} <= {*owner.devices, CPU}:
            raise ValueError(
                f"Node {own.name} has unexpected {side} devices {where}: {_list_of_devices(devices)}, but worker "
                f"{owner.name} uses {_list_of_devices(owner.devices)}"
            )
        if not _has(owner.count, devices):
            raise ValueError(
                f"Node {own.name} has {side} devices with invalid indices {where}: {_list_of_devices(devices)}, but "
                f"worker {owner.name} has {owner.count} devices"
            )


def _has(count: int, devices: Iterable[str]) -> bool:
    return all(device == CPU or index_of(device) < count for device in devices)


def _list_of_devices(devices: Iterable[str]) -> str:
    return ", ".join(devices)
