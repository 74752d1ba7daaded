"""The command line of the simulation."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import faulthandler
import re
import time
from collections.abc import Callable, Sequence

import torch

import tools.simulation
from backhaul._sim.faults import FAULTS
from tools.simulation.one_seed import Checks, SimulationSetting
from tools.simulation.retried import run_retried_seed
from tools.simulation.run import run_seed

_STUCK_SECONDS = 60.0  # of real time; a seed that takes longer hangs outside the scheduler
_REPORT_SECONDS = 5.0  # between two lines about progress


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.simulation", description=tools.simulation.__doc__)
    parser.add_argument("--seeds", default="0:20", help="one seed, or first:last+1 (default 0:20)")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="steps of each seed")
    parser.add_argument("--faults", default=",".join(FAULTS), help="the kinds of faults to draw from, or 'none'")
    parser.add_argument(
        "--left-by-lost",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="check what lost workers leave behind",
    )
    parser.add_argument(
        "--references",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="check references even if messages were lost",
    )
    parser.add_argument(
        "--replay", action=argparse.BooleanOptionalAction, default=True, help="run some steps in contexts with replay"
    )
    parser.add_argument("--plain", type=float, default=0.5, help="the share of steps outside contexts (default 0.5)")
    parser.add_argument(
        "--retry-steps", action="store_true", help="make the steps of a training run with retry_step; see retried.py"
    )
    parser.add_argument("--errors", help="show the errors of steps that match this regular expression")
    parser.add_argument("--twice", action="store_true", help="run each seed twice and compare the runs")
    parser.add_argument("--trace", help="write the trace to this file; for one seed")
    parser.add_argument("--keep-going", type=int, default=10, help="stop after this many failed seeds")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, write: Callable[[str], object] = print) -> int:
    """Run the command. Returns its exit status."""
    given = _parse(arguments)
    first, _, last = given.seeds.partition(":")
    seeds = range(int(first), int(last) if last else int(first) + 1)
    faults = () if given.faults == "none" else tuple(given.faults.split(","))
    if unknown := set(faults) - set(FAULTS):
        raise SystemExit(f"unknown faults {', '.join(sorted(unknown))}; choose from {', '.join(FAULTS)}")
    setting = SimulationSetting(
        0,
        given.workers,
        given.steps,
        faults,
        Checks(left_by_lost=given.left_by_lost, references=given.references),
        given.replay,
        given.plain,
        keep_trace=given.trace is not None,
    )
    torch.set_num_threads(1)
    run = run_retried_seed if given.retry_steps else run_seed
    outcomes: collections.Counter[str] = collections.Counter()
    faults_seen: collections.Counter[str] = collections.Counter()
    failed: list[int] = []
    switches = frames = 0
    begun = reported = time.monotonic()
    for done, seed in enumerate(seeds, 1):
        faulthandler.dump_traceback_later(_STUCK_SECONDS, exit=True)
        verdict = run(dataclasses.replace(setting, seed=seed))
        if given.twice:
            again = run(dataclasses.replace(setting, seed=seed))
            if again.digest != verdict.digest:
                verdict.problems.append(f"two runs of this seed differ: {verdict.digest} and {again.digest}")
        faulthandler.cancel_dump_traceback_later()
        if given.trace is not None:
            with open(given.trace, "w") as file:
                file.write("\n".join(verdict.trace))
        outcomes += verdict.outcomes
        faults_seen += verdict.faults
        switches += verdict.switches
        frames += verdict.frames
        for error in verdict.errors:
            if given.errors is not None and re.search(given.errors, error):
                write(f"seed {seed}: {error}")
        if verdict.problems:
            failed.append(seed)
            write(f"seed {seed} FAILED ({verdict.digest})")
            for problem in verdict.problems[:5]:
                write("  " + problem.rstrip().replace("\n", "\n  "))
            write(f"  again: {_command(given, seed)}")
        now = time.monotonic()
        if now > reported + _REPORT_SECONDS or len(seeds) == 1:
            reported = now
            write(f"{done} of {len(seeds)} seeds, {outcomes.total()} steps, {now - begun:.0f} s, {len(failed)} failed")
        if len(failed) >= given.keep_going:
            break
    spent = time.monotonic() - begun
    write(
        f"{outcomes.total()} steps in {spent:.1f} s ({outcomes.total() / spent:.1f} a second), {frames} frames, "
        f"{switches} switches"
    )
    write("steps:  " + ", ".join(f"{how} {count}" for how, count in outcomes.most_common()))
    write("faults: " + (", ".join(f"{kind} {count}" for kind, count in faults_seen.most_common()) or "none"))
    for seed in failed:
        write(f"failed: {_command(given, seed)}")
    return 1 if failed else 0


def _command(given: argparse.Namespace, seed: int) -> str:
    text = f"python -m tools.simulation --seeds {seed} --workers {given.workers} --steps {given.steps}"
    if given.faults != ",".join(FAULTS):
        text += f" --faults '{given.faults}'"
    text += "" if given.left_by_lost else " --no-left-by-lost"
    text += "" if given.replay else " --no-replay"
    text += " --retry-steps" if given.retry_steps else ""
    text += "" if given.plain == 0.5 else f" --plain {given.plain:g}"
    return text + ("" if given.references else " --no-references")
