"""Keeps and restores the random state of a worker for those that call it. ``random_marks`` says when."""

from __future__ import annotations

from typing import Any

import torch

from backhaul._rpc.cluster.peers import Peer, Peers
from backhaul._rpc.interceptors import Interceptors
from backhaul._rpc.random_marks import NONE, RandomNote, marks
from backhaul._wire.codec import Encoded
from backhaul._wire.messages import pack, unpack
from backhaul._worker.worker import Worker, running_workers
from backhaul.errors import BackhaulError

State = tuple[torch.Tensor, list[torch.Tensor]]
"""The random state of the process, and those of its CUDA devices."""


class RandomStates:
    """The interceptor of one worker. Thread-safe: one call of a caller comes after another, unless the caller does not
    wait; then torch too draws numbers in any order.
    """

    key = "random"

    def __init__(self, worker: Worker, peers: Peers, interceptors: Interceptors) -> None:
        self._worker = worker
        self._kept: dict[str, dict[int, State]] = {}  # by the incarnation of the caller
        self._here: dict[str, bool] = {}  # whether a worker, by its incarnation, is in this process
        peers.on_change(self._on_change)
        worker.on_close(lambda: marks.forget_calls_of(worker.incarnation))
        interceptors.add(self, from_untrusted=False)

    def _on_change(self, what: str, peer: Peer, reason: str) -> None:
        if what in ("left", "replaced"):
            marks.forget(self._worker.incarnation, peer.record.incarnation)
            self._kept.pop(peer.record.incarnation, None)
            self._here.pop(peer.record.incarnation, None)

    def _shares_state(self, peer: Peer) -> bool:
        """Whether the peer is in this process: it has the random state that the program itself restores."""
        incarnation = peer.record.incarnation
        found = self._here.get(incarnation)
        if found is None:
            here = any(worker.incarnation == incarnation for worker in running_workers())
            found = self._here[incarnation] = here
        return found

    def request_out(self, peer: Peer, encoded: Encoded) -> tuple[bytes | None, Any]:
        if not marks.any or peer.plain or self._shares_state(peer):
            return None, None
        note = marks.call(self._worker.incarnation, peer.record.incarnation)
        return None if note is None else pack(note), None

    def request_in(self, peer: Peer, note: bytes | None, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        if note is not None:
            self._follow(peer, unpack(note, RandomNote))
        return tensors, None

    def _follow(self, peer: Peer, note: RandomNote) -> None:
        kept = self._kept.setdefault(peer.record.incarnation, {})
        for number in note.drop:
            kept.pop(number, None)
        if note.keep != NONE:
            kept[note.keep] = _take()
        if note.restore != NONE:
            state = kept.get(note.restore)
            if state is None:
                raise BackhaulError(
                    f"worker '{self._worker.name}' cannot go back to the random state that '{peer.info.name}' "
                    "restores: the call that should have kept it failed; run the forward pass again"
                )
            _restore(state)
        if not kept:
            del self._kept[peer.record.incarnation]

    def reply_out(self, peer: Peer, kept: Any, encoded: Encoded) -> bytes | None:
        return None

    def reply_in(self, peer: Peer, kept: Any, note: bytes | None, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return tensors

    def discard(self, peer: Peer, note: bytes) -> None:
        """A state that was not kept is missed if the program restores it."""

    def failed(self, peer: Peer, note: bytes) -> None:
        """As for ``discard``."""


def _take() -> State:
    """The state of this process. It is a mark here, so that restoring it reaches the workers that this one calls."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), devices


def _restore(state: State) -> None:
    process, devices = state
    torch.set_rng_state(process)
    for index, device in enumerate(devices):
        torch.cuda.set_rng_state(device, index)
