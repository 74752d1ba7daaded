"""Start a script on several workers, on this host or on several by ssh.

  backhaul run train.py -n 4                    four workers on this host
  backhaul run train.py --names trainer,table   two workers with these names
  backhaul run train.py -n 4 --hosts one,two    two workers on each of two hosts
  backhaul run train.py -n 4 -- -n 100          what follows -- is for SCRIPT

Each worker runs the script with the environment that `bh.init()` reads. Every line that a worker
prints begins with its name. Ctrl-C ends all workers within 2 seconds. If a worker fails, the others
are ended, and the first failure is shown at the end. No worker is restarted.
"""

from __future__ import annotations

import functools
import os
import random
import secrets
import shlex
import socket
import sys
from argparse import REMAINDER, Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backhaul._command.output import FAILED, MISUSED, CommandFailure, Output
from backhaul._command.run_places import LOCALHOST, HostEntry, WorkerPlace, environment_of, place_workers, read_hosts
from backhaul._command.run_progress import WorkerLog
from backhaul._command.run_supervisor import Supervisor

if TYPE_CHECKING:
    from rich.console import Console

SSH_VARIABLE = "BACKHAUL_SSH"

_SECRET_VARIABLE = "BACKHAUL_SECRET"  # its home, own_endpoint, imports torch
_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5"
_PORTS = range(10_000, 30_000)  # below the ports that the system gives to clients
_HOST_MODULE = "backhaul._command.run_host"


class GivenOnce(Action):
    """Refuses an option that is given twice: the second one may be meant for the script."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: object, option: str | None = None) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option} is given twice; put -- before the arguments that are for the script")
        setattr(namespace, self.dest, values)


def add_arguments(parser: ArgumentParser) -> None:
    """The workers, their hosts, and the script with its arguments."""
    parser.usage = "backhaul run [options] SCRIPT [options] [--] [arguments of SCRIPT]"
    add = functools.partial(parser.add_argument, action=GivenOnce)
    add_script_arguments(parser, "what each worker runs")
    add("--hosts", metavar="A,B:2", help="hosts, or a file with a host on each line; HOST:2 gets two workers")
    add("--master-addr", metavar="HOST", help="where the workers meet; the first host, if not given")
    add("--master-port", type=_port, metavar="PORT", help="the port there; a free one, if not given")
    add(
        "--ssh",
        metavar="COMMAND",
        help=f"how hosts are reached; {SSH_VARIABLE}, or ssh without a password, if not given",
    )
    add("--env", action="append", default=[], metavar="NAME[=VALUE]", help="a variable for workers of other hosts")


def add_script_arguments(parser: ArgumentParser, script: str, *, required: bool = True) -> None:
    """The script with its arguments, and its workers on this host. ``script``: the help for it."""
    add = functools.partial(parser.add_argument, action=GivenOnce)
    add(
        "-n",
        "--workers",
        type=_whole_number,
        metavar="N",
        help="how many workers; as many as names or hosts, if not given",
    )
    add("--names", metavar="A,B", help="their names; worker0, worker1 and so on, if not given")
    add("--python", metavar="PATH", help="the Python of the workers; the one of this command, if not given")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module, as with python -m")
    parser.add_argument("script", nargs=None if required else "?", metavar="SCRIPT", help=script)
    rest = parser.add_argument("arguments", nargs=REMAINDER, metavar="...", help="the arguments of the script")
    rest.required = False


def _whole_number(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"must be a whole number, not {text!r}")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ArgumentTypeError(f"must be a number from 1 to 65535, not {text!r}")
    return int(text)


def arrange(arguments: Sequence[str]) -> list[str]:
    """Options of this command first, whether they stand before the script or behind it.

    Example:
        >>> arrange(["train.py", "--epochs", "3", "-n", "4", "--", "-n", "5"])
        ['-n', '4', '--', 'train.py', '--epochs', '3', '-n', '5']
    """
    return options_first(arguments, add_arguments)


def options_first(arguments: Sequence[str], add_options: Callable[[ArgumentParser], None]) -> list[str]:
    """As ``arrange``, for a command whose options ``add_options`` adds."""
    parser = ArgumentParser(add_help=False)
    add_options(parser)
    valued = {name for action in parser._actions if action.nargs != 0 for name in action.option_strings}
    flags = {name for action in parser._actions if action.nargs == 0 for name in action.option_strings}
    own: list[str] = []
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--":
            return [*own, "--", *rest, *words]
        name, equals, _ = word.partition("=")
        if name in valued:
            own += [word] if equals else [word, *[value for value in [next(words, None)] if value is not None]]
        elif word in flags or (word.startswith("-") and not rest):
            own.append(word)
        else:
            rest.append(word)
    return [*own, "--", *rest] if rest else own


def main(given: Namespace, output: Output) -> int:
    """Run the script. Returns the exit status of the first failure."""
    return exit_status(run_script(given))


def exit_status(supervisor: Supervisor) -> int:
    """That of the first failure of a run."""
    return supervisor.progress.exit_status() or (FAILED if supervisor.unanswered else 0)


def run_script(
    given: Namespace, *, variables: Mapping[str, str] | None = None, enough: int | None = None
) -> Supervisor:
    """Run the script to its end, and say on the standard error how it failed, if it did.

    Args:
        given: What ``add_arguments`` adds.
        variables: Further variables for all workers.
        enough: A descriptor. Once it can be read, the run has served its purpose: the workers are ended, which is no
            failure. Then what workers print goes to the standard error, because the output is not theirs.
    """
    try:
        places = _places(given)
        address, port = _meeting_place(given, places)
    except ValueError as error:
        raise CommandFailure(f"{error}", MISUSED) from None
    command = _script_command(given, places)
    supervisor = Supervisor([place.name for place in places], enough)
    common = {**_common_environment(given), **(variables or {})}
    try:
        with supervisor.catch_signals():
            for host in dict.fromkeys(place.host for place in places):
                workers = [
                    (each.rank, {**common, **environment_of(each, len(places), address, port, named=bool(given.names))})
                    for each in places
                    if each.host == host
                ]
                supervisor.start(host, _host_command(given, host), {"workers": workers, "command": command})
            supervisor.run()
    finally:
        supervisor.close()
    _conclude(supervisor)
    return supervisor


def _places(given: Namespace) -> list[WorkerPlace]:
    names = [name.strip() for name in given.names.split(",")] if given.names else []
    hosts = [HostEntry(LOCALHOST, None)]
    if given.hosts:
        file = Path(given.hosts)
        hosts = read_hosts(file.read_text() if file.is_file() else given.hosts)
    elif given.workers is None and not names:
        raise ValueError("say how many workers to start: -n 4, --names a,b or --hosts a,b, before any --")
    return place_workers(given.workers, names, hosts)


def _meeting_place(given: Namespace, places: Sequence[WorkerPlace]) -> tuple[str, int]:
    """The host of rank 0, which serves the store, and a port."""
    first = places[0].host
    if all(place.host == LOCALHOST for place in places):
        address = given.master_addr or "127.0.0.1"
        if given.master_port:
            _check_free(given.master_port)
        return address, given.master_port or _free_port()
    if first == LOCALHOST and not given.master_addr:
        raise ValueError(
            "the first worker is on this host, and the others cannot reach localhost: give the address of this host "
            "with --master-addr"
        )
    return given.master_addr or first.rpartition("@")[2].strip("[]"), given.master_port or random.choice(_PORTS)


def _check_free(port: int) -> None:
    """The workers would find out too, but later, and with a traceback each."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does
        try:
            listener.bind(("", port))
        except OSError as error:
            raise ValueError(
                f"--master-port {port} cannot be used: {error.strerror}; give another one, or none for a free one"
            ) from None


