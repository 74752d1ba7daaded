"""Record a running cluster for some seconds, and write the report of the profile: one HTML page.

  backhaul profile                             the cluster of this host, for 3 s
  backhaul profile --seconds 10 -o slow.html
  backhaul profile --address 10.0.0.5:7000     another one, with BACKHAUL_SECRET

All workers record everything that they do, with operations of torch. docs/profiling.md explains the report.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from backhaul._command import recording
from backhaul._command.output import FINE, Output


def add_arguments(parser: ArgumentParser) -> None:
    """How to record."""
    recording.add_arguments(parser, file="profile.html", seconds=3.0)
    parser.add_argument("--no-ops", action="store_true", help="leave out operations of torch, which costs less")


def main(given: Namespace, output: Output) -> int:
    """Record, and write the report."""
    timeline = recording.record(given, output, ops=not given.no_ops)
    from backhaul.profiler.report import render

    written = Path(given.output)
    written.write_text(render(timeline, title=f"{given.seconds:g} s of a running cluster"), encoding="utf-8")
    recording.report(output, timeline, written)
    return FINE
