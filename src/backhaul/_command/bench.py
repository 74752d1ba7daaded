"""Compare Backhaul with `torch.distributed.rpc`, for two processes on this machine.

Both systems are started, and measured in turns. It takes about half a minute. Other programs on the
machine change the times; the ratio changes less.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from backhaul._command import machine
from backhaul._command.output import FINE, MISUSED, CommandFailure, Output

if TYPE_CHECKING:
    from rich.console import RenderableType

ROWS = {
    "small": "a call with 16 numbers, and its reply",
    "large": "a call with 1 MiB, and its reply",
    "together": "each of 100 calls that are made at once",
    "gradient": "a call with 16 numbers, and the backward through it",
}
SYSTEMS = ("backhaul", "reference")

_LIMIT_SECONDS = 120.0  # for all


@dataclass(frozen=True, slots=True)
class BenchedPair:
    """Two processes of one system, and the pipes of the first one."""

    system: str
    processes: list[subprocess.Popen[str]]

    def answer(self, row: str | None = None) -> str:
        """Ask for a row, if one is given, and read the answer. Raises ``CommandFailure`` if the process has ended."""
        asked, said = self.processes[0].stdin, self.processes[0].stdout
        assert asked is not None
        assert said is not None
        with contextlib.suppress(BrokenPipeError):  # reading tells
            if row is not None:
                asked.write(f"{row}\n")
                asked.flush()
        line = said.readline().strip()
        if not line:
            raise EOFError(self.system)
        return line


def add_arguments(parser: ArgumentParser) -> None:
    """How long, and against what."""
    parser.add_argument("--rounds", type=int, default=3, help="how often each row is measured (%(default)s)")
    parser.add_argument("--seconds", type=float, default=0.4, help="for a row in a round (%(default)s)")
    parser.add_argument("--alone", action="store_true", help="measure Backhaul only")


def main(given: Namespace, output: Output) -> int:
    """Measure, and print the table."""
    if given.rounds < 1 or not 0 < given.seconds <= 10:
        raise CommandFailure("--rounds must be 1 or more, and --seconds above 0 and at most 10", MISUSED)
    systems = SYSTEMS[:1] if given.alone else SYSTEMS
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "errors").open("w+") as errors:
        try:
            with _pairs(systems, Path(folder), errors) as pairs:
                times = _measure(pairs, given, output)
        except EOFError as error:
            errors.seek(0)
            last = errors.read().strip().splitlines()[-3:]
            raise CommandFailure(
                f"the processes of '{error}' ended, or took longer than {_LIMIT_SECONDS:g} s; `backhaul doctor` looks "
                "for the reason" + "".join(f"\n{line}" for line in last)
            ) from None
    found = [_row(row, text, times) for row, text in ROWS.items()]
    setting = {
        "torch": machine.torch_facts().get("version"),
        "native_core": machine.core_state()[0],
        "processors": machine.processors(),
        "rounds": given.rounds,
    }
    output.report({**setting, "rows": found}, lambda: _table(found))
    core = "with" if setting["native_core"] == "ready" else "without"
    output.text(f"torch {setting['torch']}, {setting['processors']:g} processors, {core} the native core")
    return FINE


@contextlib.contextmanager
def _pairs(systems: tuple[str, ...], folder: Path, errors: IO[str]) -> Iterator[list[BenchedPair]]:
    """Start all processes; end them, however this ends."""
    environment = {**os.environ, "BACKHAUL_SECRET": secrets.token_hex(32), "OMP_NUM_THREADS": "1"}
    pairs: list[BenchedPair] = []
    watch = threading.Timer(_LIMIT_SECONDS, lambda: _kill(pairs))
    watch.daemon = True
    watch.start()
    try:
        for system in systems:
            pair = BenchedPair(system, [])
            pairs.append(pair)
            for rank in range(2):
                store = f"file://{folder / system}"
                program = ["-P", "-m", "backhaul._command.bench_program", system, str(rank), store]
                pair.processes.append(
                    subprocess.Popen(
                        [sys.executable, *program],
                        env=environment,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        text=True,
                    )
                )
        yield pairs
    finally:
        watch.cancel()
        _kill(pairs)
        for process in (each for pair in pairs for each in pair.processes):
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _kill(pairs: list[BenchedPair]) -> None:
    for pair in pairs:
        for process in pair.processes:
            process.kill()


def _measure(pairs: list[BenchedPair], given: Namespace, output: Output) -> dict[tuple[str, str], list[float]]:
    """The times by row and system, in turns."""
    times: dict[tuple[str, str], list[float]] = {}
    shown = output.console.status("starting") if output.console.is_terminal else None
    with shown or contextlib.nullcontext():
        for pair in pairs:
            while pair.answer() != "ready":
                pass
        for number in range(given.rounds):
            for row, text in ROWS.items():
                if shown is not None:
                    shown.update(f"round {number + 1} of {given.rounds}: {text}")
                for pair in pairs:
                    times.setdefault((row, pair.system), []).append(float(pair.answer(f"{row} {given.seconds}")))
    return times


def _row(row: str, text: str, times: dict[tuple[str, str], list[float]]) -> dict[str, Any]:
    found: dict[str, Any] = {"row": row, "what": text}
    for system in SYSTEMS:
        if (row, system) in times:
            found[system] = statistics.median(times[row, system])
    if len(found) > 3:
        found["ratio"] = found["reference"] / found["backhaul"]
    return found


def _table(found: list[dict[str, Any]]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("time of one")
    for name in ("Backhaul", "reference", "faster"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in found:
        ratio = f"{each['ratio']:.1f}x" if "ratio" in each else ""
        table.add_row(each["what"], *(_time(each.get(system)) for system in SYSTEMS), f"[bold]{ratio}[/]")
    return table


def _time(seconds: float | None) -> str:
    """A time for people.

    Example:
        >>> _time(0.0000421), _time(0.00318), _time(None)
        ('42 us', '3.18 ms', '')
    """
    if seconds is None:
        return ""
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
