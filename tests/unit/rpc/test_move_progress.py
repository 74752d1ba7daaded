"""Where moves are shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from backhaul._rpc.move_progress import is_wanted


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "BACKHAUL_PROGRESS": "1"}, True),
        ({"TERM": "xterm", "BACKHAUL_PROGRESS": "0"}, False),
        ({"TERM": "dumb"}, False),
        ({}, False),
    ],
)
def test_on_a_terminal(environ: dict[str, str], wanted: bool) -> None:
    near, far = os.openpty()
    with open(near, "rb"), open(far, "w") as stream:
        assert is_wanted(stream, environ) is wanted


def test_in_a_file(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as stream:
        assert not is_wanted(stream, {"TERM": "xterm"})
    assert not is_wanted(stream, {"TERM": "xterm"})  # it is closed
    assert not is_wanted(None, {"TERM": "xterm"})
