"""``backhaul doctor`` and ``backhaul env``, where all is well and where something is not."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from backhaul._command import doctor_checks
from backhaul._torch_support import NEWEST, OLDEST

from .processes import COMMAND, SECONDS, run_command

pytestmark = pytest.mark.timeout(240)


def examine(
    *arguments: str, environ: Mapping[str, str] | None = None, before: tuple[str, ...] = (), files: int | None = None
) -> tuple[int, dict[str, list[str]]]:
    """The exit status, and the levels by topic. ``before``: a command that runs it. ``files``: how many may be open."""
    done = subprocess.run(
        [*before, *COMMAND, "doctor", "--json", *arguments],
        env={**os.environ, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        preexec_fn=None if files is None else lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
    )
    assert done.stderr == ""
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["good"] == (done.returncode == 0)
    found: dict[str, list[str]] = {}
    for each in report["findings"]:
        assert each["fix"] or each["level"] == "good", each
        found.setdefault(each["topic"], []).append(each["level"])
    return done.returncode, found


def test_all_is_well_here() -> None:
    """Tests run on this machine, so that it cannot be too bad. Two workers are really started."""
    status, found = examine(environ={"BACKHAUL_SECRET": "0123456789abcdef"})
    assert status == 0
    assert found["torch"] == ["good", "good"]
    for topic in ("python", "workers", "TLS", "packages", "loopback", "launcher", "secret", "clock"):
        assert found[topic] == ["good"], topic


def test_supported_versions_are_those_of_the_import() -> None:
    assert (doctor_checks.OLDEST_TORCH, doctor_checks.NEWEST_TORCH) == (OLDEST, NEWEST)


@pytest.mark.parametrize(("version", "level"), [("1.13.1", "wrong"), ("2.99.0", "note")])
def test_another_torch(tmp_path: Path, version: str, level: str) -> None:
    """A folder that looks like torch, and is none."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libtorch.so is missing')\n")
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '{version}'\n")
    (tmp_path / "torch" / "lib").mkdir()
    (tmp_path / "torch" / "lib" / "libtorch_python.so").touch()
    status, found = examine(environ={"PYTHONPATH": str(tmp_path)})
    assert status == 1
    assert found["torch"] == [level, "wrong"]
    assert "workers" not in found


@pytest.mark.parametrize(
    ("environ", "topic"),
    [
        ({"BACKHAUL_SECRET": "secret"}, "secret"),
        ({"RANK": "3", "WORLD_SIZE": "2"}, "launcher"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "launcher"),
    ],
)
def test_what_the_environment_says_wrong(environ: Mapping[str, str], topic: str) -> None:
    status, found = examine("--quick", environ=environ)
    assert (status, found[topic]) == (1, ["wrong"])
    assert "workers" not in found


def test_too_few_files() -> None:
    status, found = examine("--quick", files=50)
    assert (status, found["open files"]) == (1, ["wrong"])


def test_no_loopback() -> None:
    """In a new network namespace, where no interface is up."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-n", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs unshare, and the right to make a network namespace")
    status, found = examine("--quick", before=(unshare, "-n"))
    assert (status, found["loopback"], found["network"]) == (1, ["wrong"], ["note"])


def test_the_place_where_workers_meet() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert examine("--quick", "--master", f"127.0.0.1:{port}")[1]["master"] == ["good"]
    for place in (f"127.0.0.1:{port}", "no.such.host.invalid:1"):
        status, found = examine("--quick", "--master", place)
        assert (status, found["master"]) == (1, ["wrong"])
    assert run_command("doctor", "--master", "nonsense").returncode == 2


def test_workers_on_hosts_call_each_other(tmp_path: Path) -> None:
    script = tmp_path / "ssh"
    script.write_text('#!/bin/sh\nexec sh -c "$2"\n')
    script.chmod(0o700)
    status, found = examine("--quick", "--hosts", "127.0.0.1,localhost.localdomain", "--ssh", str(script))
    assert (status, found["hosts"]) == (0, ["good"] * 3)  # each calls the other, and they met
    status, found = examine("--quick", "--hosts", "a,b", "--ssh", "false")
    assert (status, found["hosts"]) == (1, ["wrong"])


# env


def test_env_tells_no_secrets(tmp_path: Path) -> None:
    """Nor names of hosts, nor paths of the home folder."""
    environ = {
        "BACKHAUL_SECRET": "hush-hush-hush",
        "MASTER_ADDR": "machine-of-mine",
        "TORCH_HOME": str(tmp_path / "cache"),
        "SOMETHING_ELSE": "that-is-private",
        "HOME": str(tmp_path),
    }
    for arguments in (("env",), ("env", "--json")):
        said = run_command(*arguments, environ=environ).stdout
        for hidden in ("hush-hush-hush", "machine-of-mine", "that-is-private", str(tmp_path)):
            assert hidden not in said
    found = json.loads(said)
    assert found["environment"]["TORCH_HOME"] == "~/cache"
    assert found["environment"]["BACKHAUL_SECRET"] == "set (14 characters)"
    assert found["torch"] == torch.__version__
    assert found["python"].endswith(sys.version.split()[0])
