"""How the reference says what ``backhaul.Options`` says."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from backhaul._options import Devices, Options
from backhaul.compat.rpc import constants

Device = int | str | torch.device


class RpcBackendOptions:
    """What every backend can be told.

    Attributes:
        rpc_timeout: Seconds a call may take; 0 means any time.
        init_method: Where the workers meet.
    """

    def __init__(
        self,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
    ) -> None:
        if isinstance(rpc_timeout, bool) or not isinstance(rpc_timeout, numbers.Real):
            raise TypeError(
                f"incompatible constructor arguments: rpc_timeout is a number of seconds, not {rpc_timeout!r}"
            )
        self.rpc_timeout: float = float(rpc_timeout)
        self.init_method = init_method


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """Options of the default backend. The name is the reference's: what runs is Backhaul.

    Args:
        num_worker_threads: How many handlers run at once.
        rpc_timeout: Seconds a call may take; 0 means any time.
        init_method: Where the workers meet.
        device_maps: By callee, which of its devices stands for which of ours.
        devices: The devices this worker uses.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[Device, Device]] | None = None,
        devices: Sequence[Device] | None = None,
        _transports: Any = None,
        _channels: Any = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        self.num_worker_threads = num_worker_threads
        self.device_maps = {to: _one_to_one(map_) for to, map_ in (device_maps or {}).items()}
        self.devices: list[torch.device] = []
        self.set_devices([] if devices is None else devices)

    def set_device_map(self, to: str, device_map: Mapping[Device, Device]) -> None:
        """Add to the device map for ``to``."""
        given = _one_to_one(device_map)
        known = self.device_maps.setdefault(to, {})
        for ours, theirs in given.items():
            if known.get(ours, theirs) != theirs:
                raise ValueError(
                    f"`set_device_map` only supports 1-to-1 mapping, trying to map {ours} to {theirs} and {known[ours]}"
                )
            known[ours] = theirs

    def set_devices(self, devices: Sequence[Device]) -> None:
        """Say which CUDA devices this worker uses."""
        if isinstance(devices, (str, int)):
            raise TypeError(f"`devices` is a list of CUDA devices, not {devices!r}")
        self.devices = [_device(device) for device in devices]
        for device in self.devices:
            if device.type != "cuda":
                raise ValueError(f"`set_devices` expect a list of CUDA devices, but got device type {device.type}.")


def _device(given: Device) -> torch.device:
    """An index is one of CUDA's. Torch alone would fail on it where it sees no device, and say nothing of options."""
    return torch.device("cuda", given) if isinstance(given, int) else torch.device(given)


def _one_to_one(device_map: Mapping[Device, Device]) -> dict[torch.device, torch.device]:
    if not isinstance(device_map, Mapping):
        raise TypeError(f"a device map is a dict from our devices to theirs, not {device_map!r}")
    made = {_device(ours): _device(theirs) for ours, theirs in device_map.items()}
    if len(set(made.values())) < len(made):
        raise ValueError(f"`device_map` only supports 1-to-1 mapping, got {made}")
    return made


class _Options(Options):
    """Backhaul's, with the reference's manners."""

    follows_reference = True


def to_options(given: TensorPipeRpcBackendOptions) -> Options:
    """What Backhaul is to be told. Here, as in the reference, no tensor of a device travels without a map."""
    return _Options(
        timeout=given.rpc_timeout,
        threads=given.num_worker_threads,
        rendezvous_timeout=constants.RENDEZVOUS_TIMEOUT,
        devices=Devices(maps=given.device_maps or None, placement="mapped"),
    )
