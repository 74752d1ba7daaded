"""Show what the workers of a running cluster are doing, live.

  backhaul top                           the cluster that runs on this host
  backhaul top --address 10.0.0.5:7000   another one, with BACKHAUL_SECRET
  backhaul top --once                    print one table and end
  backhaul top --web                     a page for the browser

Watching changes nothing in the cluster: no worker waits for this command, and it may be killed at any time.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from backhaul._command import attach
from backhaul._command.output import FAILED, FINE, MISUSED, CommandFailure, Output

if TYPE_CHECKING:
    from backhaul._monitoring.cluster_view import ClusterStatus
    from backhaul._monitoring.monitor import Monitor


def add_arguments(parser: ArgumentParser) -> None:
    """What is shown, and where."""
    attach.add_arguments(parser)
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between two looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="look for one interval, print, and end; as --json does")
    parser.add_argument("--web", action="store_true", help="serve a page, and print its address")
    parser.add_argument("--bind", default="127.0.0.1:0", metavar="HOST:PORT", help="where the page is served")


def main(given: Namespace, output: Output) -> int:
    """Watch until the user has enough, or the cluster ends."""
    if not given.interval > 0:
        raise CommandFailure(f"--interval must be more than 0, got {given.interval:g}", MISUSED)
    from backhaul.errors import BackhaulError

    with attach.open_monitor(given) as monitor:
        try:
            monitor.attach()
            if given.web:
                return _serve(monitor, given, output)
            if given.once or output.json:
                return _print_once(monitor, given.interval, output)
            return _watch(monitor, given.interval, output)
        except BackhaulError as error:
            raise CommandFailure(str(error)) from error


def _print_once(monitor: Monitor, interval: float, output: Output) -> int:
    time.sleep(interval)
    status = monitor.refresh()
    import msgspec

    from backhaul._monitoring.table import to_table

    output.report(msgspec.to_builtins(status), lambda: to_table(status))
    return FAILED if any(worker.state == "lost" for worker in status.workers) else FINE


def _watch(monitor: Monitor, interval: float, output: Output) -> int:
    from rich.live import Live

    from backhaul._monitoring.table import to_table

    status = monitor.refresh()
    if not output.console.is_terminal:  # a file or a pipe: one table after the other
        while not _has_ended(status):
            output.text(to_table(status), "")
            time.sleep(interval)
            status = monitor.refresh()
        return FINE
    with Live(to_table(status), console=output.console, screen=True, auto_refresh=False) as live:
        while not _has_ended(status):
            time.sleep(interval)
            status = monitor.refresh()
            live.update(to_table(status), refresh=True)
    output.text(to_table(status), "the cluster has ended")
    return FINE


def _has_ended(status: ClusterStatus) -> bool:
    return all(worker.state == "lost" for worker in status.workers)


def _serve(monitor: Monitor, given: Namespace, output: Output) -> int:
    from backhaul._monitoring.dashboard import Dashboard

    try:
        dashboard = Dashboard(lambda: monitor, given.bind)
    except OSError as error:
        raise CommandFailure(
            f"cannot serve the page at {given.bind}: {error.strerror}; give another place with --bind, such as "
            "127.0.0.1:0 for a free port"
        ) from error
    except ValueError as error:
        raise CommandFailure(str(error), MISUSED) from error
    with dashboard:
        output.text(f"dashboard: {dashboard.url}", "Ctrl-C ends it; the cluster goes on")
        dashboard.wait()
    return FINE
