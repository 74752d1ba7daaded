"""The proxies of one module's tensors that are in use here.

A proxy names a place, for example the gradient of the third parameter. In one process, a tensor that a program has
kept stays what it is when another tensor takes its place. So before this worker replaces a tensor on its owner, the
proxies in use become references to the tensor that is there.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from backhaul._remote_tensors.addresses import Address, Kind, Message
from backhaul._remote_tensors.on_owner import keep
from backhaul._rref.handle import RRef


class LiveProxies:
    """The proxies of one module, except those of the parameters themselves. Thread-safe."""

    def __init__(self, container: RRef[Any]) -> None:
        self._container = container
        self._lock = threading.Lock()
        self._all: dict[Kind, dict[Any, list[weakref.ref[torch.Tensor]]]] = {}
        self._gradients: dict[int, torch.Tensor] = {}

    def add(self, proxy: torch.Tensor) -> None:
        """Remember a proxy while it is in use."""
        address: Address = proxy._address  # type: ignore[attr-defined]
        with self._lock:
            found = self._all.setdefault(address.kind, {}).setdefault(address.key, [])
            if not len(found) & (len(found) - 1):  # at powers of two
                found[:] = [each for each in found if each() is not None]
            found.append(weakref.ref(proxy))

    def gradient(self, index: int) -> torch.Tensor | None:
        """The proxy of a parameter's gradient, if there is one."""
        return self._gradients.get(index)

    def set_gradient(self, index: int, proxy: torch.Tensor) -> None:
        """Make ``proxy`` the one that ``.grad`` of a parameter is."""
        self.add(proxy)
        self._gradients[index] = proxy

    def is_kept(self, kind: Kind, index: int) -> bool:
        """Whether the program has a proxy of a tensor that is about to be replaced."""
        if kind == "gradient":
            self._gradients.pop(index, None)
        with self._lock:
            return any(each() is not None for each in self._all.get(kind, {}).get(index, ()))

    def keep(self, *kinds: Kind) -> None:
        """Let the proxies in use stand for the tensors that are there now, whatever replaces them."""
        for kind in kinds:
            if kind == "gradient":
                self._gradients.clear()
            with self._lock:
                listed = {
                    key: [proxy for each in found if (proxy := each()) is not None]
                    for key, found in self._all.pop(kind, {}).items()
                }
            in_use = {key: proxies for key, proxies in listed.items() if proxies}
            if not in_use:
                continue
            message = Message(self._container.owner().id)
            message.number(self._container)
            kept = message.send_and_wait(self._container, keep, kind, list(in_use), label="keep tensors")
            for proxies, reference in zip(in_use.values(), kept, strict=True):
                if reference is not None:
                    for proxy in proxies:
                        proxy._address = Address(reference)  # type: ignore[attr-defined]
