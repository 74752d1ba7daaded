"""Values in the state of a thread."""

from __future__ import annotations

import sys

from backhaul.jit.thread_state import stash, stashed


def test_what_is_stashed_is_kept_and_let_go() -> None:
    value = object()
    before = sys.getrefcount(value)
    for _ in range(10):
        stash("test", value)
        assert stashed("test") is value
        assert sys.getrefcount(value) > before
        stash("test", None)
    assert sys.getrefcount(value) == before
