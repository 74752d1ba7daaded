"""The reference's options, and their conversion to ``backhaul.Options``."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from backhaul._options import Devices, Options
from backhaul.compat.rpc import constants

Device = int | str | torch.device


class RpcBackendOptions:
    """The options that every backend has.

    Attributes:
        rpc_timeout: Seconds after which a call times out. 0 means no limit.
        init_method: The URL of the store through which the workers find each other.
    """

    def __init__(
        self,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
    ) -> None:
        if isinstance(rpc_timeout, bool) or not isinstance(rpc_timeout, numbers.Real):
            raise TypeError(
                f"incompatible constructor arguments: rpc_timeout must be a number of seconds, not {rpc_timeout!r}"
            )
        self.rpc_timeout: float = float(rpc_timeout)
        self.init_method = init_method


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """The options of the default backend, which is Backhaul. The class has the reference's name.

    Args:
        num_worker_threads: How many handlers run at the same time.
        rpc_timeout: Seconds after which a call times out. 0 means no limit.
        init_method: The URL of the store through which the workers find each other.
        device_maps: By callee: device of this worker -> device of the callee.
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
        added = _one_to_one(device_map)
        known = self.device_maps.setdefault(to, {})
        for source, target in added.items():
            if known.get(source, target) != target:
                raise ValueError(
                    f"`set_device_map` only supports 1-to-1 mapping, trying to map {source} to {target} and "
                    f"{known[source]}"
                )
            known[source] = target

    def set_devices(self, devices: Sequence[Device]) -> None:
        """Set the CUDA devices that this worker uses."""
        if isinstance(devices, (str, int)):
            raise TypeError(f"`devices` must be a list of CUDA devices, not {devices!r}")
        self.devices = [_device(device) for device in devices]
        for device in self.devices:
            if device.type != "cuda":
                raise ValueError(f"`set_devices` expect a list of CUDA devices, but got device type {device.type}.")


def _device(given: Device) -> torch.device:
    """A device. An index means a CUDA device.

    ``torch.device(0)`` fails where torch sees no device, and its error does not mention the options.
    """
    return torch.device("cuda", given) if isinstance(given, int) else torch.device(given)


def _one_to_one(device_map: Mapping[Device, Device]) -> dict[torch.device, torch.device]:
    if not isinstance(device_map, Mapping):
        raise TypeError(
            f"a device map must be a dict from devices of this worker to devices of the callee, not {device_map!r}"
        )
    made = {_device(source): _device(target) for source, target in device_map.items()}
    if len(set(made.values())) < len(made):
        raise ValueError(f"`device_map` only supports 1-to-1 mapping, got {made}")
    return made


class _CompatOptions(Options):
    """Options of a worker that behaves like the reference where Backhaul differs from it."""

    follows_reference = True


def to_options(options: TensorPipeRpcBackendOptions) -> Options:
    """Backhaul's options. As in the reference, a tensor on a device cannot be sent without a device map."""
    return _CompatOptions(
        timeout=options.rpc_timeout,
        threads=options.num_worker_threads,
        autograd="context",
        rendezvous_timeout=constants.RENDEZVOUS_TIMEOUT,
        devices=Devices(maps=options.device_maps or None, placement="mapped"),
    )
