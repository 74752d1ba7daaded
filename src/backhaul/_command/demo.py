"""A tour of one minute: three workers on this host, a call, a gradient, a split model, a profile and a lost worker.

Each step runs the code that it shows, and checks the result against one process.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
import secrets
import subprocess
import sys
import tempfile
import textwrap
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from backhaul._command.output import FINE, MISUSED, CommandFailure, Output

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType

_NAMES = ("you", "left", "right")
_STEPS = 40
_BARS = "▁▂▃▄▅▆▇█"
_START_SECONDS = 60.0
_END_SECONDS = 5.0
_SECRET_VARIABLE = "BACKHAUL_SECRET"
_CODE_WIDTH = 76
_PATH_LINES = 7  # of what the step waited for: the head, and five rows


def add_arguments(parser: ArgumentParser) -> None:
    """Where the report of the profile goes."""
    parser.add_argument("--report", type=Path, metavar="FILE", help="keep the report of the profile as this HTML file")


def main(given: Namespace, output: Output) -> int:
    """Show all steps."""
    if given.report is not None and not given.report.absolute().parent.is_dir():
        raise CommandFailure(f"there is no folder {given.report.parent} for --report; create it first", MISUSED)
    began = time.monotonic()
    logging.getLogger("backhaul").setLevel(logging.CRITICAL)  # the last step shows the loss
    with tempfile.TemporaryDirectory() as name, (Path(name) / "errors").open("w+") as errors:
        folder = Path(name)
        try:
            with _workers(folder, errors, output) as processes:
                _show_all(output, processes, given.report or folder / "report.html", kept=given.report is not None)
        except Exception as error:
            errors.seek(0)
            said = errors.read().strip()
            raise CommandFailure(
                f"the demo failed: {type(error).__name__}: {error}. `backhaul doctor` looks for the reason"
                + (f"\n{said}" if said else "")
            ) from error
    output.text(
        f"That took {time.monotonic() - began:.0f} s. Next: docs/quickstart.md, the programs in examples/, and",
        "[bold]backhaul run script.py -n 4[/] for a script of your own.",
    )
    return FINE


@contextlib.contextmanager
def _workers(folder: Path, errors: IO[str], output: Output) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Start the other workers, and make this process the first one."""
    secret, store = secrets.token_hex(32), f"file://{folder / 'store'}"
    processes: dict[str, subprocess.Popen[bytes]] = {}
    terminal = output.console.is_terminal
    try:
        with output.console.status("starting three workers") if terminal else contextlib.nullcontext():
            for rank, name in enumerate(_NAMES[1:], 1):
                processes[name] = subprocess.Popen(
                    [sys.executable, "-P", "-m", "backhaul._command.demo_worker", name, str(rank), "3", store],
                    env={**os.environ, _SECRET_VARIABLE: secret},
                    stdin=subprocess.PIPE,
                    stdout=errors,
                    stderr=errors,
                )
            import backhaul as bh

            options = bh.Options(
                init_method=store, security=bh.Security(secret=secret), rendezvous_timeout=_START_SECONDS
            )
            bh.init(_NAMES[0], rank=0, world_size=len(_NAMES), options=options)
        try:
            yield processes
        finally:
            bh.shutdown(graceful=False, timeout=_END_SECONDS)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()


