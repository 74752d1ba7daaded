"""Whether the run of the floor tells of everything that does not pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reference import run

PASSES = {"outcome": "passes", "seconds": 0.1, "why": ""}
FAILS = {"outcome": "fails", "seconds": 0.1, "why": "it was late"}
SKIPPED = {"outcome": "skipped", "seconds": 0.0, "why": "no device"}


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Three tests are in the floor, and none fails when it runs alone."""
    monkeypatch.setattr(run, "OUT", tmp_path)
    monkeypatch.setattr(run, "floor", lambda: {"A.one": 0.1, "A.two": 0.1, "B.three": 0.1})
    monkeypatch.setattr(run, "repeat", lambda names, limit: dict.fromkeys(names, 0))


def finish(monkeypatch: pytest.MonkeyPatch, results: run.Results) -> int | str | None:
    """Run the floor, with these results; returns the exit status."""
    monkeypatch.setattr(run, "run", lambda *_, **__: results)
    monkeypatch.setattr("sys.argv", ["run", "--floor"])
    with pytest.raises(SystemExit) as ended:
        run.main()
    return ended.value.code


@pytest.mark.usefixtures("known")
def test_the_floor_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert finish(monkeypatch, {"A.one": PASSES, "A.two": PASSES, "B.three": PASSES}) == 0


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("result", [FAILS, SKIPPED])
def test_one_that_fails_once_is_not_forgiven(
    result: dict[str, object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finish(monkeypatch, {"A.one": PASSES, "A.two": result, "B.three": PASSES}) == 1
    assert "used to pass: A.two (failed once with others, and 0 times out of 5 alone)" in capsys.readouterr().out


@pytest.mark.usefixtures("known")
def test_one_that_is_gone_is_missed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert finish(monkeypatch, {"A.one": PASSES, "B.three": PASSES}) == 1
    assert "in the floor, but in no suite: A.two" in capsys.readouterr().out


def test_a_process_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "OUT", tmp_path)
    monkeypatch.setattr(run, "ROOT", tmp_path)  # there is nothing to start
    with pytest.raises(RuntimeError, match="did not start"):
        run.Process("nowhere")
