"""Systems side by side: rows that are measured on all of them in one run, alternating, and the table of ratios."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import torch
import torch.distributed.autograd as reference_autograd
import torch.distributed.rpc as reference
import torch.multiprocessing
from rich.console import Console
from rich.table import Table

import backhaul as bh

OUT = Path(__file__).parent / "out"
Numbers = dict[str, tuple[float, ...]]
"""By row: the seconds of each system, ours first and the reference last."""

_KEY = b"a conductor and two sides"
_WARM_UP = 0.25  # seconds at the begin of each round: everything was stopped


OURS, PLAIN, THEIRS = "backhaul", "plain", "reference"
"""``PLAIN`` is Backhaul too, with ``loss.backward()`` instead of a context."""


@dataclass(frozen=True)
class System:
    """What a benchmark calls, of one of the systems."""

    name: str
    call: Callable[..., Any]
    start: Callable[..., Any]
    wait: Callable[..., Any]
    context: Callable[..., Any]
    backward: Callable[..., Any]
    gradients: Callable[..., Any]


def backward_without_context(_: None, roots: list[torch.Tensor]) -> None:
    """``loss.backward()`` over all workers."""
    torch.autograd.backward(roots)


SYSTEMS = {
    OURS: System(OURS, bh.rpc_sync, bh.rpc_async, bh.wait_all, bh.context, bh.backward, bh.get_gradients),
    PLAIN: System(
        PLAIN, bh.rpc_sync, bh.rpc_async, bh.wait_all, contextlib.nullcontext, backward_without_context, dict
    ),
    THEIRS: System(
        THEIRS,
        reference.rpc_sync,
        reference.rpc_async,
        torch.futures.wait_all,
        reference_autograd.context,
        reference_autograd.backward,
        reference_autograd.get_gradients,
    ),
}


@dataclass(frozen=True)
class Row:
    """One thing to measure, on one of the systems."""

    name: str
    call: Callable[[], Any]
    calls: int  # per round
    rounds: int
    per: int = 1  # how many calls one measurement contains


Rows = Callable[[str], list[Row]]
"""What to measure, for a system; called by its first worker."""


def serve(rows: Rows, system: str, address: str) -> None:
    """The first worker of a system: measures what the conductor asks for."""
    found = rows(system)
    with connection.Client(address, "AF_UNIX", authkey=_KEY) as conductor:
        conductor.send([(row.name, row.rounds) for row in found])
        while (place := conductor.recv()) is not None:
            row, times = found[place], []
            warm = time.perf_counter() + _WARM_UP
            row.call()
            while time.perf_counter() < warm:
                row.call()
            for _ in range(row.calls):
                start = time.perf_counter()
                row.call()
                times.append((time.perf_counter() - start) / row.per)
            conductor.send(times)


def serve_ours(rows: Rows, system: str, address: str) -> None:
    """Runs in every worker of Backhaul's cluster."""
    if bh.get_worker_info().id == 0:
        serve(rows, system, address)


def serve_theirs(  # noqa: PLR0917 (spawn passes them by place)
    rank: int,
    rows: Rows,
    address: str,
    place: tuple[int, int, int],
    transport: str,
    devices: dict[int, int] | None = None,
) -> None:
    """Runs in every worker of the reference's cluster."""
    count, port, threads = place
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))  # as ``bh.launch`` does
    join_reference(f"worker{rank}", rank, count, port, threads=threads, transport=transport, devices=devices)
    if rank == 0:
        serve(rows, THEIRS, address)
    reference.shutdown()


