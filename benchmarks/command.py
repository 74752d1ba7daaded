"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

from harness import FULL, QUICK, SYSTEM_NAMES, Effort
from report import NOISE


def read_options(description: str | None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--rows", default="", help="only rows whose names contain one of these parts: RNN,fan")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--rounds", type=int, help="how often each row is measured")
    parser.add_argument("--transport", choices=("auto", "unix", "tcp"), default="auto")
    parser.add_argument("--keep", action="store_true", help="keep the ratios as those of this kind of machine")
    parser.add_argument("--regress", action="store_true", help="exit with 1 if ratios got worse than those kept")
    parser.add_argument("--noise", type=float, default=NOISE, help="by which share a ratio may be lower by chance")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out", help="where the results go")
    parser.add_argument("--side", choices=SYSTEM_NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--at", help=argparse.SUPPRESS)
    return parser.parse_args()


def effort_of(options: argparse.Namespace) -> Effort:
    """How long to measure."""
    effort = QUICK if options.quick else FULL
    return dataclasses.replace(effort, rounds=options.rounds or effort.rounds)


def wanted_by(options: argparse.Namespace) -> Callable[[str], bool]:
    """Which rows to measure."""
    parts = [part.strip().lower() for part in options.rows.split(",")]
    return lambda row: any(part in row.lower() for part in parts)
