"""Finds, reads and writes the files that are migrated. What changes in them is decided in ``program``."""

from __future__ import annotations

import dataclasses
import difflib
import io
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from backhaul._migrate.program import Remark, migrate

_HIDDEN = {"__pycache__", "node_modules", "site-packages", "build", "dist"}


@dataclasses.dataclass(frozen=True, slots=True)
class MigratedFile:
    """One file: its text before and after, and what there is to say about it. ``error``: it cannot be read."""

    path: Path
    before: str
    after: str
    remarks: tuple[Remark, ...] = ()
    error: str | None = None
    encoding: str = "utf-8"

    @property
    def changed(self) -> bool:
        """Whether the file changes."""
        return self.before != self.after

    def diff(self) -> str:
        """The change as a unified diff, with paths as ``git apply`` and ``patch -p1`` take them."""
        name = self.path.as_posix().lstrip("/")
        lines = difflib.unified_diff(
            self.before.splitlines(keepends=True), self.after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
        )
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)

    def write(self) -> None:
        """Write the new text, in the file's encoding and with its ends of lines."""
        self.path.write_bytes(self.after.encode(self.encoding))


def python_files(paths: Iterable[Path]) -> Iterator[Path]:
    """The files themselves, and all ``.py`` files below the folders, without hidden folders and installed packages.

    Raises:
        FileNotFoundError: A path does not exist.
    """
    for path in paths:
        if path.is_dir():
            for found in sorted(path.rglob("*.py")):
                parents = found.relative_to(path).parts[:-1]
                if not any(part.startswith(".") or part in _HIDDEN for part in parents):
                    yield found
        elif path.exists():
            yield path
        else:
            raise FileNotFoundError(f"there is no file or folder {path}")


def migrate_file(path: Path) -> MigratedFile:
    """Migrate a file, without writing it."""
    data = path.read_bytes()
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        text = data.decode(encoding)
        done = migrate(text)
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        return MigratedFile(path, "", "", error=str(error))
    return MigratedFile(path, text, done.text, done.remarks, encoding=encoding)