def _free_port() -> int:
    """A port that is free now. Nothing keeps it free until worker 0 listens there, but the system gives such ports in
    turn, so that no other program gets it soon.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _script_command(given: Namespace, places: Sequence[WorkerPlace]) -> list[str]:
    arguments = given.arguments[1:] if given.arguments[:1] == ["--"] else given.arguments
    if not given.module and any(place.host == LOCALHOST for place in places) and not Path(given.script).is_file():
        what = "is a folder" if Path(given.script).is_dir() else "does not exist"
        raise CommandFailure(
            f"{given.script} {what}; give the path of a script, or -m and the name of a module", MISUSED
        )
    return [given.python or sys.executable, *(["-m"] if given.module else []), given.script, *arguments]


def _common_environment(given: Namespace) -> dict[str, str]:
    """What all workers get. One secret for all: workers on several hosts need one, and no store hands it out then."""
    found = {"PYTHONUNBUFFERED": "1", _SECRET_VARIABLE: os.environ.get(_SECRET_VARIABLE) or secrets.token_hex(32)}
    for each in given.env:
        name, equals, value = each.partition("=")
        found[name] = value if equals else os.environ.get(name, "")
    return found


def _host_command(given: Namespace, host: str) -> list[str]:
    """What starts ``run_host`` there. The folder is the same on each host."""
    python = [given.python or sys.executable, "-P", "-m", _HOST_MODULE]
    if host == LOCALHOST:
        return [sys.executable, *python[1:]]
    ssh = shlex.split(given.ssh or os.environ.get(SSH_VARIABLE) or _SSH)
    return [*ssh, host.strip("[]"), f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(python)}"]


def _conclude(supervisor: Supervisor) -> None:
    """Say on the standard error which worker failed first, and why; and which hosts did not answer."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    progress = supervisor.progress
    first = progress.first_failure()
    if progress.signal is not None:
        console.print(f"\n[bold]backhaul run[/]: {progress.signal.name}: all workers were ended")
    elif first is not None:
        _show_failure(
            console,
            first,
            [each for each in progress.workers if (each.failed or each.failed_slowly) and each is not first],
        )
    for host in supervisor.unanswered:
        console.print(f"[bold red]{host} did not answer[/]: look there for processes that are left")


def _show_failure(console: Console, first: WorkerLog, others: Sequence[WorkerLog]) -> None:
    from rich.markup import escape

    console.print()
    what = f"{first.name} failed first" if others else f"{first.name} failed"
    console.rule(f"[bold red]{what}: it {first.describe()}[/]", align="left")
    for line in first.failure():
        console.print(escape(line))
    console.rule(style="red")
    if others:
        console.print(f"After it failed: {', '.join(each.name for each in others)}. What they said is above.")
