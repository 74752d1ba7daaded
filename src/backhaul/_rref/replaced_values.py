"""Values that are lost with their owner, and values that take their place."""

from __future__ import annotations

from typing import Any

from backhaul._rref.handle import RRef

_OF_THE_VALUE = ("_id", "_owner", "_identity", "_fork", "_created", "_type")


def is_lost(rref: RRef[Any]) -> bool:
    """Whether the value is gone for good, with its owner."""
    return rref._fork is not None and rref._rrefs.held.is_orphan(rref._fork)


def exchange(one: RRef[Any], other: RRef[Any]) -> None:
    """Let each of two references refer to the value of the other. Neither value is on this worker. Calls that are under
    way go on with the value for which they were made.
    """
    assert one._entry is None
    assert other._entry is None
    for name in _OF_THE_VALUE:
        own = getattr(one, name)
        setattr(one, name, getattr(other, name))
        setattr(other, name, own)
