"""Shows the status of a cluster as text: what ``backhaul top`` prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from backhaul._monitoring.cluster_view import ClusterStatus, WorkerView
from backhaul._monitoring.status import CallStatus, FunctionStatus

_STYLES = {"up": "green", "new": "dim", "silent": "yellow", "lost": "bold red"}
_MAX_ROWS = 5  # of functions, of calls under way and of events


_WIDE = 10_000  # columns of a terminal in which every table fits


class FittingTable:
    """A table that leaves out columns until it is as narrow as the terminal: better fewer numbers than parts of them.

    Args:
        columns: The heads. Those that end with ``<`` are of texts, the others of numbers.
        least: The columns that may be left out, the least important first.
    """

    def __init__(self, columns: Sequence[str], least: Sequence[str]) -> None:
        self._columns = columns
        self._least = least
        self._rows: list[tuple[str | Text, ...]] = []

    def add_row(self, *cells: str | Text) -> None:
        """Cells that are missing at the end are empty."""
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for count in range(len(self._least) + 1):
            table = self._without(self._least[:count])
            if Measurement.get(console, options.update(width=_WIDE), table).maximum <= options.max_width:
                break
        yield table

    def _without(self, left_out: Sequence[str]) -> Table:
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
        shown = [n for n, column in enumerate(self._columns) if column.rstrip("<") not in left_out]
        for n in shown:
            name = self._columns[n]
            table.add_column(name.rstrip("<"), justify="left" if name.endswith("<") else "right", no_wrap=True)
        for row in self._rows:
            table.add_row(*(row[n] if n < len(row) else "" for n in shown))
        return table


def to_table(status: ClusterStatus) -> RenderableType:
    """All workers by host, the slowest functions, the calls that are longest under way, and what happened last."""
    parts: list[RenderableType] = [_headline(status), _workers(status.workers)]
    functions = slowest_functions(status.workers)[:_MAX_ROWS]
    if functions:
        parts += [_functions(functions)]
    calls = longest_calls(status.workers)[:_MAX_ROWS]
    if calls:
        parts += [_calls(calls)]
    for event in status.events[-_MAX_ROWS:]:
        ago = status.at - event.at
        parts.append(
            Text(f"{ago:5.0f} s ago  {event.worker} {event.kind}  {event.reason}", _STYLES.get(event.kind, ""))
        )
    parts += [Text(problem, "red") for problem in status.problems]
    return Group(*parts)


def _headline(status: ClusterStatus) -> Text:
    counts = {state: sum(worker.state == state for worker in status.workers) for state in _STYLES}
    found = Text(f"{len(status.workers)} workers: ")
    shown = [(state, count) for state, count in counts.items() if count]
    for place, (state, count) in enumerate(shown):
        found.append(f"{count} {state}", _STYLES[state])
        found.append(", " if place + 1 < len(shown) else "")
    calls = sum(worker.rates.served for worker in status.workers)
    sent = sum(worker.rates.sent for worker in status.workers)
    found.append(f"   {to_rate(calls)} calls/s   {to_bytes(sent)}/s")
    return found


def _workers(workers: Sequence[WorkerView]) -> FittingTable:
    columns = ["host<", "worker<", "state<", "served/s", "made/s", "in/s", "out/s"]
    columns += ["queue", "calls", "memory", "values", "graph", "passes"]
    least = ["graph", "values", "queue", "passes", "calls", "memory", "out/s", "in/s", "made/s", "served/s"]
    if len({worker.host for worker in workers}) == 1:
        least.insert(0, "host")
    table = FittingTable(columns, least)
    host = ""
    for worker in sorted(workers, key=lambda each: (each.host, each.id)):
        style = _STYLES[worker.state]
        first = "" if worker.host == host else worker.host[:20]
        host, found, rates = worker.host, worker.status, worker.rates
        name, state = Text(worker.name, style), Text(worker.state, style)
        if found is None or worker.state == "lost":
            table.add_row(first, name, state)
            continue
        table.add_row(
            first,
            name,
            state,
            to_rate(rates.served),
            to_rate(rates.called),
            to_bytes(rates.received),
            to_bytes(rates.sent),
            str(found.tasks),
            str(found.num_serving + found.num_calling),
            to_bytes(found.memory),
            to_bytes(found.references.owned_bytes),
            str(found.graphs.messages),
            to_rate(rates.passes),
        )
    return table


def _functions(functions: Sequence[tuple[str, FunctionStatus]]) -> FittingTable:
    columns = ["slowest functions<", "on<", "calls", "mean", "longest", "waited", "in all"]
    table = FittingTable(columns, ["waited", "longest", "calls", "in all"])
    for worker, each in functions:
        mean, waited = each.seconds / each.calls, each.waited / each.calls
        table.add_row(
            each.name[-48:],
            worker,
            str(each.calls),
            to_seconds(mean),
            to_seconds(each.longest),
            to_seconds(waited),
            to_seconds(each.seconds),
        )
    return table


def _calls(calls: Sequence[tuple[str, CallStatus]]) -> FittingTable:
    table = FittingTable(["calls under way<", "from<", "on<", "for"], ["from"])
    for worker, call in calls:
        table.add_row(call.function[-48:], call.worker, worker, to_seconds(call.seconds))
    return table


def slowest_functions(workers: Iterable[WorkerView]) -> list[tuple[str, FunctionStatus]]:
    """The functions of all workers with the worker that served them, those first that took most time in all."""
    found = [
        (worker.name, function)
        for worker in workers
        if worker.status is not None and worker.state != "lost"
        for function in worker.status.functions
    ]
    return sorted(found, key=lambda each: -each[1].seconds)


def longest_calls(workers: Iterable[WorkerView]) -> list[tuple[str, CallStatus]]:
    """The calls under way with the worker that serves them, those first that take longest."""
    found = [
        (worker.name, call)
        for worker in workers
        if worker.status is not None and worker.state != "lost"
        for call in worker.status.serving
    ]
    return sorted(found, key=lambda each: -each[1].seconds)


def to_bytes(number: float) -> str:
    """A number of bytes for people.

    >>> to_bytes(0), to_bytes(1536), to_bytes(25.2e6), to_bytes(3e9)
    ('0 B', '1.5 kB', '25 MB', '3.0 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            break
        number /= 1000
    return f"{number:.0f} {unit}" if unit == "B" or number >= 9.95 else f"{number:.1f} {unit}"


def to_rate(number: float) -> str:
    """A number per second for people.

    >>> to_rate(0), to_rate(2.25), to_rate(1234.5)
    ('0', '2.2', '1234')
    """
    return f"{number:.0f}" if number >= 9.95 or not number else f"{number:.1f}"


def to_seconds(seconds: float) -> str:
    """A time for people.

    >>> to_seconds(0.0000031), to_seconds(0.0123), to_seconds(75)
    ('3 us', '12.3 ms', '75.0 s')
    """
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
