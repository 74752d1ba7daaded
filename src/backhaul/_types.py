"""Names and ids: the plain data that all layers share. Imports nothing of Backhaul."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NewType

WorkerId = NewType("WorkerId", int)
"""A worker's place in the cluster, 0 to 65535 (16 bits, so that it fits into a context id)."""

CallId = NewType("CallId", int)
"""Identifies one call among all calls of its caller."""

DeviceMaps = Mapping[str, Mapping[Any, Any] | Literal["cpu"]]
"""By worker: device here -> device there (``0``, ``"cuda:0"``, ``"cpu"`` or ``torch.device``), or ``"cpu"``."""

MAX_WORKERS = 1 << 16

_DEVICE = re.compile(r"cuda:(0|[1-9][0-9]{0,2})")
_NAME = re.compile(r"[A-Za-z0-9_:.-]{1,128}")


def check_name(name: str) -> str:
    """Return ``name`` if it is a valid name of a worker, else raise ``ValueError``."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a worker name: use 1 to 128 letters, digits, '_', '-', ':' or '.'")
    return name


def device_name(device: object) -> str:
    """The name of a device: ``"cpu"``, or ``"cuda:0"`` and so on. Raises ``ValueError`` for other devices.

    Example:
        >>> device_name(1), device_name("cuda"), device_name("cpu")
        ('cuda:1', 'cuda:0', 'cpu')
    """
    number = isinstance(device, int) and not isinstance(device, bool)
    name = f"cuda:{device}" if number else str(device)  # the text of a torch.device is the same
    name = "cuda:0" if name == "cuda" else name
    if name != "cpu" and not _DEVICE.fullmatch(name):
        raise ValueError(f"{device!r} is not a device: use an index, 'cuda:<index>' or 'cpu'")
    return name


def first_number(incarnation: str) -> int:
    """The first id that a worker gives. Each incarnation starts at another place in the 48 bits of an id. Otherwise
    other workers could confuse its objects with those of an earlier incarnation.
    """
    return 1 + (zlib.crc32(incarnation.encode()) << 15)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Identifies one worker of the cluster.

    Attributes:
        name: The unique name, as given to ``init``.
        id: The unique number. It is the rank, if the workers have ranks.

    Example:
        >>> import backhaul as bh
        >>> with bh.cluster(["first", "second"]):
        ...     bh.get_worker_info("second")
        WorkerInfo(name='second', id=1)
    """

    name: str
    id: WorkerId
