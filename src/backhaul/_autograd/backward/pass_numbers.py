"""The numbers of the passes that one worker drives. Knows no pass."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable


class PassNumbers:
    """Thread-safe. Other workers drop their shares of passes with numbers below ``oldest``. So a pass must have its
    number and count as under way in one step.

    Attributes:
        new: Returns a number that no other pass has.

    Example:
        >>> numbers = PassNumbers()
        >>> numbers.begin(7), numbers.begin(7), numbers.begin(8)
        ((1, 1), (2, 1), (3, 3))
        >>> numbers.end(1)
        >>> numbers.begin(7)
        (4, 2)
    """

    new: Callable[[], int]

    def __init__(self) -> None:
        self.new = itertools.count(1).__next__
        self._lock = threading.Lock()  # guards _under_way, and is held while a pass gets its number
        self._under_way: dict[int, int] = {}  # number -> context

    def begin(self, context: int, number: int = 0) -> tuple[int, int]:
        """Begin a pass. Returns its number, and the oldest number of a pass under way. ``number``: it has one."""
        under_way = self._under_way
        with self._lock:
            number = number or self.new()
            under_way[number] = context
            oldest = number
            if len(under_way) > 1:
                oldest = min([each for each, of in under_way.items() if of == context])
        return number, oldest

    def end(self, number: int) -> None:
        """A pass is over."""
        with self._lock:
            self._under_way.pop(number, None)
