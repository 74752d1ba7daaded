"""Which gradients an operator computes, encoded as the integers that a schema allows; see [Note: orders of an operator]
in ``operators``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Level(NamedTuple):
    """One order of gradients.

    Attributes:
        seeded: Indices of the results of the order below that have seeds.
        wanted: Indices of the values of the order below whose gradients are the results.
    """

    seeded: tuple[int, ...]
    wanted: tuple[int, ...]

    def pack(self) -> list[int]:
        """Encode the level as integers.

        Example:
            >>> Level((0,), (0, 2)).pack()
            [1, 0, 2, 0, 2]
        """
        return [len(self.seeded), *self.seeded, len(self.wanted), *self.wanted]


def unpack(numbers: Sequence[int]) -> list[Level]:
    """Decode levels that were packed one after the other.

    Example:
        >>> unpack([1, 0, 2, 0, 2])
        [Level(seeded=(0,), wanted=(0, 2))]
    """
    parts: list[tuple[int, ...]] = []
    place = 0
    while place < len(numbers):
        end = place + 1 + numbers[place]
        parts.append(tuple(numbers[place + 1 : end]))
        place = end
    return [Level(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
