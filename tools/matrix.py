"""Runs the tests with each supported torch and Python, and writes the results into docs/versions.md.

Each pair has its own environment in .matrix/. The tool removes it after the tests, unless --keep is given, because with
CUDA libraries it takes up to 6 GB. A pair that cannot be built gets a row in the table too, and counts as a failure.

    make matrix                                           all pairs; writes the table
    make matrix ARGS=--all                                also the tests that use little of torch, with every pair
    make matrix ARGS="2.15/3.12 2.12/3.11"                some pairs
    make matrix ARGS="2.13/3.11/0"                        a pair without the native core
    make matrix ARGS="2.15/3.12 --keep --tests 'tests/jit -x'"    some tests; only prints the table
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "versions.md"
CONSTRAINTS = ROOT / "constraints.txt"
PINNED_PYTHON = "3.11"  # constraints.txt was made with it
FOLDER = ROOT / ".matrix"
MARKS = "<!-- matrix: begin -->", "<!-- matrix: end -->"
TITLES = "| torch | Python | passed | failed | skipped | on | note |\n|---|---|---|---|---|---|---|"
BUILD_SECONDS = 3600
ONCE = (
    "tests/cluster",
    "tests/conformance",
    "tests/faults",
    "tests/fuzz",
    "tests/release",
    "tests/sim",
    "tests/test_benchmarks.py",
    "tests/test_documentation.py",
    "tests/test_examples.py",
    "tests/type_checking",
)
"""Tests that take long and depend little on versions: of processes, transports, faults, protocols, programs, releases
and types. They run with the pinned pair only.
"""
WITHOUT_CORE = "without the native core"
"""The note of a row whose tests ran with ``BACKHAUL_NATIVE=0``."""

COUNT = re.compile(r"(\d+) (passed|failed|error|skipped)")


class Pair(NamedTuple):
    """A version of torch and one of Python, both as their first two numbers; and whether the native core is used."""

    torch: str
    python: str
    native: bool = True

    def __str__(self) -> str:
        return f"{self.torch}/{self.python}{'' if self.native else '/0'}"

    @property
    def folder(self) -> Path:
        """The folder of its environment."""
        return FOLDER / f"torch{self.torch}-python{self.python}"


PAIRS = (
    Pair("2.11", "3.12"),
    Pair("2.12", "3.11"),
    Pair("2.13", "3.11"),
    Pair("2.13", "3.11", native=False),
    Pair("2.13", "3.13"),
    Pair("2.14", "3.12"),
    Pair("2.15", "3.12"),
    Pair("2.15", "3.13"),
)


class Row(NamedTuple):
    """The result of a pair."""

    torch: str
    python: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    on: str = ""
    note: str = ""

    @property
    def pair(self) -> Pair:
        """The pair."""
        return Pair(_minor(self.torch), _minor(self.python), WITHOUT_CORE not in self.note)

    @property
    def good(self) -> bool:
        """Whether tests ran and none failed."""
        return self.passed > 0 and self.failed == 0 and not self.note.startswith("**")


class BuildError(Exception):
    """An environment cannot be built, or its tests cannot be run. The text says why."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0 if the tests of all pairs passed."""
    options = _parse(args)
    rows = []
    for pair in options.pairs:
        row = run(pair, options)
        rows.append(row)
        print(f"{pair}: {row.passed} passed, {row.failed} failed, {row.skipped} skipped {row.note}", flush=True)
    print(table(rows))
    if options.tests is None:
        PAGE.write_text(merged(PAGE.read_text(), rows))
        print(f"written into {PAGE.relative_to(ROOT)}")
    return 0 if all(row.good for row in rows) else 1


def _parse(args: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "pairs",
        nargs="*",
        type=_pair,
        metavar="TORCH/PYTHON[/0]",
        help="such as 2.15/3.12 or 2.13/3.11/0; default: all",
    )
    parser.add_argument("--tests", help="arguments for pytest instead of all tests, as one string")
    parser.add_argument(
        "--all", action="store_true", help="also run the tests that use little of torch with every pair"
    )
    parser.add_argument("--keep", action="store_true", help="leave the environments in .matrix/ for the next run")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="PATH",
        help="an interpreter that is not in PATH; may be given twice",
    )
    parser.add_argument("--limit", type=float, default=7200, help="seconds that the tests of one pair may take")
    options = parser.parse_args(args)
    options.pairs = options.pairs or list(PAIRS)
    return options


