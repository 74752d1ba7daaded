"""The table of subcommands. Knows their names and summaries; imports the module of a subcommand when it is used."""

from __future__ import annotations

import importlib
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from backhaul._command.output import Output


class SubcommandModule(Protocol):
    """What the module of a subcommand has. Its docstring is the text of ``backhaul NAME --help``.

    A module may also have ``arrange(arguments)``, which puts the arguments into the order that its parser needs.
    """

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the options and arguments, except ``--json`` and ``--help``."""

    def main(self, given: Namespace, output: Output) -> int:
        """Do the work. Returns the exit status: 0, or 1 if something failed.

        Raises:
            CommandFailure: It failed, and the text says how and what to do.
        """


@dataclass(frozen=True, slots=True)
class Subcommand:
    """One row of the table.

    Attributes:
        module: Its module in this package. Importing it must not import torch.
        summary: One line for ``backhaul --help``.
        reports: Whether it has ``--json``: it then prints one JSON value, and nothing else, to the standard output.
    """

    module: str
    summary: str
    reports: bool = True

    def load(self) -> SubcommandModule:
        """Import the module."""
        return cast(SubcommandModule, importlib.import_module(f"backhaul._command.{self.module}"))

    def arrange(self, arguments: Sequence[str]) -> list[str]:
        """The arguments in the order that the parser needs."""
        arrange = getattr(self.load(), "arrange", None)
        return list(arguments) if arrange is None else arrange(arguments)


# In the order of ``backhaul --help``.
SUBCOMMANDS: dict[str, Subcommand] = {
    "run": Subcommand("run", "start a script on several workers", reports=False),
    "demo": Subcommand("demo", "a tour of one minute: calls, gradients, a lost worker, a profile", reports=False),
    "doctor": Subcommand("doctor", "check this machine, and say how to fix what is wrong"),
    "env": Subcommand("env", "versions and settings, for a bug report"),
    "top": Subcommand("top", "what the workers of a running cluster do, as a live table or page"),
    "profile": Subcommand("profile", "record a running cluster, and write the report of the profile"),
    "trace": Subcommand("trace", "record a running cluster, and write a trace for Perfetto"),
    "graph": Subcommand("graph", "draw the distributed graph of a step, of a script or of a running cluster"),
    "bench": Subcommand("bench", "compare Backhaul with torch.distributed.rpc on this machine"),
    "certs": Subcommand("certs", "make, show and check certificates for TLS"),
    "migrate": Subcommand("migrate", "rewrite programs from torch.distributed.rpc to Backhaul"),
    "completion": Subcommand("completion", "print the completion script of a shell", reports=False),
}
