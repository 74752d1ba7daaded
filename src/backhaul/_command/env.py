"""Print versions and settings, to paste into a bug report. No secrets, host names or paths are in it."""

from __future__ import annotations

import platform
from argparse import ArgumentParser, Namespace

import backhaul
from backhaul._command.output import FINE, Output


def add_arguments(parser: ArgumentParser) -> None:
    """There are none."""


def main(given: Namespace, output: Output) -> int:
    """Print the report."""
    found = {"backhaul": backhaul.__version__, "python": platform.python_version()}
    output.report(found, lambda: "\n".join(f"{name}: {value}" for name, value in found.items()))
    return FINE
