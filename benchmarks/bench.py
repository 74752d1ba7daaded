"""All benchmarks side by side with ``torch.distributed``: programs, calls, backward passes, steps.

    make bench                                  # all rows
    make bench ARGS="--rows RNN,fan --quick"    # some rows, few repetitions
    make bench ARGS=--regress                   # compare with the result that was kept last
    make bench ARGS=--keep                      # keep the result, in benchmarks/kept
    make bench ARGS="--transport tcp"

Each row is measured in rounds: some calls through Backhaul, the same calls through the reference, and so on in turn.
Shown are medians of the wall time, the processor time of all processes of the system, and the ratios to the reference
(above 1: Backhaul is cheaper).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Container

import backward
import calls
import steps
from command import effort_of, read_options, wanted_by
from harness import Numbers, Suite, conduct, lead
from programs import rows as programs
from report import Ratios, keep, machine, ratios_of, read_kept, worse, write


def suites_for(transport: str) -> list[Suite]:
    """All suites. The programs choose their transport themselves."""
    of_programs = programs.suites() if transport == "auto" else []
    return [*of_programs, calls.suite(transport), backward.suite(transport), steps.suite(transport)]


def compare(numbers: Numbers, kept: Ratios, noise: float, again: Callable[[Container[str]], Numbers]) -> bool:
    """Print which rows are worse than those kept. Rows that look worse are measured ``again`` first."""
    suspects = worse(ratios_of(numbers), kept, noise)
    second = ratios_of(again(suspects.keys()) if suspects else {})
    confirmed = worse(second, kept, noise)
    for row, lower in confirmed.items():
        changes = ", ".join(f"{what} {kept[row][what]:.2f} -> {second[row][what]:.2f}" for what in lower)
        print(f"worse: {row}: {changes}")
    print(f"{len(confirmed)} of {len(kept.keys() & numbers.keys())} rows are worse than those kept")
    return bool(confirmed)


def main() -> int:
    """Measure, print and compare."""
    options = read_options(__doc__)
    suites = suites_for(options.transport)
    if options.side is not None:
        lead(suites, options.side, options.at)
        return 0
    if importlib.util.find_spec("numpy") is None:
        sys.exit("workers of the reference cannot start without numpy: install it")
    name = f"bench-{options.transport}"
    kept = read_kept(name) if options.regress else {}
    if options.regress and not kept:
        sys.exit(f"there is no kept result for {machine()}: keep one first, with --keep")
    effort, wanted = effort_of(options), wanted_by(options)
    lives: Numbers = {}
    sentences: list[str] = []
    starts = steps.start_and_stop(options.quick)
    if wanted(starts):  # first of all: it forks, and this process must not have started threads
        lives[starts], sentences = steps.measure_lives(options.quick)
    numbers = conduct(suites, effort, wanted=wanted) | lives
    if not numbers:
        sys.exit(f"no row is called like {options.rows!r}")
    sentences += [*calls.floors(numbers), *steps.floors(numbers)]
    write(options.out, name, f"Backhaul and the reference ({options.transport})", numbers, sentences)

    def again(rows: Container[str]) -> Numbers:
        return conduct(suites, effort, wanted=rows.__contains__) | {row: lives[row] for row in lives if row in rows}

    status = int(options.regress and compare(numbers, kept, options.noise, again))
    if options.keep:
        print(f"Kept in {keep(name, numbers)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
