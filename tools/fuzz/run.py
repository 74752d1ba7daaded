"""Runs fuzz targets, reports what they did wrong, and keeps the inputs that showed it."""

from __future__ import annotations

import argparse
import collections
import hashlib
import itertools
import random
import resource
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

import tools.fuzz
from tools.fuzz.frame_targets import FrameTarget, GapTarget, LaneTarget, SlotTarget
from tools.fuzz.handshake_targets import ClientTarget, ServerTarget
from tools.fuzz.message_targets import CountTarget, MessageTarget, PlainTarget, TensorTarget
from tools.fuzz.mutator import Mutator
from tools.fuzz.native_targets import CallTarget, CutTarget
from tools.fuzz.target import Target, feed

_MAX_GROWTH_BYTES = 256 << 20  # of the process: torch and the interpreter keep some memory
_BATCH_INPUTS = 2000  # for one target in turn
_MAX_FINDINGS = 20


def targets() -> list[Target]:
    """All targets."""
    return [
        *(FrameTarget(), GapTarget(), LaneTarget(), SlotTarget(), CountTarget(), MessageTarget(), TensorTarget()),
        *(ServerTarget(), ClientTarget(), PlainTarget(), CallTarget(), CutTarget()),
    ]


class FuzzFindings:
    """The result of a run, by the name of the target.

    Attributes:
        inputs: How many inputs the target got.
        outcomes: How many inputs ended in which way.
        seconds: How long the target took.
        findings: What must not happen: the target, the input, and a description.
    """

    def __init__(self) -> None:
        self.inputs: collections.Counter[str] = collections.Counter()
        self.outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.seconds: collections.Counter[str] = collections.Counter()
        self.findings: list[tuple[str, bytes, str]] = []


def corpus_of(folder: Path | None, target: Target) -> list[bytes]:
    """The inputs of the corpus for a target."""
    if folder is None or not (folder / target.name).is_dir():
        return []
    return [path.read_bytes() for path in sorted((folder / target.name).iterdir())]


def keep(folder: Path, target: str, data: bytes) -> Path:
    """Add an input to the corpus."""
    path = folder / target / hashlib.sha256(data).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def run(
    chosen: Iterable[Target], *, inputs: int, seconds: float = float("inf"), seed: int = 0, corpus: Path | None = None
) -> FuzzFindings:
    """Feed ``inputs`` inputs to the targets in turn, or as many as possible in ``seconds``."""
    report, draw = FuzzFindings(), random.Random(seed)
    chosen = list(chosen)
    mutators = {}
    for target in chosen:
        kept = corpus_of(corpus, target)
        for data in (*target.seeds(), *kept):
            _feed_one(target, data, report)
        mutators[target.name] = Mutator([*target.seeds(), *kept], draw)
    begun = time.monotonic()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for target in itertools.cycle(chosen):
        if (
            report.inputs.total() >= inputs
            or time.monotonic() - begun > seconds
            or len(report.findings) > _MAX_FINDINGS
        ):
            break
        make, started = mutators[target.name].make, time.monotonic()
        for _ in range(min(_BATCH_INPUTS, inputs - report.inputs.total())):
            _feed_one(target, make(), report)
        report.seconds[target.name] += time.monotonic() - started  # type: ignore[assignment]
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) << 10
        if grown > _MAX_GROWTH_BYTES:
            report.findings.append((target.name, b"", f"the process has grown by {grown >> 20} MiB"))
            break
    return report


def _feed_one(target: Target, data: bytes, report: FuzzFindings) -> None:
    report.inputs[target.name] += 1
    try:
        report.outcomes[target.name][feed(target, data)] += 1
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        report.findings.append((target.name, data, "".join(traceback.format_exception(error))))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=tools.fuzz.__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", default="", help="names, separated by commas; default: all")
    parser.add_argument("--corpus", type=Path, default=Path("tests/fuzz/corpus"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, write: Callable[[str], object] = print) -> int:
    """Run the command. Returns its exit status."""
    given = _parse(arguments)
    wanted = set(given.targets.split(",")) if given.targets else None
    chosen = [target for target in targets() if wanted is None or target.name in wanted]
    torch.set_num_threads(1)
    begun = time.monotonic()
    report = run(chosen, inputs=given.inputs, seconds=given.minutes * 60, seed=given.seed, corpus=given.corpus)
    spent = time.monotonic() - begun
    for target in chosen:
        count, took = report.inputs[target.name], report.seconds[target.name] or 1e-9
        how = ", ".join(f"{name} {n}" for name, n in report.outcomes[target.name].most_common())
        write(f"{target.name:<9} {count:>9} inputs {count / took:>9,.0f} a second   {how}")
    total = report.inputs.total()
    write(f"{total} inputs in {spent:.0f} s ({total / spent:,.0f} a second), {len(report.findings)} findings")
    for name, data, text in report.findings:
        path = keep(given.corpus, name, data) if data else "-"
        write(f"FINDING {name}, kept as {path}\n  {text.rstrip()}".replace("\n", "\n  "))
    return 1 if report.findings else 0
