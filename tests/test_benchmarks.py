"""Benchmarks run, and programs compute the same on both systems. What takes the course of a step apart by wrapping
methods still finds them. Times are not looked at.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

# On a machine that is busy with other tests.
pytestmark = pytest.mark.timeout(240)
RUN_SECONDS = 220


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=BENCHMARKS, capture_output=True, text=True, timeout=RUN_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_stamp() -> None:
    shown = run("stages.py", "chain", "--repeat", "3", "--one")
    for stamp in ("START", "CallClient.call >", "Engine.backward >", "LocalPass._run_roots <", "END"):
        assert f"worker0/1: {stamp}" in shown, shown
    assert "worker1/" in shown


def test_errors_of_codecs() -> None:
    shown = run("codecs.py", "--errors", "--mib", "0.1")
    assert re.search(r"^\| activations \(GELU\) \| int8 \| 25\.\d% \|", shown, re.MULTILINE), shown


def test_stations_of_a_program() -> None:
    shown = run("stages.py", "rnn", "--repeat", "2", "--markdown")
    first, _, in_order = shown.partition("in order")
    for station in ("request out", "reply in", "graph", "program"):
        assert re.search(rf"^(trainer| +) +{station} ", first, re.MULTILINE), shown
        assert re.search(rf"^\| {station} \| \d+ \| [\d,]+ us \|", first, re.MULTILINE), shown
    assert "trainer: program" in in_order
    assert re.search(r"tables: function of the call \w+\(\)", in_order), shown


def test_each_station_is_still_there() -> None:
    code = "import stamps; stamps.watch_all(); print(set(stamps.WATCHED) - set(stamps.station_of.values()))"
    assert run("-c", code) == "set()\n"


def test_hostile() -> None:
    shown = run("hostile.py", "--settle", "0.1")
    assert shown.count("800,000 empty lists") == 1, shown


PROGRAMS = ("rnn", "ddp", "cartpole", "parameter_server", "pipeline", "transformer")


def losses_of(system: str, *programs: str) -> dict[str, list[float]]:
    """The first losses of programs on a system."""
    lines = run("programs", *programs, "--system", system, "--warm", "4", "--steps", "0").splitlines()
    return {name: [float(loss) for loss in losses] for name, _, *losses in map(str.split, lines)}


def test_programs_compute_the_same_on_both_systems() -> None:
    ours, theirs = losses_of("backhaul", *PROGRAMS), losses_of("reference", *PROGRAMS)
    assert tuple(ours) == tuple(theirs) == PROGRAMS
    assert [len(ours[name]) for name in PROGRAMS] == [4, 4, 1, 4, 4, 4]  # actors learn once an episode
    for name in PROGRAMS:
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6)
    plain = losses_of("plain", "rnn", "pipeline")
    for name in ("rnn", "pipeline"):
        assert plain[name] == pytest.approx(theirs[name], rel=1e-4)
        assert len(set(theirs[name])) == 4  # each step changes the weights


def test_a_run(tmp_path: Path) -> None:
    options = ("--quick", "--rounds", "1", "--out", str(tmp_path))
    assert "empty call" in run("bench.py", "--rows", "empty", *options)
    rows = json.loads((tmp_path / "bench-auto.json").read_text())["rows"]
    assert list(rows) == ["empty call"]
    ratios = rows["empty call"].pop("ratios")
    assert rows["empty call"].keys() == {
        f"{system}_{cost}_us" for system in ("backhaul", "reference") for cost in ("wall", "processor")
    }
    for cost in ("wall", "processor"):
        ours, theirs = (rows["empty call"][f"{system}_{cost}_us"] for system in ("backhaul", "reference"))
        assert ratios[cost] == pytest.approx(theirs / ours, rel=0.05)


# Imported as the benchmarks import each other.


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_rows_that_got_worse_are_named(modules: Callable[[str], Any]) -> None:
    kept = {"a": {"wall": 2.0, "processor": 3.0}, "b": {"wall": 1.0}, "large": {"wall": 500.0}, "gone": {"wall": 1.0}}
    found = {"a": {"wall": 1.8, "processor": 2.5}, "b": {"wall": 0.86}, "large": {"wall": 9.0}, "new": {"wall": 0.1}}
    worse = modules("report").worse
    assert worse(found, kept, 0.15) == {"a": ["processor"]}
    assert worse(found, kept, 0.05) == {"a": ["wall", "processor"], "b": ["wall"], "large": ["wall"]}


def test_processor_time_of_a_group(modules: Callable[[str], Any]) -> None:
    clock = modules("processor_time")
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()
    assert clock.group_members(child.pid) == [child.pid]
    used = clock.processor_seconds([child.pid])
    assert used >= 0.3
    assert clock.ticks_of(child.pid) == pytest.approx(used, abs=0.1)
    child.communicate("\n")
    assert clock.processor_seconds([child.pid]) == 0


def test_pieces_of_a_run(modules: Callable[[str], Any]) -> None:
    stamps, timeline = modules("stamps"), modules("timeline")
    stations = {"call": "request out", "wait": stamps.WAIT, "run": "request in"}

    def stamped(thread: int, *noted: tuple[float, str]) -> list[Any]:
        return [stamps.Stamp(int(when * 1e3), int(when * 500), what, thread) for when, what in noted]

    run = {
        "driver": stamped(
            1, (0, "START"), (10, "call >"), (20, "wait >"), (70, "wait <"), (80, "call <"), (100, "END")
        ),
        "other": stamped(7, (30, "run >"), (60, "run <"), (90, "wait >")),
    }
    pieces = timeline.pieces_of(run, "driver", stations)
    shares = timeline.by_station(pieces)
    assert {key: round(share.wall * 1e6) for key, share in shares.items()} == {
        ("driver", "program"): 30,
        ("driver", "request out"): 20,
        ("other", "request in"): 30,
    }
    assert shares["other", "request in"].used == pytest.approx(15e-6)
    assert timeline.idle_time(pieces, 100e-6) == pytest.approx(20e-6)  # 20 to 30 and 60 to 70
    lines = timeline.in_order(pieces, 100e-6)
    assert [line.split()[0] for line in lines[1:]] == ["0", "10", "20", "30", "60", "70", "80", "100"]
