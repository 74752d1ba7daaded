"""How the subcommands that watch a cluster find it: options, and the monitor that they make from these."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from backhaul._command.output import MISUSED, CommandFailure

if TYPE_CHECKING:
    from backhaul._monitoring.monitor import Monitor
    from backhaul._monitoring.runtime_files import LocalCluster

_SECRET_VARIABLE = "BACKHAUL_SECRET"


def add_arguments(parser: ArgumentParser) -> None:
    """Which cluster."""
    parser.add_argument(
        "--address",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="where a worker listens: host:port, or what bh.get_address() returns there; may be given several times. "
        f"The secret comes from {_SECRET_VARIABLE}",
    )
    parser.add_argument("--cluster", metavar="NAME", help="one of several clusters of this host")


def open_monitor(given: Namespace, *, watch: float = 10.0) -> Monitor:
    """A monitor of the cluster that the options name. It has not asked any worker yet."""
    addresses, secret = find_cluster(given)
    from backhaul._monitoring.monitor import Monitor, open_endpoint

    try:
        return Monitor(open_endpoint(secret, addresses), addresses, watch=watch)
    except ValueError as error:
        raise CommandFailure(str(error), MISUSED) from error


def find_cluster(given: Namespace) -> tuple[tuple[str, ...], bytes]:
    """The addresses and the secret of a cluster."""
    if given.address:
        secret = os.environ.get(_SECRET_VARIABLE, "")
        if not secret:
            raise CommandFailure(f"set {_SECRET_VARIABLE} to the secret of the cluster at {given.address[0]}", MISUSED)
        return tuple(map(_full_address, given.address)), secret.encode()
    from backhaul._monitoring import runtime_files

    clusters = runtime_files.find()
    if given.cluster:
        clusters = [cluster for cluster in clusters if cluster.name.startswith(given.cluster)]
    if not clusters:
        what = f"no cluster {given.cluster!r}" if given.cluster else "no cluster"
        raise CommandFailure(
            f"{what} of this user runs on this host; one that starts is there once its workers have met. To watch "
            f"another one, give the address of a worker (bh.get_address()) with --address, and set {_SECRET_VARIABLE}"
        )
    chosen = clusters[0] if len(clusters) == 1 else _ask(clusters)
    return chosen.addresses, chosen.secret


def _ask(clusters: list[LocalCluster]) -> LocalCluster:
    lines = [
        f"  {number}. {cluster.name}: {', '.join(worker.name for worker in cluster.workers[:6])}"
        + (f" and {len(cluster.workers) - 6} more" if len(cluster.workers) > 6 else "")
        for number, cluster in enumerate(clusters, 1)
    ]
    listed = "\n".join(lines)
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise CommandFailure(f"several clusters run on this host; choose one with --cluster NAME:\n{listed}", MISUSED)
    print(listed, file=sys.stderr)
    print("Which one? ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline().strip()
    if not answer.isdigit() or not 1 <= int(answer) <= len(clusters):
        raise CommandFailure(f"there is no number {answer!r} in the list", MISUSED)
    return clusters[int(answer) - 1]


def _full_address(address: str) -> str:
    if address.startswith(("tcp:", "unix:")):
        return address
    if not address.rpartition(":")[2].isdecimal() or ":" not in address:
        raise CommandFailure(f"--address must be HOST:PORT, or what bh.get_address() returns, got {address!r}", MISUSED)
    return f"tcp:{address}"
