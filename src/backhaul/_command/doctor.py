"""Check this machine for Backhaul. Each line is good, or says how to fix it.

  backhaul doctor                      this host
  backhaul doctor --master one:29500   and whether it reaches where workers meet
  backhaul doctor --hosts one,two      and whether workers there can meet

The exit status is 1 if something would fail. Notes tell of what works but could be better.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

from backhaul._command import doctor_checks, doctor_network, machine
from backhaul._command.findings import Finding, report_findings
from backhaul._command.output import MISUSED, CommandFailure, Output

_PROBE_SECONDS = 120.0  # to import torch and start two workers on a slow machine
_LAST_LINES = 3  # of an error that is shown


def add_arguments(parser: ArgumentParser) -> None:
    """What is checked besides this host."""
    parser.add_argument("--master", metavar="HOST:PORT", help="try to connect to where the workers meet")
    parser.add_argument(
        "--hosts", metavar="A,B", help="start a worker on each host by ssh, and let them call each other"
    )
    parser.add_argument("--ssh", metavar="COMMAND", help="how hosts are reached, as for backhaul run")
    parser.add_argument("--quick", action="store_true", help="do not import torch and start no workers")


def main(given: Namespace, output: Output) -> int:
    """Check all, and print what was found."""
    try:
        findings = list(_findings(given, output))
    except ValueError as error:
        raise CommandFailure(str(error), MISUSED) from None
    return report_findings(findings, output)


def _findings(given: Namespace, output: Output) -> Iterator[Finding]:
    master = None if given.master is None else doctor_network.read_master(given.master)
    hosts = None if given.hosts is None else doctor_network.read_host_list(given.hosts)
    yield from doctor_checks.check_python()
    yield from doctor_checks.check_torch_version()
    if not given.quick and machine.torch_facts():
        with _status(output, "imports torch, and starts two workers"):
            yield from _probe()
    yield from doctor_checks.check_core()
    yield from doctor_checks.check_packages()
    yield from doctor_checks.check_memory()
    yield from doctor_checks.check_limits()
    yield from doctor_checks.check_gpus()
    yield from doctor_network.check_network()
    yield from doctor_network.check_environment()
    yield from doctor_network.check_security()
    if master is not None:
        with _status(output, f"connects to {given.master}"):
            yield from doctor_network.check_master(*master)
    if hosts is not None:
        with _status(output, f"starts workers on {', '.join(hosts)}"):
            yield from doctor_network.check_hosts(hosts, given.ssh)


def _status(output: Output, what: str) -> contextlib.AbstractContextManager[object]:
    """A line that shows what takes long, on a terminal."""
    return output.console.status(what) if output.console.is_terminal else contextlib.nullcontext()


def _probe() -> Iterator[Finding]:
    """What only a process with torch can tell. It is another process, since an import of torch may even crash."""
    command = [sys.executable, "-P", "-m", "backhaul._command.doctor_probe"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        yield Finding(
            "workers",
            "wrong",
            f"two workers on this host did not finish within {_PROBE_SECONDS:g} s",
            "look with `top` what keeps this machine busy, and run this again",
        )
        return
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            yield Finding(**json.loads(line))
    if done.returncode:
        last = " ".join(done.stderr.strip().splitlines()[-_LAST_LINES:])
        yield Finding(
            "torch",
            "wrong",
            f"a process that uses torch ended with exit status {done.returncode}: {last}",
            "run `python -c 'import torch, backhaul'` to see all of the error; install torch again if it fails too",
        )