def _pair(text: str) -> Pair:
    found = re.fullmatch(r"(\d+\.\d+)/(\d+\.\d+)(/0)?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a pair such as 2.15/3.12")
    return Pair(found[1], found[2], native=found[3] is None)


def run(pair: Pair, options: argparse.Namespace) -> Row:
    """Build the environment of a pair, run the tests in it, and remove it."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    try:
        python = build(pair, find_python(pair.python, options.python))
        versions = _output(
            [python, "-c", "import platform, torch; print(torch.__version__, platform.python_version())"]
        )
        torch_version, python_version = versions.split()
        note = compile_core(python) if pair.native else WITHOUT_CORE
        return test(Row(torch_version, python_version, on=today, note=note), python, options)
    except BuildError as error:
        return Row(pair.torch, pair.python, on=today, note=f"**{error}**{'' if pair.native else f' {WITHOUT_CORE}'}")
    finally:
        if not options.keep:
            shutil.rmtree(pair.folder, ignore_errors=True)


# Environments.


def find_python(version: str, given: Iterable[str] = ()) -> str:
    """The interpreter of a version: from ``given``, from PATH, or from pyenv. Raises ``BuildError``."""
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    known = sorted(pyenv.glob(f"{version}.*/bin/{name}"), key=lambda path: _numbers(path.parts[-3]), reverse=True)
    for candidate in [*given, shutil.which(name), *map(str, known)]:
        if candidate is None:
            continue
        try:  # a shim of pyenv exists even if the version is not selected, and then fails
            found = _output([candidate, "-c", "import platform; print(platform.python_version())"])
        except BuildError:
            continue
        if _minor(found) == version:
            return candidate
    raise BuildError(f"not run: there is no {name} here; give its path with --python")


def build(pair: Pair, interpreter: str) -> str:
    """Build the environment of a pair, unless it was kept. Returns its interpreter. Raises ``BuildError``."""
    python = str(pair.folder / "bin" / "python")
    stamp = pair.folder / "built"
    wanted = f"{interpreter}\n{CONSTRAINTS.read_text()}\n{(ROOT / 'pyproject.toml').read_text()}"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"{pair}: building {pair.folder.relative_to(ROOT)}", flush=True)
    _output([interpreter, "-m", "venv", "--clear", str(pair.folder)])
    trouble = None
    for pins in (constraints(CONSTRAINTS.read_text(), pair), f"torch=={pair.torch}.*\n"):
        file = pair.folder / "constraints.txt"
        file.write_text(pins)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(file)]
        try:  # install both at once: separately, the second could replace the torch of the first
            _output([*install, f"torch=={pair.torch}.*", "-e", f"{ROOT}[dev]"])
        except BuildError as error:
            trouble = trouble or error
        else:
            stamp.write_text(wanted)
            return python
    raise BuildError(f"not built: {trouble}")


def compile_core(python: str) -> str:
    """Compile the native core for an interpreter. Returns a note if there is none. Raises ``BuildError``."""
    said = _output([python, "src/backhaul/_native/build.py"]).splitlines()[-1]
    if "does not compile" in said:
        raise BuildError(said)
    return "no C++ compiler" if "no C++ compiler" in said else ""


def constraints(text: str, pair: Pair) -> str:
    """The part of constraints.txt that applies to a pair. All of it applies to the torch and the Python that it was
    made with. For other pairs pip chooses the indirect dependencies, because torch itself needs some of them.
    """
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))
    if pair[:2] == (_minor(pinned["torch"]), PINNED_PYTHON):
        return text
    direct = text.partition("# What those need")[0]
    return re.sub(r"^torch==.*$", f"torch=={pair.torch}.*", direct, flags=re.MULTILINE)


def _output(command: Sequence[str]) -> str:
    """The output of a command. Raises ``BuildError`` with its last error if the command fails."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=BUILD_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(str(error)) from error
    if done.returncode != 0:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
        errors = [line for line in said if line.startswith("ERROR: ")] or said
        raise BuildError(errors[-1].removeprefix("ERROR: "))
    return done.stdout.strip()


