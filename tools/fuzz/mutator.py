"""Makes broken inputs from valid ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

_SMALL_VALUES = (b"\x90", b"\x91\x01", b"\x80", b"\x81\x01\x90", b"\x01", b"\xa0", b"\xc0", b"\xc4\x00", b"\x91\x91")
_EDGE_NUMBERS = (
    *(0, 1, 2, 7, 8, 63, 64, 65, 127, 128, 255, 256, 4095, 4096, 65535, 65536, 1 << 20),
    *((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 59) - 1, (1 << 63) - 1, (1 << 64) - 1),
)


class Mutator:
    """Makes inputs from other inputs. Its results depend on the seeds and on ``draw`` only."""

    def __init__(self, seeds: Sequence[bytes], draw: random.Random) -> None:
        self._seeds = list(seeds)
        self._draw = draw
        self._mutations: tuple[Callable[[bytearray], None], ...] = (
            self._flip,
            self._flip,
            self._byte,
            self._number,
            self._number,
            self._cut,
            self._double,
            self._splice,
            self._truncate,
            self._swell,
        )

    def make(self) -> bytes:
        """The next input."""
        random_ = self._draw.random
        seeds = self._seeds
        data = bytearray(seeds[int(random_() * len(seeds))])
        mutations = self._mutations
        for _ in range(1 + int(random_() * random_() * 5)):
            if data:
                mutations[int(random_() * len(mutations))](data)
        return bytes(data)

    def _at(self, data: bytearray) -> int:
        """A random position, mostly near the beginning, where lengths are."""
        random_ = self._draw.random
        size = len(data)
        return int(random_() * (size if size < 64 or random_() < 0.4 else 64))

    def _flip(self, data: bytearray) -> None:
        data[self._at(data)] ^= 1 << int(self._draw.random() * 8)

    def _byte(self, data: bytearray) -> None:
        data[self._at(data)] = int(self._draw.random() * 256)

    def _number(self, data: bytearray) -> None:
        """Write an edge-case number at a random position, in either byte order."""
        random_ = self._draw.random
        at, width = self._at(data), (1, 2, 4, 8)[int(random_() * 4)]
        value = _EDGE_NUMBERS[int(random_() * len(_EDGE_NUMBERS))] & ((1 << 8 * width) - 1)
        if random_() < 0.3 and at + width <= len(data):  # close to the number that is there
            value = (int.from_bytes(data[at : at + width], "little") + int(random_() * 9) - 4) & ((1 << 8 * width) - 1)
        data[at : at + width] = value.to_bytes(width, "big" if random_() < 0.3 else "little")

    def _cut(self, data: bytearray) -> None:
        at = self._at(data)
        del data[at : at + 1 + int(self._draw.random() * 16)]

    def _double(self, data: bytearray) -> None:
        at = self._at(data)
        data[at:at] = data[at : at + 1 + int(self._draw.random() * 32)]

    def _splice(self, data: bytearray) -> None:
        """Continue with the rest of another input."""
        other = self._seeds[int(self._draw.random() * len(self._seeds))]
        at = self._at(data)
        data[at:] = other[min(at, len(other)) :] if self._draw.random() < 0.5 else other[self._at(bytearray(1)) :]

    def _swell(self, data: bytearray) -> None:
        """Replace one value with many small ones: an array or a map of them, or without a header."""
        random_ = self._draw.random
        item = _SMALL_VALUES[int(random_() * len(_SMALL_VALUES))]
        count = (3, 40, 700, 9000)[int(random_() * random_() * 4)]
        head = (b"", b"\xdc" + count.to_bytes(2, "big"), b"\xdd\0\0" + count.to_bytes(2, "big"), b"\xde\x10\0")
        at = self._at(data)
        data[at : at + 1] = head[int(random_() * 4)] + item * count

    def _truncate(self, data: bytearray) -> None:
        del data[self._at(data) :]
