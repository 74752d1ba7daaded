"""Which simulated processes cannot reach each other. Knows no time and no channel."""

from __future__ import annotations

from collections.abc import Callable


class Partitions:
    """Directions between two processes that carry nothing. What was sent there waits until the direction is healed."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], list[Callable[[], None]]] = {}  # (source, target) -> what waits
        self._silent: set[str] = set()  # processes that crashed without closing their connections

    def cut(self, source: str, target: str) -> None:
        """Let nothing get from one process to another until ``heal``."""
        self._held.setdefault((source, target), [])

    def heal(self, source: str, target: str) -> None:
        """Deliver what waits, and let everything pass from now on."""
        for action in self._held.pop((source, target), ()):
            action()

    def heal_all(self) -> None:
        """Heal all directions."""
        for source, target in list(self._held):
            self.heal(source, target)

    def silence(self, name: str) -> None:
        """Let nothing get to or from a process that has crashed. What is sent to it is lost."""
        self._silent.add(name)

    def reconnect(self, name: str) -> None:
        """A new process has this name: heal all directions to and from it."""
        self._silent.discard(name)
        for source, target in list(self._held):
            if name in (source, target):
                self.heal(source, target)

    def waiting(self, source: str, target: str) -> list[Callable[[], None]] | None:
        """The list of what waits in a direction; None if the direction is not cut."""
        if target in self._silent or source in self._silent:
            return []  # a new list, because nothing will ever deliver it
        return self._held.get((source, target))
