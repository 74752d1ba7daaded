"""Where a subcommand writes: text for people through rich, or one JSON value for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

FINE, FAILED, MISUSED = 0, 1, 2
"""The exit statuses of every subcommand. ``run`` ends with the status of the worker that failed first."""

INTERRUPTED = 130  # what shells expect after Ctrl-C


class CommandFailure(Exception):
    """A subcommand failed. The text says what happened and what to do next."""

    def __init__(self, text: str, status: int = FAILED) -> None:
        super().__init__(text)
        self.status = status


class Output:
    """Where one subcommand writes. With ``json`` people's text is left out: ``text`` and ``console`` print nothing.

    Colors are used on a terminal only, and not if ``NO_COLOR`` is set. Text that goes to a pipe is 80 columns wide,
    unless ``COLUMNS`` says otherwise.
    """

    def __init__(self, *, json: bool = False) -> None:
        self.json = json
        self._console: Console | None = None

    @property
    def console(self) -> Console:
        """The console of rich, for tables, progress and pictures that live."""
        if self._console is None:
            from rich.console import Console

            self._console = Console(quiet=self.json, highlight=False)
        return self._console

    def text(self, *parts: RenderableType) -> None:
        """Print text for people. Strings may have rich's markup; they are not broken into lines."""
        for part in parts:
            if isinstance(part, str) or self.json or self.console.is_terminal:
                self.console.print(part, soft_wrap=isinstance(part, str))
                continue
            with self.console.capture() as captured:
                self.console.print(part)
            print("\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n")))

    def report(self, data: Any, shown: Callable[[], RenderableType]) -> None:
        """Print what a subcommand found: ``data`` as JSON with ``--json``, else what ``shown`` returns."""
        if self.json:
            print(json.dumps(data, indent=2), flush=True)
        else:
            self.text(shown())

    def failure(self, name: str, text: str) -> None:
        """Say that the subcommand of that name failed: on the standard error; with ``--json`` as JSON."""
        if self.json:
            print(json.dumps({"error": text}), flush=True)
        else:
            print(f"backhaul {name}: {text}", file=sys.stderr, flush=True)
