"""The test that a pass is over. Pure: no I/O, no threads, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Ledger:
    """Which gradient messages are under way.

    A message is consumed when the group that it entered has run and the gradients of its leaves are added. The report
    that says so also names every message that the group produced. So the two sets are equal exactly when nothing is
    under way. Reports may come in any order, and more than once.

    Example:
        >>> ledger = Ledger()
        >>> ledger.report(consumed=[0], produced={7: 1})  # the roots have run, message 7 went to worker 1
        False
        >>> ledger.over, ledger.outstanding
        (False, {7: 1})
        >>> ledger.report(consumed=[7], produced={})
        True
    """

    def __init__(self) -> None:
        self._produced: dict[int, int] = {0: -1}  # message -> worker that has to consume it; 0: the roots
        self._consumed: set[int] = set()

    def report(self, consumed: Iterable[int], produced: Mapping[int, int]) -> bool:
        """Note that a worker consumed some messages and produced others. Returns ``over``."""
        self._consumed.update(consumed)
        self._produced.update(produced)
        return self._produced.keys() == self._consumed

    @property
    def over(self) -> bool:
        """Whether nothing is under way."""
        return self._produced.keys() == self._consumed

    @property
    def outstanding(self) -> dict[int, int]:
        """Messages that were produced and not consumed, with the worker that each went to."""
        return {m: worker for m, worker in self._produced.items() if m not in self._consumed}

    @property
    def workers(self) -> set[int]:
        """All workers that gradients went to."""
        return {worker for worker in self._produced.values() if worker >= 0}
