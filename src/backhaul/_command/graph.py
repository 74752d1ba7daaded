"""Draw the distributed graph of a step: its calls, and the way that the gradients went.

  backhaul graph train.py -n 4        starts a script; its first step: graph.svg
  backhaul graph train.py --step 3 -o step.html
  backhaul graph                      the cluster that runs on this host
  backhaul graph --seconds 10         for steps that take longer than a second

A step ends with a backward pass over workers. With SCRIPT the workers are ended once the graph is there.
What they print goes to the standard error. Without SCRIPT the last step of a running cluster is drawn.
"""

from __future__ import annotations

import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backhaul._command import recording, run
from backhaul._command.output import FAILED, FINE, MISUSED, CommandFailure, Output

if TYPE_CHECKING:
    from backhaul.profiler.model import Timeline

_SECONDS = 1.0


def add_arguments(parser: ArgumentParser) -> None:
    """How to record, and perhaps a script."""
    parser.usage = "backhaul graph [options] [SCRIPT [options] [--] [arguments of SCRIPT]]"
    recording.add_arguments(parser, file="graph.svg", seconds=_SECONDS)
    parser.add_argument("--step", type=int, metavar="N", help="which step of SCRIPT to draw (default: 1)")
    run.add_script_arguments(parser, "a script to start; none: record a running cluster", required=False)
    parser.set_defaults(hosts=None, master_addr=None, master_port=None, ssh=None, env=[])


def arrange(arguments: Sequence[str]) -> list[str]:
    """As in ``backhaul run``."""

    def add_all(parser: ArgumentParser) -> None:
        add_arguments(parser)
        parser.add_argument("--json", action="store_true")

    return run.options_first(arguments, add_all)


def main(given: Namespace, output: Output) -> int:
    """Record, and write the picture."""
    written = Path(given.output)
    if written.suffix not in (".svg", ".html"):
        raise CommandFailure(f"--output must end with .svg or .html, got {given.output}", MISUSED)
    _refuse_mixtures(given)
    if given.script is None:
        timeline = recording.record(given, output, ops=False)
    else:
        recording.check_folder(given)
        status, recorded = _record_script(given)
        if recorded is None:
            return status
        timeline = recorded
    from backhaul._monitoring.step_graph import last_step, to_page, to_svg

    step = last_step(timeline)
    if step is None:
        raise CommandFailure(f"no backward pass ended within {given.seconds:g} s; record for longer with --seconds")
    written.write_text(to_page(step) if written.suffix == ".html" else to_svg(step), encoding="utf-8")
    recording.report(output, timeline, written)
    return FINE


def _refuse_mixtures(given: Namespace) -> None:
    """Options that are for a script, without one; and those for a running cluster, with one."""
    with_script = {"-n": given.workers, "--names": given.names, "--step": given.step, "--python": given.python}
    without = {"--address": given.address, "--cluster": given.cluster, "--worker": given.worker}
    without["--seconds"] = given.seconds != _SECONDS
    wrong = [name for name, value in (with_script if given.script is None else without).items() if value]
    if wrong and given.script is None:
        raise CommandFailure(f"{wrong[0]} is for a script, and no script is given", MISUSED)
    if wrong:
        raise CommandFailure(f"{wrong[0]} is for a cluster that runs already; leave out {given.script}", MISUSED)
    if given.step is not None and given.step < 1:
        raise CommandFailure(f"--step must be 1 or more, got {given.step}", MISUSED)


def _record_script(given: Namespace) -> tuple[int, Timeline | None]:
    """Run the script until the step has ended. Returns the exit status, and what was recorded."""
    from backhaul._monitoring.pass_inbox import VARIABLE, PassInbox

    number = given.step or 1
    if given.workers is None and not given.names:
        given.workers = 1  # a script that starts its workers itself
    with tempfile.TemporaryDirectory(prefix="backhaul-graph-") as folder:
        inbox = PassInbox(Path(folder), number)
        try:
            ended = run.run_script(given, variables={VARIABLE: inbox.setting}, enough=inbox.descriptor)
        finally:
            inbox.close()
        recorded = inbox.take()
    status = run.exit_status(ended)
    if ended.progress.signal is not None:
        return status, None
    if isinstance(recorded, str):
        raise CommandFailure(f"step {number} ran, but {recorded}")
    if recorded is None:
        how = "failed" if status else "ended"
        hint = (
            ""
            if status or number > 1
            else (
                ": no backward pass went over workers. Give the number of workers with -n, and check that the loss is "
                "made of the result of a call"
            )
        )
        raise CommandFailure(f"{given.script} {how} before step {number} was over{hint}", status or FAILED)
    return FINE, recorded
