"""Compiling and loading the native core. The compiler is a script here, so that nothing takes long."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from backhaul import _native
from backhaul._native import build

SCRIPT = Path(build.__file__)

WORKS = """
echo "$$" >> {log}
while [ "$1" != -o ]; do shift; done
sleep 0.2
echo library > "$2"
"""
FAILS = """
echo "$$" >> {log}
echo "module.cpp:1: error: something is missing" >&2
echo "compilation terminated" >&2
exit 1
"""
HANGS = """
echo "$$" >> {log}
while [ "$1" != -o ]; do shift; done
echo half > "$2"
exec sleep 600
"""

Environment = dict[str, str]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Environment]:
    """Makes the environment of a process with that compiler and an empty cache, and enters it."""

    def enter(compiler: str) -> Environment:
        script = tmp_path / "compiler"
        script.write_text("#!/bin/sh\n" + compiler.format(log=tmp_path / "log"))
        script.chmod(0o700)
        monkeypatch.setenv("CXX", str(script))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.delenv(build.SWITCH, raising=False)
        return dict(os.environ)

    return enter


def runs_of(tmp_path: Path) -> int:
    """How often the compiler has run."""
    log = tmp_path / "log"
    return len(log.read_text().split()) if log.exists() else 0


def start(env: Environment, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, str(SCRIPT), *arguments], env=env, stdout=subprocess.PIPE, text=True)


def said(env: Environment, *arguments: str) -> str:
    process = start(env, *arguments)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return output


def test_it_compiles_once(environment: Callable[[str], Environment], tmp_path: Path) -> None:
    env = environment(WORKS)
    path = build.library_path()
    assert "was compiled" in said(env)
    assert path.read_text() == "library\n"
    assert str(path) in said(env)
    assert said(env, "--quiet") == ""
    assert runs_of(tmp_path) == 1
    assert {each.suffix for each in path.parent.iterdir()} == {".so", ".lock"}
    assert build.is_own(path)


def test_many_processes_compile_it_once(environment: Callable[[str], Environment], tmp_path: Path) -> None:
    env = environment(WORKS)
    processes = [start(env) for _ in range(6)] + [start(env, "--later") for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert runs_of(tmp_path) == 1
    assert all(str(build.library_path()) in output for output in outputs[:6])
    assert outputs[6:] == [""] * 3


def test_a_compiler_that_fails(environment: Callable[[str], Environment], tmp_path: Path) -> None:
    env = environment(FAILS)
    assert "error: something is missing" in said(env).splitlines()[-1]
    assert "error: something is missing" in said(env, "--quiet")
    assert runs_of(tmp_path) == 1  # --quiet did not repeat it
    environment(WORKS)
    assert "was compiled" in said(env)
    assert not build.library_path().with_suffix(".failed").exists()


def test_a_compiler_that_is_killed(environment: Callable[[str], Environment], tmp_path: Path) -> None:
    env = environment(HANGS)
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT)], env=env, start_new_session=True, stdout=subprocess.DEVNULL
    )
    folder = build.library_path().parent
    while not list(folder.glob("core-*/*.so")):
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not build.library_path().exists()
    environment(WORKS)
    assert "was compiled" in said(env)
    assert [each for each in folder.iterdir() if each.is_dir()] == []


def test_no_compiler(environment: Callable[[str], Environment], monkeypatch: pytest.MonkeyPatch) -> None:
    environment(WORKS)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert build.build() == build.NO_COMPILER
    environment(WORKS)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": "/nowhere"})
    assert build.build() == build.NO_COMPILER


def test_a_compiler_that_does_not_exist(
    environment: Callable[[str], Environment], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(WORKS)
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert "does not compile" in build.build()


def test_a_cache_that_cannot_be_written(environment: Callable[[str], Environment], tmp_path: Path) -> None:
    environment(WORKS)
    (tmp_path / "cache").write_text("not a folder")
    assert "cannot be kept" in build.build()


def test_libraries_that_nobody_uses_are_removed(environment: Callable[[str], Environment]) -> None:
    environment(WORKS)
    path = build.library_path()
    path.parent.mkdir(parents=True)
    days = {"old": 40, "used": 40, "recent": 20}
    for name, age in days.items():
        for each in (path.with_name(f"core-{name}.so"), path.with_name(f"core-{name}.lock")):
            each.write_text("")
            os.utime(each, (0, time.time() - age * 24 * 3600))
    build.note_use(path.with_name("core-used.so"))
    build.note_use(path.with_name("core-missing.so"))
    build.build()
    left = {each.name for each in path.parent.iterdir()} - {path.name, path.with_suffix(".lock").name}
    assert left == {"core-used.so", "core-used.lock", "core-recent.so", "core-recent.lock"}


def test_other_sources_or_another_torch_need_another_library(
    environment: Callable[[str], Environment], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment(WORKS)
    names = {build.library_path()}
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O1"))
    names.add(build.library_path())
    sources = tmp_path / "sources"
    sources.mkdir()
    for each in build.SOURCES.iterdir():
        (sources / each.name).write_bytes(each.read_bytes())
    (sources / "module.cpp").write_text("// changed")
    monkeypatch.setattr(build, "SOURCES", sources)
    names.add(build.library_path())
    folder = tmp_path / "torch"
    (folder / "lib").mkdir(parents=True)
    (folder / "version.py").write_text("__version__ = '99.0'")
    (folder / "lib" / "libtorch_python.so").write_text("")
    monkeypatch.setattr(build, "_torch_folder", lambda: folder)
    names.add(build.library_path())
    assert len(names) == 4


# Loading.


def test_a_library_that_cannot_be_loaded(
    environment: Callable[[str], Environment], caplog: pytest.LogCaptureFixture
) -> None:
    environment(WORKS)
    build.build()
    assert _native._load() is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "runs without it" in record.getMessage()


def test_the_command_says_that_a_library_cannot_be_loaded(
    environment: Callable[[str], Environment], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment(WORKS)
    monkeypatch.setattr(sys, "argv", ["build"])
    build.build()
    said = build.main(_native.check)
    assert said is not None
    assert str(build.library_path()) in said
    assert "is at" not in capsys.readouterr().out


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_library_that_others_can_write_to_is_not_loaded(
    environment: Callable[[str], Environment], caplog: pytest.LogCaptureFixture, what: str
) -> None:
    environment(WORKS)
    build.build()
    path = build.library_path()
    (path if what == "file" else path.parent).chmod(0o777)
    assert not build.is_own(path)
    assert _native._load() is None
    assert "other users" in caplog.records[0].getMessage()


def test_the_core_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.SWITCH, "0")
    assert _native._load() is None
    program = (
        "import backhaul._native as n, backhaul._wire.call_frames as c; assert n.core is None; print(c.read_reply)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "read_reply_in_python" in run.stdout


def test_a_worker_that_starts_compiles_it_in_the_background(
    environment: Callable[[str], Environment],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    environment(WORKS)
    caplog.set_level(logging.INFO, "backhaul")
    monkeypatch.setattr(_native, "core", None)
    monkeypatch.setattr(_native, "_said", threading.Lock())
    _native.compile_later()
    _native.compile_later()  # once for each process
    (record,) = caplog.records
    assert "for the next start" in record.getMessage()
    assert str(build.library_path()) in build.build()  # waits for it
    assert runs_of(tmp_path) == 1

    monkeypatch.setattr(_native, "_said", threading.Lock())
    _native.compile_later()  # it is there
    monkeypatch.setenv(build.SWITCH, "0")
    _native.compile_later()
    assert len(caplog.records) == 1


def test_what_failed_is_not_tried_again_by_workers(
    environment: Callable[[str], Environment],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    environment(FAILS)
    caplog.set_level(logging.INFO, "backhaul")
    monkeypatch.setattr(_native, "core", None)
    build.build()
    for _ in range(2):
        monkeypatch.setattr(_native, "_said", threading.Lock())
        _native.compile_later()
    assert [record.levelno for record in caplog.records] == [logging.INFO] * 2
    assert "something is missing" in caplog.records[0].getMessage()
    assert runs_of(tmp_path) == 1
