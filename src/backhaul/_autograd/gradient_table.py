"""The gradients that a context holds on one worker, by leaf. Knows nothing of messages and passes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from backhaul._autograd.forward.functions import add
from backhaul._devices import seam
from backhaul._devices.seam import Mark

Key = Any
"""What a gradient belongs to: a leaf or, in a table of results, any tensor or edge that the user named."""

Contributions = list[tuple[tuple[int, ...], torch.Tensor]]
"""Gradients that are still to be summed, each with its place in program order."""

Snapshot = tuple[dict[Key, torch.Tensor], dict[Key, Contributions]]
"""All gradients at one time; see ``GradientTable.snapshot``."""


class GradientTable:
    """Sums gradients, out of place. Thread-safe.

    Attributes:
        lock: Guards all tables, also those of the subclass.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._mark: Mark | None = None  # the device work that has to be done before the gradients can be used
        self._grads: dict[Key, torch.Tensor] = {}
        self._unsummed: dict[Key, Contributions] = {}

    def accumulate(self, leaf: Key, grad: torch.Tensor, order: tuple[int, ...] | None) -> None:
        """Add to a leaf's gradient. With ``order``, contributions are summed in that order, whenever they arrive."""
        with self.lock:
            if order is not None:
                self._unsummed.setdefault(leaf, []).append((order, grad))
            else:
                total = add(seam.streams.join(self._mark, self._grads.get(leaf)), grad)
                assert total is not None
                self._grads[leaf] = total
            self._mark = seam.streams.mark(self._mark)

    def accumulate_first(self, leaf: torch.Tensor, grad: torch.Tensor) -> bool:
        """Make ``grad`` a leaf's gradient; False if the leaf has a gradient already."""
        with self.lock:
            if self._unsummed or self._grads.setdefault(leaf, grad) is not grad:
                return False
            self._mark = seam.streams.mark(self._mark)
            return True

    def accumulate_all(self, gradients: Any) -> list[tuple[torch.Tensor, torch.Tensor, bool]] | None:
        """Add gradients of the native core. Returns those that ``accumulate`` must add, with whether other code may see
        their memory.
        """
        with self.lock:
            left: list[tuple[torch.Tensor, torch.Tensor, bool]] | None
            left = gradients.rest() if self._unsummed else gradients.add_to_table(self._grads)
            return left

    def replace(self, leaf: torch.Tensor, grad: torch.Tensor | None) -> None:
        """Replace a leaf's gradient; None removes it."""
        with self.lock:
            self._sum_up()
            self._grads.pop(leaf, None)
            if grad is not None:
                self._grads[leaf] = grad
            self._mark = seam.streams.mark(self._mark)

    def gradient(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """A leaf's gradient so far."""
        with self.lock:
            self._sum_up()
            return seam.streams.join(self._mark, self._grads.get(leaf))

    @property
    def gradients(self) -> Mapping[Key, torch.Tensor]:
        """Leaf -> gradient, a copy of the table."""
        with self.lock:
            self._sum_up()
            return dict(seam.streams.join(self._mark, self._grads))

    def held(self) -> list[torch.Tensor]:
        """The gradients that were summed so far, for statistics. Takes no lock, and waits for no device."""
        return list(self._grads.values())

    def snapshot(self) -> Snapshot:
        """All gradients as they are now, for ``restore``."""
        with self.lock:
            return dict(self._grads), {leaf: list(parts) for leaf, parts in self._unsummed.items()}

    def restore(self, snapshot: Snapshot) -> None:
        """Undo all that was added since the snapshot. The old tensors are unchanged, since sums are out of place."""
        grads, unsummed = snapshot
        with self.lock:
            self._grads, self._unsummed = dict(grads), {leaf: list(parts) for leaf, parts in unsummed.items()}

    @torch.enable_grad()  # under create_graph the sums are recorded, in whatever grad mode this thread is
    def _sum_up(self) -> None:
        """Sum the contributions in program order."""
        if self._unsummed:
            seam.streams.join(self._mark, (self._unsummed, [self._grads.get(leaf) for leaf in self._unsummed]))
        for leaf, contributions in self._unsummed.items():
            total = self._grads.get(leaf)
            for _, grad in sorted(contributions, key=lambda item: item[0]):
                total = add(total, grad)
            assert total is not None
            self._grads[leaf] = total
        self._unsummed.clear()
