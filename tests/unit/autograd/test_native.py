"""What is done with parts of torch that are not public."""

from __future__ import annotations

import sys

from backhaul.autograd.native import Task, stash, stashed


def test_what_is_stashed_is_kept_and_let_go() -> None:
    value = object()
    before = sys.getrefcount(value)
    for _ in range(10):
        stash("test", value)
        assert stashed("test") is value
        assert sys.getrefcount(value) > before
        stash("test", None)
    assert sys.getrefcount(value) == before


def test_a_task_is_entered_again_and_again() -> None:
    task = Task(1, set)
    before = sys.getrefcount(task)
    for _ in range(10):
        with task:
            pass
    assert sys.getrefcount(task) == before
