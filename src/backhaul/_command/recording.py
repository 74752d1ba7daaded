"""What the subcommands that record a running cluster share: their options, and the recording itself."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from backhaul._command import attach
from backhaul._command.output import MISUSED, CommandFailure, Output

if TYPE_CHECKING:
    from backhaul.profiler.model import Timeline

_MAX_SECONDS = 60.0


def add_arguments(parser: ArgumentParser, *, file: str, seconds: float) -> None:
    """Which cluster, for how long, and where the result goes."""
    attach.add_arguments(parser)
    parser.add_argument(
        "--seconds", type=float, default=seconds, help=f"how long to record, at most 60 (default: {seconds:g})"
    )
    parser.add_argument("-o", "--output", default=file, metavar="FILE", help=f"the file to write (default: {file})")
    parser.add_argument(
        "--worker",
        metavar="NAME",
        help="the worker that collects the records, and whose main thread the critical path "
        "is about (default: the first)",
    )


def record(given: Namespace, output: Output, *, ops: bool) -> Timeline:
    """Record all workers."""
    if not 0 < given.seconds <= _MAX_SECONDS:
        raise CommandFailure(f"--seconds must be more than 0 and at most 60, got {given.seconds:g}", MISUSED)
    check_folder(given)
    from backhaul.errors import BackhaulError

    with attach.open_monitor(given) as monitor:
        try:
            monitor.attach()
            with output.console.status(f"recording all workers for {given.seconds:g} s"):
                return monitor.record(given.seconds, ops=ops, worker=given.worker)
        except BackhaulError as error:
            raise CommandFailure(str(error)) from error


def check_folder(given: Namespace) -> None:
    """Refuse a file that cannot be written, before the work begins."""
    folder = Path(given.output).absolute().parent
    if not os.access(folder, os.W_OK):
        raise CommandFailure(f"cannot write to {folder}; give another file with --output", MISUSED)


def report(output: Output, timeline: Timeline, written: Path) -> None:
    """Say what was recorded, and where it is."""
    missing = {worker.name: worker.missing for worker in timeline.workers if worker.missing}
    found = {
        "file": str(written),
        "workers": [worker.name for worker in timeline.workers if not worker.missing],
        "missing": missing,
        "calls": len(timeline.calls),
    }
    lines = [f"recorded {len(timeline.calls)} calls on {len(timeline.workers) - len(missing)} workers: {written}"]
    lines += [f"missing: {name}: {why}" for name, why in missing.items()]
    output.report(found, lambda: "\n".join(lines))
