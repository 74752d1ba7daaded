"""What is done with parts of torch that are not public."""

from __future__ import annotations

import sys
import threading

import pytest

from backhaul.autograd import native
from backhaul.autograd.native import OfRun, Task, stash, stashed


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


def test_a_pass_within_a_pass_leaves_nothing_on_a_thread_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine puts the state of who has started a run on such a thread, and takes it away after each node."""
    monkeypatch.setattr(native, "engine_has_threads", lambda: True)
    run: OfRun[str] = OfRun("test_run")
    seen: list[str | None] = []

    def node() -> None:
        stash("test_run", "outer")
        seen.append(run.get())
        run.begin("inner")
        seen.append(run.get())
        run.end()
        seen.append(run.get())
        stash("test_run", None)
        seen.append(run.get())

    thread = threading.Thread(target=node)
    thread.start()
    thread.join()
    assert seen == ["outer", "inner", "outer", None]
