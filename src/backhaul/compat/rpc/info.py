"""Name and id of a worker, with the reference's checks and ``repr``."""

from __future__ import annotations

import re

from backhaul import _types

_NAME = re.compile(r"[A-Za-z0-9_:.-]*")


class WorkerInfo(_types.WorkerInfo):
    """Identifies one worker of the group."""

    __slots__ = ()

    def __init__(self, name: str, id: int) -> None:
        if not name:
            raise RuntimeError("Worker name must be non-empty.")
        if len(name) >= 128:
            raise RuntimeError(f"Worker name must be shorter than 128 characters, got {len(name)}.")
        if not _NAME.fullmatch(name):
            raise RuntimeError(f"Worker name must match {_NAME.pattern}, got {name!r}.")
        super().__init__(name, _types.WorkerId(id))

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"

    def __reduce__(self) -> tuple[type[WorkerInfo], tuple[str, int]]:
        return WorkerInfo, (self.name, self.id)


def as_reference(info: _types.WorkerInfo) -> WorkerInfo:
    """Convert Backhaul's ``WorkerInfo`` to this module's."""
    return info if isinstance(info, WorkerInfo) else WorkerInfo(info.name, info.id)