def _environment() -> Mapping[str, str]:
    """This environment without variables that add other packages or keep Python from writing bytecode."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV", "BACKHAUL_NATIVE")
    return {name: value for name, value in os.environ.items() if name not in dropped}


# Tests.


def test(row: Row, python: str, options: argparse.Namespace) -> Row:
    """Run the tests with an interpreter. Raises ``BuildError`` if they do not end."""
    pair = row.pair
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--color=no",
        *selection(pair, options.tests, everything=options.all),
    ]
    log = FOLDER / f"{pair.folder.name}.log"
    print(f"{pair}: {shlex.join(command[1:])} > {log.relative_to(ROOT)}", flush=True)
    with log.open("w") as file:
        try:
            status = subprocess.run(
                command,
                cwd=ROOT,
                env={**_environment(), **({} if pair.native else {"BACKHAUL_NATIVE": "0"})},
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=options.limit,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"the tests took more than {options.limit:g} s, see {log.relative_to(ROOT)}") from error
    lines = log.read_text().splitlines()
    found = counts(lines[-1] if lines else "")
    if status != 0:
        print("\n".join(line for line in lines if line.startswith(("FAILED", "ERROR"))), flush=True)
        if status != 1:
            raise BuildError(f"pytest ended with status {status}, see {log.relative_to(ROOT)}")
    return row._replace(passed=found["passed"], failed=found["failed"] + found["error"], skipped=found["skipped"])


def selection(pair: Pair, tests: str | None, *, everything: bool = False) -> list[str]:
    """The arguments for pytest: the given tests, or all tests as in ``make test`` for the pinned pair, or fewer for
    other pairs. The test suites of the reference are part of torch and differ between versions. The list of those that
    pass belongs to one version.
    """
    if tests is not None:
        return shlex.split(tests)
    found = ["-n", "auto", "--maxprocesses", "8", "--dist", "loadfile", "--no-loadscope-reorder"]
    pinned = re.search(r"^torch==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    assert pinned is not None
    if pair[:2] == (_minor(pinned.group(1)), PINNED_PYTHON):
        return found
    left_out = ("tests/reference",) if everything else ("tests/reference", *ONCE)
    return [*found, *(f"--ignore={path}" for path in left_out)]


def counts(line: str) -> dict[str, int]:
    """The numbers of tests by outcome, from the last line that pytest prints."""
    found = {kind: int(number) for number, kind in COUNT.findall(line)}
    return {kind: found.get(kind, 0) for kind in ("passed", "failed", "error", "skipped")}


# The table.


def table(rows: Iterable[Row]) -> str:
    """The rows as a Markdown table."""
    return "\n".join([TITLES, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def read(page: str) -> Iterator[Row]:
    """The rows of the table on a page."""
    for line in page.partition(MARKS[0])[2].partition(MARKS[1])[0].splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == len(Row._fields) and cells[0][:1].isdigit():
            passed, failed, skipped = map(int, cells[2:5])
            yield Row(cells[0], cells[1], passed, failed, skipped, *cells[5:])


def merged(page: str, rows: Iterable[Row]) -> str:
    """A page with new rows in its table, sorted. Rows of other pairs stay as they are."""
    known = {row.pair: row for row in [*read(page), *rows]}
    ordered = [known[pair] for pair in sorted(known, key=_order)]
    before, _, rest = page.partition(MARKS[0])
    return f"{before}{MARKS[0]}\n{table(ordered)}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


def _order(pair: Pair) -> tuple[list[int], list[int], bool]:
    return _numbers(pair.torch), _numbers(pair.python), not pair.native


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


if __name__ == "__main__":
    sys.exit(main())