def _show_all(output: Output, processes: dict[str, subprocess.Popen[bytes]], report: Path, *, kept: bool) -> None:
    import torch

    from backhaul._command import demo_steps as steps

    own = ", ".join(f"[bold]{name}[/] (process {process.pid})" for name, process in processes.items())
    output.text(
        f"Three workers run on this host: [bold]you[/] (process {os.getpid()}), {own}.",
        "[bold]bh.launch(main, 3)[/] starts workers in a script; [bold]bh.cluster(3)[/] inside one process.",
    )

    _title(output, 1, "Call a function on another worker")
    _code(output, steps.call)
    product, expected, where = steps.call()
    output.text(
        f"[bold]left[/] multiplied the matrices, in process {where}. {_equal('The product', product, expected)}",
        "Functions and arguments of any kind may travel. Tensors go as raw bytes, or in shared memory.",
    )

    _title(output, 2, "Compute a gradient across workers")
    _code(output, steps.gradient)
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, 4, requires_grad=True)
    steps.gradient(x, w)
    alone = torch.autograd.grad(steps.loss_of(steps.hidden(x, w)), (x, w))
    assert x.grad is not None
    assert w.grad is not None
    output.text(
        "[bold]backward[/] went the way of the calls in reverse: to right and back, then to left and back.",
        _equal("x.grad", x.grad, alone[0]),
        _equal("w.grad", w.grad, alone[1]),
    )

    _title(output, 3, "Split a model over workers, and train it")
    _code(output, steps.split)
    model = steps.split(steps.make_model())
    losses, alone_losses = steps.train(model, _STEPS), steps.train(steps.make_model(), _STEPS)
    output.text(
        "The model is used as before, with any optimizer, Lightning, accelerate or the HF Trainer.",
        f"{_STEPS} steps of Adam, loss {losses[0]:.3f} → {losses[-1]:.3f}:  [green]{_curve(losses)}[/]",
        _equal("Each loss", torch.tensor(losses), torch.tensor(alone_losses)),
    )

    _title(output, 4, "See where the time of a step goes")
    _code(output, steps.profile)
    steps.profile(model, str(report))  # the first one imports torch's profiler
    workers, _, path = steps.profile(model, str(report)).table().split("\n\n")
    output.text(_columns(workers, 7), "", _columns("\n".join(path.splitlines()[:_PATH_LINES]), 5))
    output.text("")
    output.text(
        f"The report is in [bold]{report}[/]: open it in a browser."
        if kept
        else "The report is an HTML page; [bold]backhaul demo --report report.html[/] keeps it."
    )

    _title(output, 5, "Lose a worker")
    _code(output, steps.lose)
    error = steps.lose(processes["right"].pid)
    if error is None:
        raise RuntimeError("a call to a worker that was killed returned")
    output.text(
        f"[red]{type(error).__name__}[/]: {error}".replace("[Errno", r"\[Errno"),
        "Only what waits for the lost worker fails. [bold]bh.retry_step[/] makes a training step again",
        "once the worker is back, and counts it exactly once: docs/recovery.md.",
        "",
    )


def _title(output: Output, number: int, text: str) -> None:
    output.text("")
    output.console.rule(f"[bold cyan]{number}. {text}[/]", align="left")


def _code(output: Output, function: Callable[..., Any]) -> None:
    """The body of a function, without its docstring and what it returns at the end."""
    from rich.padding import Padding
    from rich.syntax import Syntax

    lines = textwrap.dedent("".join(inspect.getsourcelines(function)[0][2:])).rstrip().splitlines()
    while lines[-1].startswith("return "):
        lines.pop()
    code = Syntax("\n".join(lines), "python", theme="ansi_dark", background_color="default", code_width=_CODE_WIDTH)
    output.text(Padding(code, (0, 0, 0, 4)), "")


def _equal(what: str, found: torch.Tensor, expected: torch.Tensor) -> str:
    """Say how far a result is from that of one process. Raises ``RuntimeError`` if it is another one."""
    difference = (found - expected).abs().max().item()
    if difference > 1e-4 * max(1.0, expected.abs().max().item()):
        raise RuntimeError(f"{what} differs from that of one process by {difference:g}")
    if difference == 0:
        return f"[green]{what} has the same bits as in one process.[/]"
    return f"[green]{what} is within {difference:.0e} of that of one process.[/]"


def _columns(text: str, count: int) -> RenderableType:
    """The first columns of a table in text, as narrow as they can be."""
    from rich.markup import escape
    from rich.table import Table

    head, dashes, *rows = text.splitlines()
    spans = [match.span() for match in re.finditer("-+", dashes)][:count]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for start, end in spans:
        table.add_column(head[start:end].strip(), justify="right" if head[start] == " " else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(escape(row[start:end].strip().rpartition(": ")[2]) for start, end in spans))
    return table


def _curve(values: list[float]) -> str:
    """A line of bars.

    Example:
        >>> _curve([4.0, 2.0, 0.0])
        '█▅▁'
    """
    low, high = min(values), max(values)
    return "".join(_BARS[round((value - low) / ((high - low) or 1.0) * (len(_BARS) - 1))] for value in values)
