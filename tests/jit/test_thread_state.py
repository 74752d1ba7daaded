"""Values in the state of a thread."""

from __future__ import annotations

import sys

from backhaul.jit.thread_state import save, saved


def test_what_is_stashed_is_kept_and_let_go() -> None:
    value = object()
    before = sys.getrefcount(value)
    for _ in range(10):
        save("test", value)
        assert saved("test") is value
        assert sys.getrefcount(value) > before
        save("test", None)
    assert sys.getrefcount(value) == before
