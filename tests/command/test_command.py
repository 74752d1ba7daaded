"""The command as a whole: what it imports, its exit statuses, JSON, and completion."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import backhaul as bh
from backhaul._command.subcommands import SUBCOMMANDS

from .processes import run_command

ROOT = Path(__file__).parent.parent.parent
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None  # makes its import fail\n"


def start(arguments: str, *, then: str = "") -> subprocess.CompletedProcess[str]:
    """The command as its console script, in a Python that cannot import torch."""
    program = f"{WITHOUT_TORCH}sys.argv = sys.orig_argv[:] = ['backhaul', {arguments}]\n"
    program += f"from backhaul._command.main import main\nstatus = main()\n{then}\nsys.exit(status)\n"
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("arguments", ["'--help'", "'env'"])
def test_it_starts_without_torch(arguments: str) -> None:
    done = start(arguments)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_public_names_are_there_when_they_are_used() -> None:
    """In the process of the command, too, ``backhaul`` is the whole package; only later."""
    program = """
import sys
sys.argv = sys.orig_argv[:] = ["backhaul", "env"]
import backhaul
assert "torch" not in sys.modules
assert callable(backhaul.rpc_sync) and "torch" in sys.modules
print(sorted(backhaul.__all__) == sorted(set(backhaul.__all__) & set(vars(backhaul))), len(backhaul.__all__))
try:
    backhaul.nonsense
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.splitlines() == [f"True {len(bh.__all__)}", "module 'backhaul' has no attribute 'nonsense'"]


def test_a_program_called_backhaul_gets_the_package(tmp_path: Path) -> None:
    script = tmp_path / "backhaul"
    script.write_text("import backhaul as bh\nprint(bh.rpc_sync.__name__, bh.nn.split.__name__)\n")
    command = [sys.executable, "-P", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout, done.returncode) == ("rpc_sync split\n", 0)


def test_the_entry_point_exists() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["backhaul"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("arguments", [(), ("nonsense",), ("env", "--nonsense")])
def test_misuse_ends_with_2(arguments: tuple[str, ...]) -> None:
    done = run_command(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [(("doctr",), "doctor"), (("env", "--jsn"), "--json"), (("run", "--naems=a", "x.py"), "--names")],
)
def test_a_name_with_a_mistake(arguments: tuple[str, ...], meant: str) -> None:
    done = run_command(*arguments)
    assert done.returncode == 2
    assert f"did you mean {meant}?" in done.stderr


def test_every_subcommand_explains_itself() -> None:
    for name, subcommand in SUBCOMMANDS.items():
        done = run_command(name, "--help", environ={"COLUMNS": "80"})
        assert done.returncode == 0, name
        assert max(map(len, done.stdout.splitlines())) <= 80, name
        assert ("--json" in done.stdout) == subcommand.reports, name


def test_the_page_has_every_subcommand() -> None:
    page = (ROOT / "docs" / "command.md").read_text()
    assert [name for name in SUBCOMMANDS if f"`backhaul {name}`" not in page] == []


def test_the_version() -> None:
    assert run_command("--version").stdout == f"backhaul {importlib.metadata.version('backhaul')}\n"


# Completion.


def complete(*words: str) -> list[str]:
    """What bash offers for the last word."""
    typed = " ".join(f"'{word}'" for word in ("backhaul", *words))
    script = (
        f'eval "$(cat)"; COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _backhaul; '
        '(( ${#COMPREPLY[@]} == 0 )) || printf "%s\\n" "${COMPREPLY[@]}"'
    )
    made = run_command("completion", "bash")
    done = subprocess.run(["bash", "-uc", script], input=made.stdout, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes() -> None:
    assert set(complete("")) == set(SUBCOMMANDS)
    assert complete("e") == ["env"]
    assert complete("env", "--j") == ["--json"]
    assert complete("completion", "z") == ["zsh"]
    assert complete("certs", "m") == ["make"]
    assert complete("certs", "make", "trainer", "--f") == ["--folder"]
    assert complete("run", "-n", "4", "--na") == ["--names"]
    assert complete("run", "") == []  # then bash offers files


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_accept_the_script(shell: str) -> None:
    made = run_command("completion", shell)
    assert made.returncode == 0
    for name in SUBCOMMANDS:
        assert name in made.stdout
    if shutil.which(shell):
        before = "autoload -U compinit; compinit -u\n" if shell == "zsh" else ""
        done = subprocess.run([shell], input=before + made.stdout, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_json_is_one_value() -> None:
    assert json.loads(run_command("env", "--json").stdout)["backhaul"] == bh.__version__


def test_a_reader_that_has_enough_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "backhaul", "env"], stdout=writing, stderr=subprocess.PIPE, timeout=100, check=False
    )
    os.close(writing)
    assert done.stderr == b""
