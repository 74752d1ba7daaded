"""Which members were lost before all workers were done. Pure: no I/O, no threads, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class LostMembers:
    """What one worker knows at the end of a shutdown.

    Attributes:
        reasons: By name, why each member was lost.
        without_word: Whether one of them was to say when all are done, and had not even said that it is ready itself.
            Then nobody knows whether the work is finished.
    """

    reasons: dict[str, str] = field(default_factory=dict)
    without_word: bool = False
    _ready: set[str] = field(default_factory=set)

    def ready(self, name: str) -> None:
        """A member has called ``shutdown``."""
        self._ready.add(name)

    def add(self, name: str, reason: str, *, leader: bool = False) -> None:
        """A member was lost. ``leader``: it was to say when all are done."""
        self.reasons.setdefault(name, reason)
        self.without_word = self.without_word or (leader and name not in self._ready)

    def remove(self, name: str) -> None:
        """A member is there again, another one has taken its place, or it turns out that it has left."""
        self._ready.discard(name)
        self.reasons.pop(name, None)
        self.without_word = self.without_word and bool(self.reasons)

    def __str__(self) -> str:
        return "; ".join(f"worker '{name}' was lost: {reason}" for name, reason in sorted(self.reasons.items()))
