"""Rewrite programs from torch.distributed.rpc to Backhaul.

Prints what would change, as a diff; --write changes the files. Then names every line that still needs a change by hand,
and why. The exit status is 1 if there is such a line or a file that is not Python. docs/migration.md lists all names.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from backhaul._command.output import FAILED, FINE, MISUSED, CommandFailure, Output
from backhaul._migrate.files import MigratedFile, migrate_file, python_files


def add_arguments(parser: ArgumentParser) -> None:
    """The paths, and whether to write."""
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a file, or a folder of Python files")
    parser.add_argument("--write", action="store_true", help="change the files; without this, print a diff")


def main(given: Namespace, output: Output) -> int:
    """Migrate all files, and say what is left."""
    try:
        files = [migrate_file(path) for path in python_files(given.paths)]
    except FileNotFoundError as error:
        raise CommandFailure(str(error), status=MISUSED) from error
    for file in files:
        if given.write and file.changed:
            file.write()
    if output.json:
        output.report([_as_data(file) for file in files], str)
    else:
        _show(files, written=given.write)
    left = any(remark.left for file in files for remark in file.remarks)
    return FAILED if left or any(file.error for file in files) else FINE


def _show(files: list[MigratedFile], *, written: bool) -> None:
    """The diff goes out as it is, so that ``git apply`` takes it: without colors, markup and folding of lines."""
    if not written:
        for file in files:
            print(file.diff(), end="")
    for file in files:
        if file.error is not None:
            print(f"{file.path}: not changed: {file.error}")
        for remark in file.remarks:
            print(f"{file.path}:{remark.line}: {remark.text}")
    changed = sum(file.changed for file in files)
    left = sum(remark.left for file in files for remark in file.remarks)
    does = "changed" if written else "would change"
    print(f"{does} {_count(changed, 'file')} of {len(files)}; {_count(left, 'line')} to change by hand")
    if changed and not written:
        print("nothing is written yet: --write changes the files")


def _as_data(file: MigratedFile) -> dict[str, object]:
    remarks = [{"line": each.line, "text": each.text, "left": each.left} for each in file.remarks]
    return {"path": str(file.path), "changed": file.changed, "error": file.error, "remarks": remarks}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