class Side:
    """A system's processes, and the connection to its first worker."""

    def __init__(self, system: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        address = f"{self._folder.name}/conductor"
        with connection.Listener(address, "AF_UNIX", authkey=_KEY) as listener:
            command = [sys.executable, *sys.argv, "--side", system, "--at", address]
            self._head = subprocess.Popen(command, start_new_session=True)
            try:
                self._first = listener.accept()
                self.rows: list[tuple[str, int]] = self._first.recv()
            except BaseException:  # an interrupt reaches this process alone
                self._kill()
                raise

    def measure(self, row: int) -> list[float]:
        """One round of a row, in seconds per call."""
        self._first.send(row)
        times: list[float] = self._first.recv()
        return times

    def stop(self) -> None:
        """Let none of the processes run."""
        os.killpg(self._head.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let them run again."""
        os.killpg(self._head.pid, signal.SIGCONT)

    def close(self) -> None:
        """End all of them."""
        self.go_on()
        try:
            self._first.send(None)
            self._head.wait(60)
        finally:
            self._kill()
            self._first.close()
            self._folder.cleanup()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._head.pid, signal.SIGKILL)


def conduct(*systems: str) -> Numbers:
    """Measure each row on all systems, alternating; the median of each, in seconds per call. Default: ours and theirs.

    Each has processes of its own: threads of the reference poll without end, also when it has nothing to do, and would
    take the processors from whoever is measured beside them. So the processes of the other systems are stopped.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # else processes that are stopped would stay
    with contextlib.ExitStack() as stack:
        sides = []
        for system in systems or (OURS, THEIRS):
            sides.append(Side(system))
            stack.callback(sides[-1].close)
            sides[-1].stop()
        numbers: Numbers = {}
        for place, (name, rounds) in enumerate(sides[0].rows):
            times: list[list[float]] = [[] for _ in sides]
            for round_ in range(-1, rounds):  # round -1 warms up and is thrown away
                for side, found in zip(sides, times, strict=True):
                    side.go_on()
                    measured = side.measure(place)
                    side.stop()
                    if round_ >= 0:
                        found.extend(measured)
            numbers[name] = tuple(map(statistics.median, times))
        return numbers


def options_of(description: str | None) -> argparse.Namespace:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--transport", choices=("auto", "unix", "tcp"), default="auto")
    parser.add_argument("--side", choices=tuple(SYSTEMS), help=argparse.SUPPRESS)
    parser.add_argument("--at", help=argparse.SUPPRESS)
    return parser.parse_args()


def play(
    rows: Rows,
    workers: int,
    options: argparse.Namespace,
    *,
    threads: int = 16,
    devices: dict[int, int] | None = None,
) -> bool:
    """Be one of the sides, if that is what this process was started for; the reference has so many threads, and these
    devices for each other worker's.
    """
    if options.side in (OURS, PLAIN):
        ours = bh.Options(transport=options.transport)
        bh.launch(serve_ours, workers, args=(rows, options.side, options.at), options=ours)
    elif options.side == THEIRS:
        place = workers, free_port(), threads
        torch.multiprocessing.spawn(serve_theirs, (rows, options.at, place, options.transport, devices), workers)
    return options.side is not None


def join_reference(
    name: str,
    rank: int,
    count: int,
    port: int,
    *,
    threads: int = 16,
    transport: str = "auto",
    devices: dict[int, int] | None = None,
) -> None:
    """Become a worker of the reference's cluster; over TCP it is kept from using shared memory, as we are."""
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    warnings.filterwarnings("ignore", message="You are using a Backend")  # its own business
    limits = {"_transports": ["uv"], "_channels": ["basic"]} if transport == "tcp" else {}
    maps = {f"worker{other}": devices for other in range(count) if devices and other != rank}
    reference.init_rpc(
        name,
        rank=rank,
        world_size=count,
        rpc_backend_options=reference.TensorPipeRpcBackendOptions(
            num_worker_threads=threads, init_method=f"tcp://127.0.0.1:{port}", device_maps=maps, **limits
        ),
    )


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def show(seconds: float) -> str:
    """A duration for people."""
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def report(title: str, name: str, numbers: Numbers) -> None:
    """Print the table, keep the numbers in ``benchmarks/out``. The second of three times is that in a context."""
    table = Table(title=f"{title}; reference: torch {torch.__version__}; medians")
    both = any(len(times) > 2 for times in numbers.values())
    for column in ("", "Backhaul", *(("in a context",) if both else ()), "reference", "reference / Backhaul"):
        table.add_column(column, justify="right" if column else "left")
    if both:
        table.add_column("context / Backhaul", justify="right")
    for row, (ours, *between, theirs) in numbers.items():
        middle = [show(between[0]) if between else ""] if both else []
        last = [f"{between[0] / ours:.2f}x" if between else ""] if both else []
        table.add_row(row, show(ours), *middle, show(theirs), f"{theirs / ours:.2f}x", *last)
    Console().print(table)
    OUT.mkdir(exist_ok=True)
    kept = {
        row: {"backhaul_s": times[0], "reference_s": times[-1], **({"context_s": times[1]} if times[2:] else {})}
        for row, times in numbers.items()
    }
    (OUT / f"{name}.json").write_text(json.dumps(kept, indent=2) + "\n")
    (OUT / f"{name}.svg").write_text(_plot(title, {row: times[-1] / times[0] for row, times in numbers.items()}))
    print(f"Kept in benchmarks/out/{name}.json and {name}.svg")


def _plot(title: str, ratios: dict[str, float]) -> str:
    """How many times faster each row is, as a picture."""
    left, wide, high, most = 330, 360, 26, max(*ratios.values(), 1.0)
    height = high * len(ratios) + 70
    one = left + wide / most
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + wide + 80}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="100%" height="100%" fill="white"/><text x="16" y="26" font-size="15">{escape(title)}: '
        f"times faster than torch {escape(torch.__version__)}</text>",
    ]
    for place, (row, ratio) in enumerate(ratios.items()):
        y, width = 44 + place * high, wide * ratio / most
        colour = "#44aa99" if ratio >= 1 else "#cc6677"
        parts.append(
            f'<text x="{left - 10}" y="{y + 15}" text-anchor="end">{escape(row)}</text>'
            f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{high - 6}" fill="{colour}"/>'
            f'<text x="{left + width + 6:.1f}" y="{y + 15}">{ratio:.2f}</text>'
        )
    parts.append(
        f'<line x1="{one:.1f}" x2="{one:.1f}" y1="38" y2="{height - 24}" stroke="#333" stroke-dasharray="4 3"/>'
        f'<text x="{one:.1f}" y="{height - 8}" text-anchor="middle">as fast as the reference</text></svg>'
    )
    return "\n".join(parts) + "\n"
