"""The changes of a module on another worker that are not known to be made; see [Note: pending changes] in
``module_gradients``.
"""

from __future__ import annotations

from typing import Any

import torch

from backhaul._remote_tensors.changes_on_owner import Changes
from backhaul._rpc.futures import Future


class _Carrier:
    """A forward that carries changes. Once it is done, this keeps neither its result nor its error."""

    def __init__(self, number: int, forward: Future[Any]) -> None:
        self.number = number
        self._forward: Future[Any] | None = forward
        self._succeeded = False
        forward._when_done(self._note)

    def _note(self, _: Any) -> None:
        forward = self._forward
        if forward is not None:
            self._succeeded = forward._failure() is None
            self._forward = None

    def is_done(self) -> bool:
        """Whether the forward was answered."""
        forward = self._forward
        if forward is not None and forward.done():
            self._note(forward)  # the thread that waited for the forward may be faster than its callbacks
        return self._forward is None

    def has_arrived(self) -> bool:
        """Whether the owner has made the changes. If the forward fails, nobody knows."""
        return self.is_done() and self._succeeded


class PendingChanges:
    """The changes of one module that are not known to be made. The caller of each method holds the modules' lock."""

    def __init__(self) -> None:
        self.cleared: dict[int, None] = {}
        self.zeroed: dict[int, None] = {}
        self.assigned: dict[int, torch.Tensor] = {}
        self.requires_grad: dict[int, bool] = {}
        self._sent: list[Changes] = []
        self._carriers: list[_Carrier] = []

    def is_empty(self) -> bool:
        """Whether all changes are known to be made."""
        return not (self._sent or self.has_new())

    def has_new(self) -> bool:
        """Whether there are changes that were not sent yet."""
        return bool(self.cleared or self.zeroed or self.assigned or self.requires_grad)

    def take_new(self, number: int) -> Changes | None:
        """The changes that were not sent yet, under a number. They count as sent."""
        if not self.has_new():
            return None
        changes = Changes(number, tuple(self.cleared), tuple(self.zeroed), self.assigned, self.requires_grad)
        self.cleared, self.zeroed, self.assigned, self.requires_grad = {}, {}, {}, {}
        self._sent.append(changes)
        return changes

    def sent(self) -> list[Changes]:
        """The changes that were sent, but are not known to be made."""
        for carrier in self._carriers:
            if carrier.has_arrived():
                self.confirm(carrier.number)
        self._carriers = [carrier for carrier in self._carriers if not carrier.is_done()]
        return list(self._sent)

    def carried_by(self, forward: Future[Any], number: int) -> None:
        """A forward carries the changes up to that number."""
        self._carriers.append(_Carrier(number, forward))

    def confirm(self, number: int) -> None:
        """The changes up to that number are made."""
        self._sent = [each for each in self._sent if each.number > number]
