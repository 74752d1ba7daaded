"""Shows where the time of a call, a step or a fan goes: timestamps at each station, on all workers.

    .venv/bin/python benchmarks/stages.py hop
    .venv/bin/python benchmarks/stages.py rnn            # a step of the program
    .venv/bin/python benchmarks/stages.py fan --calls 100
    .venv/bin/python benchmarks/stages.py chain --hops 4 --one

Prints what each station of each worker takes (medians over all runs), and one run of median length in order. The own
time of a station is without the stations that it calls. Its processor time is also without the time in which another
thread had the interpreter or the processor. ``--one`` prints every stamp of that run, with its thread; ``--summary``
prints only the medians. Stamps cost about a microsecond each. The clocks of processes on one host agree.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import stamps
import timeline
import torch
from programs import processes
from stamps import Stamp, mark

import backhaul as bh

stamps.watch_all()
weight = torch.full((16,), 0.99, requires_grad=True)
Run = dict[str, list[Stamp]]
"""The stamps of each worker in one run; the driver's begin with START and end with END."""


def multiply(x: torch.Tensor) -> torch.Tensor:
    """The smallest thing worth a gradient."""
    return x * weight


def hop(x: torch.Tensor, left: int, to: str, back: str) -> torch.Tensor:
    """One hop of a chain."""
    y = x * weight
    return y if left == 1 else bh.rpc_sync(to, hop, args=(y, left - 1, back, to))


def empty() -> None:
    """A call without anything."""
    bh.rpc_sync("worker1", time.time)


def echo() -> None:
    """A call with a small tensor."""
    bh.rpc_sync("worker1", torch.neg, args=(torch.ones(16),))


def one_hop() -> None:
    """Forward, backward and release."""
    x = torch.ones(16, requires_grad=True)
    with bh.context() as ctx:
        loss = bh.rpc_sync("worker1", multiply, args=(x,)).sum()
        mark("forward is over")
        bh.backward(ctx, [loss])


def chain(hops: int, backward: bool) -> None:
    """Back and forth between two workers."""
    x = torch.ones(16, requires_grad=True)
    with bh.context() as ctx:
        loss = bh.rpc_sync("worker1", hop, args=(x, hops, "worker2", "worker1")).sum()
        mark("forward is over")
        if backward:
            bh.backward(ctx, [loss])


def fan(calls: int) -> None:
    """Many calls at once to both workers, one backward."""
    x = torch.ones(16, requires_grad=True)
    with bh.context() as ctx:
        started = [bh.rpc_async(f"worker{n % 2 + 1}", torch.mul, args=(x, float(n))) for n in range(calls)]
        found = bh.wait_all(started)
        mark("forward is over")
        bh.backward(ctx, [torch.stack(found).sum()])


def measure(case: Callable[[], Any], repeat: int) -> list[Run]:
    """The stamps of each run."""
    me = bh.get_worker_info().name
    others = [info.name for info in bh.get_worker_infos() if info.name != me]
    for _ in range(repeat // 2 + 1):
        case()
    for name in others:
        bh.rpc_sync(name, stamps.take)
    stamps.take()
    for _ in range(repeat):
        mark("START")
        case()
        mark("END")
    own = stamps.take()
    noted = {name: bh.rpc_sync(name, stamps.take) for name in others}
    starts = [place for place, stamp in enumerate(own) if stamp.what == "START"]
    found = []
    for start in starts:
        end = next(place for place in range(start, len(own)) if own[place].what == "END")
        begin, over = own[start].when, own[end].when
        during = {name: [each for each in noted[name] if begin <= each.when <= over] for name in others}
        found.append({me: own[start : end + 1], **during})
    return found


def in_cluster(case: str, hops: int, calls: int, repeat: int) -> list[Run]:
    """What every worker of a case runs."""
    if bh.get_worker_info().id:
        return []
    cases: dict[str, Callable[[], None]] = {
        "empty": empty,
        "echo": echo,
        "hop": one_hop,
        "chain": functools.partial(chain, hops, True),
        "forward": functools.partial(chain, hops, False),
        "fan": functools.partial(fan, calls),
    }
    return measure(cases[case], repeat)


def of_program(repeat: int, options: argparse.Namespace, driver: Any) -> None:
    """Runs in the first worker of a program."""
    show(measure(functools.partial(driver.run, 1), repeat), options)


def show(runs: list[Run], options: argparse.Namespace) -> None:
    """Print where the time went."""
    driver = next(iter(runs[0]))
    taken = []
    for run in runs:
        duration = (run[driver][-1].when - run[driver][0].when) / 1e9
        taken.append((duration, timeline.pieces_of(run, driver, stamps.station_of), run))
    duration, pieces, median = sorted(taken, key=lambda each: each[0])[len(taken) // 2]
    if stamps.missing:
        print("not found, so not watched:", *stamps.missing, file=sys.stderr)
    if options.one:
        print(f"one of {len(runs)} runs, of median length")
        print(*every_stamp(median, driver), sep="\n")
        return
    print(f"medians of {len(runs)} runs")
    short = [(duration, pieces) for duration, pieces, _ in taken]
    if options.markdown:
        print(*timeline.markdown(short, [stamps.PROGRAM, *stamps.WATCHED, stamps.FUNCTION]), sep="\n")
    print(*timeline.summary(short), sep="\n")
    if not options.summary:
        print(f"\none of {len(runs)} runs, of median length, in order; microseconds")
        print(*timeline.in_order(pieces, duration), sep="\n", flush=True)


def every_stamp(run: Run, driver: str) -> list[str]:
    """All stamps of a run, with the time since the one before."""
    begin = before = run[driver][0].when
    threads: dict[tuple[str, int], str] = {}
    lines = []
    for stamp, name in sorted((stamp, name) for name, stamps_ in run.items() for stamp in stamps_):
        where = threads.setdefault((name, stamp.thread), f"{name}/{1 + sum(key[0] == name for key in threads)}")
        at, step, column = (stamp.when - begin) / 1e3, (stamp.when - before) / 1e3, 12 * list(run).index(name)
        lines.append(f"{at:9.0f} {step:+7.0f}  {' ' * column}{where}: {stamp.what}")
        before = stamp.when
    return lines


def main() -> None:
    """Run a case, or a program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "case", choices=("empty", "echo", "hop", "chain", "forward", "fan", *processes.NAMES), help="what to run"
    )
    parser.add_argument("--hops", type=int, default=4, help="of a chain")
    parser.add_argument("--calls", type=int, default=100, help="of a fan")
    parser.add_argument("--repeat", type=int, default=100)
    parser.add_argument("--one", action="store_true", help="every stamp of one run, with threads")
    parser.add_argument("--summary", action="store_true", help="only what each station takes")
    parser.add_argument("--markdown", action="store_true", help="also a table for the documentation")
    options = parser.parse_args()
    if options.case in processes.NAMES:
        processes.run(options.case, functools.partial(of_program, options.repeat, options))
    else:
        show(bh.launch(in_cluster, 3, args=(options.case, options.hops, options.calls, options.repeat))[0], options)


if __name__ == "__main__":
    main()
