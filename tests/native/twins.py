"""What the tests of the native core share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from backhaul._native import core
from tools.fuzz.twins import Twin, wire_of

needs_core = pytest.mark.skipif(core is None, reason="the native core is not compiled, or BACKHAUL_NATIVE is 0")


def carry(values: Sequence[Any], sender: Twin, receiver: Twin) -> list[Any]:
    """Send values in a request from one twin to the other."""
    return receiver.values_of(wire_of(sender.request(values)))
