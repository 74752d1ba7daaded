"""Values in the state that ATen carries along with a thread."""

from __future__ import annotations

import sys

from backhaul.jit.thread_state import save, saved


def test_a_saved_value_is_kept_alive_and_then_released() -> None:
    value = object()
    before = sys.getrefcount(value)
    for _ in range(10):
        save("test", value)
        assert saved("test") is value
        assert sys.getrefcount(value) > before
        save("test", None)
    assert sys.getrefcount(value) == before
