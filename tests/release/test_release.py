"""The distributions: what is in them, that they are the same bytes each time, and that the wheel works by itself."""

from __future__ import annotations

import email
import email.message
import json
import os
import re
import runpy
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("twine")
pytest.importorskip("cyclonedx")

import backhaul as bh
from backhaul._native.build import NO_COMPILER
from tools.release.bill_of_materials import describe_release, needed_packages
from tools.release.distributions import ROOT, build

EPOCH = 1_700_000_000
ADDRESS = "https://forge.invalid/owner/backhaul"
SECONDS = 100

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a release is built from a git checkout")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("BACKHAUL_REPOSITORY", raising=False)
        yield build(tmp_path_factory.mktemp("dist"), EPOCH)


def metadata_of(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def links_of(page: str) -> set[str]:
    page = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    return set(re.findall(r"]\(([^)]+)\)", page)) | set(re.findall(r"(?:src|href|srcset)=\"([^\"]+)\"", page))


def test_two_builds_are_the_same_bytes(
    built: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in another folder, for another user's umask, and with another hash seed."""
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    monkeypatch.delenv("BACKHAUL_REPOSITORY", raising=False)
    before = os.umask(0o077)
    try:
        again = build(tmp_path / "elsewhere", EPOCH)
    finally:
        os.umask(before)
    assert [path.name for path in again] == [path.name for path in built]
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in built]


def test_twine_accepts_them(built: tuple[Path, Path]) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_has_the_package_and_nothing_for_its_developers(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        names = set(archive.namelist())
    source = ROOT / "src"
    tracked = subprocess.run(["git", "ls-files", "-z", "."], cwd=source, capture_output=True, text=True, check=True)
    files = {name for name in tracked.stdout.split("\0") if name and (source / name).exists()}
    expected = {name for name in files if not name.startswith("backhaul/_sim/")}
    assert {name for name in names if not name.startswith(f"backhaul-{bh.__version__}.dist-info/")} == expected


def test_the_sdist_has_what_the_tests_need(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        members = archive.getmembers()
    names = {member.name.partition("/")[2] for member in members}
    assert {"Makefile", "constraints.txt", "setup.py", "docs/quickstart.md", "tests/conftest.py"} <= names
    assert {"tools/tree.py", "src/backhaul/_sim/cluster.py", ".github/workflows/tests.yml"} <= names
    assert {(member.mtime, member.uid, member.uname) for member in members} == {(EPOCH, 0, "")}


def test_the_metadata_without_an_address(built: tuple[Path, Path]) -> None:
    found = metadata_of(built[1])
    assert found["Version"] == bh.__version__
    assert found.get_all("Project-URL") is None
    links = links_of(found.get_payload())
    assert not {link for link in links if not link.startswith(("https://", "#"))}


def test_the_metadata_with_an_address() -> None:
    functions: dict[str, Any] = runpy.run_path(str(ROOT / "setup.py"), run_name="not main")
    assert functions["find_version"]() == bh.__version__
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    made = links_of(functions["make_absolute"](page, ADDRESS, "1.2"))
    assert not {link for link in made if not link.startswith(("https://", "#"))}
    ours = {link.removeprefix(f"{ADDRESS}/") for link in made if link.startswith(ADDRESS)}
    files = {re.sub(r"^(blob|raw)/v1\.2/|#.*$", "", link) for link in ours}
    assert "docs/quickstart.md" in files
    assert not {file for file in files if not (ROOT / file).exists()}
    assert len(made) == len(links_of(page))
    assert all(url.startswith(ADDRESS) for url in functions["make_urls"](ADDRESS).values())


def test_the_bill_of_materials(built: tuple[Path, Path]) -> None:
    files = {path.name: path for path in built}
    bill = json.loads(describe_release("backhaul", files, EPOCH))
    whole = bill["metadata"]["component"]
    assert (whole["name"], whole["version"]) == ("backhaul", bh.__version__)
    assert {each["name"] for each in whole["components"]} == set(files)
    versions = {each["name"]: each["version"] for each in bill["components"]}
    assert {"torch", "msgspec", "cloudpickle", "cryptography", "rich", "cffi", "sympy"} <= set(versions)
    assert not {"pytest", "mypy", "ray", "lightning"} & set(versions)
    assert {"backhaul", *versions} == set(needed_packages("backhaul"))
    assert describe_release("backhaul", files, EPOCH) == json.dumps(bill, indent=2) + "\n"


PROGRAM = """
import pathlib, torch, backhaul as bh
from backhaul import _native
assert pathlib.Path(bh.__file__).is_relative_to({folder!r}), bh.__file__
with bh.cluster(2):
    x = torch.ones(2, requires_grad=True)
    bh.rpc_sync("worker1", torch.mul, args=(x, 3)).sum().backward()
    print(bh.__version__, x.grad.tolist())
"""


def test_the_wheel_works_in_a_fresh_environment(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Its dependencies are those of this environment, by a path that leaves out the package itself."""
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    environment = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "CXX"}}

    def run(*command: object, **variables: str) -> str:
        done = subprocess.run(
            list(map(str, command)),
            cwd=tmp_path,
            env={**environment, **variables},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", built[1])
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shown = run(python, "-W", "error", "-c", PROGRAM.format(folder=str(folder)))
    assert shown.splitlines()[-1] == f"{bh.__version__} [3.0, 3.0]"
    assert "doctor" in run(python, "-m", "backhaul", "--help")
    assert "doctor" in run(folder / "bin" / "backhaul", "--help")
    core = "-m", "backhaul._native"
    assert run(python, *core) == run(sys.executable, *core)  # the core is found, since its sources are the same
    shown = run(python, *core, PATH=str(folder / "bin"), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert shown.splitlines() == [NO_COMPILER]


def test_the_changelog_begins_with_this_version() -> None:
    """In the form of Keep a Changelog, with a link for each version at the end."""
    text = (ROOT / "CHANGELOG.md").read_text()
    first, *versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert first == "[Unreleased]"
    found = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})", each) for each in versions]
    assert None not in found
    named = [each[1] for each in found if each is not None]
    assert named[0] == bh.__version__
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= kinds
    links = re.findall(r"^\[(.+)\]: (\S+)$", text, re.MULTILINE)
    assert links[0] == ("Unreleased", f"../../compare/v{named[0]}...HEAD")
    assert [name for name, _ in links[1:]] == named
