"""Record a running cluster, and draw the distributed graph of its last step: calls, and the way of the gradients.

backhaul graph                                       the cluster that runs on this host: graph.svg
backhaul graph -o graph.html
backhaul graph --seconds 10                          for steps that take longer than a second
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from backhaul._command import recording
from backhaul._command.output import FINE, MISUSED, CommandFailure, Output


def add_arguments(parser: ArgumentParser) -> None:
    """How to record."""
    recording.add_arguments(parser, file="graph.svg", seconds=1.0)


def main(given: Namespace, output: Output) -> int:
    """Record, and write the picture."""
    written = Path(given.output)
    if written.suffix not in (".svg", ".html"):
        raise CommandFailure(f"--output must end with .svg or .html, got {given.output}", MISUSED)
    timeline = recording.record(given, output, ops=False)
    from backhaul._monitoring.step_graph import last_step, to_page, to_svg

    step = last_step(timeline)
    if step is None:
        raise CommandFailure(f"no backward pass ended within {given.seconds:g} s; record for longer with --seconds")
    written.write_text(to_page(step) if written.suffix == ".html" else to_svg(step), encoding="utf-8")
    recording.report(output, timeline, written)
    return FINE
