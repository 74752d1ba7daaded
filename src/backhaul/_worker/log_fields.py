"""Fields on every record of the logger ``backhaul``, for programs that collect logs.

``worker`` is the worker that logs, ``peer`` the other worker or address that the record is about, and ``call`` the
number of the served call whose thread logs. Code that knows better passes them as ``extra``.
"""

from __future__ import annotations

import logging
from typing import Any

from backhaul._worker import deadlines
from backhaul._worker.worker import name_here


def _add_fields(record: logging.LogRecord) -> bool:
    """A filter that lets every record pass."""
    fields: dict[str, Any] = record.__dict__
    fields.setdefault("peer", "")
    if "worker" not in fields:
        fields["worker"] = name_here()
    if "call" not in fields:
        scope = deadlines.current.get()
        fields["call"] = None if scope is None else getattr(scope.root, "number", None)
    return True


logging.getLogger("backhaul").addFilter(_add_fields)
