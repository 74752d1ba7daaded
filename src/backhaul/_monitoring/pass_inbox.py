"""Where ``backhaul graph`` waits for the pass that its workers record: a folder, and a pipe that says when it is there.

Imports no torch, so that the workers start at once. ``pass_recording`` is the side of the workers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backhaul.profiler.model import Timeline

VARIABLE = "BACKHAUL_RECORD_PASS"
"""Set for the workers: the number of the pass, and the folder, as in ``1:/tmp/folder``."""

PIPE = "recorded"
RECORDED, FAILED = ".timeline", ".failed"
"""The names of files in the folder: of the pipe, and the endings of what a worker leaves."""


class PassInbox:
    """The folder and its pipe.

    Attributes:
        setting: What ``VARIABLE`` is set to.
        descriptor: Can be read once a pass is recorded.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self._folder = folder
        self.setting = f"{number}:{folder}"
        os.mkfifo(folder / PIPE, 0o600)
        self.descriptor = os.open(folder / PIPE, os.O_RDWR | os.O_NONBLOCK)

    def close(self) -> None:
        """Close the pipe."""
        os.close(self.descriptor)

    def take(self) -> Timeline | str | None:
        """What was recorded first; a text: why it could not be collected; None: no pass with that number has ended."""
        found = sorted(self._folder.glob(f"*{RECORDED}"), key=lambda path: path.stat().st_mtime_ns)
        if found:
            import msgspec

            from backhaul.profiler.model import Timeline

            return msgspec.msgpack.decode(found[0].read_bytes(), type=Timeline)
        failed = next(self._folder.glob(f"*{FAILED}"), None)
        return None if failed is None else failed.read_text()
