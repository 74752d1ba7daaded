"""``backhaul certs``: files that openssl and workers accept, and what is found wrong with others."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import backhaul as bh

from ..cluster.processes import run_processes
from .processes import run_command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("certificates")
    done = run_command("certs", "make", "trainer", "table", "--folder", "certs", cwd=place)
    assert done.returncode == 0, done.stderr
    return place / "certs"


def copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "certs"))


def check(folder: Path, *arguments: str) -> tuple[int, list[tuple[str, str]]]:
    """The exit status, and the topics that are not good."""
    done = run_command("certs", "check", *arguments, "--json", cwd=folder)
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, [(each["topic"], each["level"]) for each in found["findings"] if each["level"] != "good"]


def test_keys_are_for_their_owner_only(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [
        "authority.key",
        "authority.pem",
        "table.key",
        "table.pem",
        "trainer.key",
        "trainer.pem",
    ]
    assert {path.stat().st_mode & 0o777 for path in folder.glob("*.key")} == {0o600}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
def test_openssl_accepts_them(folder: Path) -> None:
    for purpose in ("sslserver", "sslclient"):
        command = ["openssl", "verify", "-x509_strict", "-purpose", purpose, "-CAfile", "authority.pem", "trainer.pem"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30, check=False)
        assert done.stdout == "trainer.pem: OK\n", done.stderr
    names = subprocess.run(
        ["openssl", "x509", "-in", "table.pem", "-noout", "-ext", "subjectAltName"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert "DNS:table" in names.stdout


def call_with_certificates(rank: int, folder: str) -> int:
    names = ["trainer", "table"]
    place = Path(folder)
    name, authority = names[rank], place / "authority.pem"
    tls = bh.Tls(certificate=place / f"{name}.pem", key=place / f"{name}.key", authority=authority)
    options = bh.Options(
        transport="tcp", security=bh.Security(secret="for one test", tls=tls), init_method=f"file://{folder}/../store"
    )
    bh.init(name, rank=rank, world_size=2, options=options)
    answer: int = bh.rpc_sync(names[1 - rank], abs, args=(-rank - 1,))
    bh.shutdown()
    return answer


def test_workers_use_them(folder: Path) -> None:
    assert run_processes(call_with_certificates, 2, str(folder)) == [1, 2]


def test_good_files_are_good(folder: Path) -> None:
    assert check(folder, "trainer.pem") == (0, [])
    shown = json.loads(run_command("certs", "show", "trainer.pem", "authority.pem", "--json", cwd=folder).stdout)
    assert [each["is_authority"] for each in shown] == ["no", "yes"]
    assert shown[0]["worker_names"] == ["trainer"]


def test_a_later_worker_gets_a_certificate_of_the_same_authority(folder: Path, tmp_path: Path) -> None:
    certs = copy(folder, tmp_path)
    assert run_command("certs", "make", "late", cwd=tmp_path).returncode == 0
    assert check(certs, "late.pem") == (0, [])
    assert (certs / "authority.pem").read_bytes() == (folder / "authority.pem").read_bytes()


def test_nothing_is_overwritten(folder: Path, tmp_path: Path) -> None:
    certs = copy(folder, tmp_path)
    done = run_command("certs", "make", "late", "trainer", cwd=tmp_path)
    assert done.returncode == 1
    assert (certs / "trainer.key").read_bytes() == (folder / "trainer.key").read_bytes()
    assert not (certs / "late.pem").exists()


def test_what_is_wrong_is_found(folder: Path, tmp_path: Path) -> None:
    certs = copy(folder, tmp_path)
    assert run_command("certs", "make", "other", "--folder", "others", "--days", "3", cwd=tmp_path).returncode == 0
    (certs / "table.key").chmod(0o644)
    wrong = ("key", "wrong")
    assert check(certs, "table.pem") == (1, [wrong])
    assert check(certs, "trainer.pem", "--key", "nowhere.key") == (1, [wrong])
    assert check(certs, "trainer.pem", "--key", "authority.key") == (1, [wrong])
    assert check(certs, "trainer.pem", "--name", "table") == (1, [("name", "wrong")])
    authority, soon = ("authority", "wrong"), ("dates", "note")
    assert check(certs, "trainer.pem", "--authority", "../others/authority.pem") == (1, [authority, soon])
    assert check(certs, "trainer.pem", "--authority", "table.pem") == (1, [authority])
    assert check(tmp_path / "others", "other.pem") == (0, [soon, soon])


@pytest.mark.parametrize(
    "arguments",
    [
        ("make", "a b"),
        ("make", "authority"),
        ("make", "a", "--days", "0"),
        ("show", "nowhere.pem"),
        ("check", "nowhere.pem"),
    ],
)
def test_failures_are_explained(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = run_command("certs", *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("backhaul certs: ")
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
