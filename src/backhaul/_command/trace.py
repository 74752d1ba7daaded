"""Record a running cluster for some seconds, and write a trace for Perfetto or chrome://tracing.

backhaul trace                                       the cluster that runs on this host, for 3 s
backhaul trace --seconds 10 -o slow.json
backhaul trace --address 10.0.0.5:7000               another one; its secret is in BACKHAUL_SECRET
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from backhaul._command import recording
from backhaul._command.output import FINE, Output


def add_arguments(parser: ArgumentParser) -> None:
    """How to record."""
    recording.add_arguments(parser, file="trace.json", seconds=3.0)
    parser.add_argument("--no-ops", action="store_true", help="leave out operations of torch, which costs less")


def main(given: Namespace, output: Output) -> int:
    """Record, and write the trace."""
    timeline = recording.record(given, output, ops=not given.no_ops)
    from backhaul.profiler.chrome import to_chrome

    written = Path(given.output)
    written.write_bytes(to_chrome(timeline))
    recording.report(output, timeline, written)
    return FINE
