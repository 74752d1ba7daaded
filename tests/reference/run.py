"""Runs the reference's suites against Backhaul and tells how they went.

make reference                                  # all of them
make reference ARGS="RpcTest.test_add rref"     # those whose name has one of these in it
make reference ARGS=--floor                     # those in floor.txt
make reference ARGS=--cuda                      # those for CUDA devices, as far as there are enough
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import queue
import selectors
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OUT = HERE / "out"
FLOOR = HERE / "floor.txt"
CUDA_FAILURES = HERE / "cuda.txt"
LIMIT = 60.0  # seconds for a test
CUDA_LIMIT = 120.0  # for one whose processes load torch anew
AGAIN = 5  # runs, alone, of a test that used to pass and failed
MANY = 10  # tests that failed are too many to look at each

Results = dict[str, dict[str, Any]]


def floor() -> dict[str, float]:
    """The tests that are known to pass, with the seconds they took."""
    lines = (line.split() for line in FLOOR.read_text().splitlines() if line and not line.startswith("#"))
    return {name: float(seconds) for name, seconds in lines}


def cuda_failures() -> dict[str, str]:
    """The tests for devices that are known to fail, and why."""
    lines = (line.partition(" ") for line in CUDA_FAILURES.read_text().splitlines() if line and line[0] != "#")
    return {name: why for name, _, why in lines}


class Process:
    """One that runs tests, one after the other; started anew when it does not come back.

    Its ``names`` are those of the tests for devices with ``cuda``, else those of the others.
    """

    def __init__(self, name: str, limit: float = LIMIT, *, cuda: bool = False) -> None:
        self._limit = limit
        self._arguments = ["--cuda"] if cuda else []
        OUT.mkdir(exist_ok=True)
        self._log = (OUT / f"log{name}.txt").open("wb")
        self._start()

    def _start(self) -> None:
        variables = {
            **os.environ,
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(int(self._limit)),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
            "OMP_NUM_THREADS": "1",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # to ask for devices is not to use them, which ends in a fork
        }
        self._inner = subprocess.Popen(
            [sys.executable, "-m", "tests.reference.worker", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=variables,
            cwd=ROOT,
            start_new_session=True,
        )
        names: list[str] | None = self._answer(180.0)
        if not names:
            self.close()
            raise RuntimeError(f"the process that runs tests did not start; {self._log.name} says why")
        self.names = names

    def run(self, name: str) -> dict[str, Any]:
        assert self._inner.stdin is not None
        self._inner.stdin.write(f"{name}\n".encode())
        self._inner.stdin.flush()
        answer: dict[str, Any] | None = self._answer(self._limit + 30.0)
        if answer is None:
            self._end()
            self._start()
            return {"outcome": "fails", "seconds": self._limit, "why": "did not come back"}
        return answer

    def _answer(self, limit: float) -> Any:
        assert self._inner.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._inner.stdout, selectors.EVENT_READ)
            line = self._inner.stdout.readline() if selector.select(limit) else b""
        return json.loads(line) if line else None

    def close(self) -> None:
        self._end()
        self._log.close()

    def _end(self) -> None:
        assert self._inner.stdin is not None
        self._inner.stdin.close()
        try:
            self._inner.wait(5.0)
        except subprocess.TimeoutExpired:
            os.killpg(self._inner.pid, 9)  # a session of its own: this ends its workers too
            self._inner.wait()
        assert self._inner.stdout is not None
        self._inner.stdout.close()


def run(
    wanted: Sequence[str] | None = None,
    *,
    jobs: int = 2,
    limit: float = LIMIT,
    quiet: bool = True,
    cuda: bool = False,
) -> Results:
    """Run the tests whose names are given, or have one of ``wanted`` in them; all if None."""
    first = Process("0", limit, cuda=cuda)
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    exact = set(wanted or ()) & set(first.names)
    chosen = [name for name in first.names if _is_wanted(name, wanted, exact)]
    for name in chosen:
        todo.put(name)
    results: Results = {}

    def work(process: Process) -> None:
        while True:
            try:
                name = todo.get_nowait()
            except queue.Empty:
                break
            results[name] = process.run(name)
            if not quiet:
                print(f"{results[name]['outcome']:8} {results[name]['seconds']:6.1f} s  {name}", flush=True)
        process.close()

    processes = [first, *(Process(str(number), limit, cuda=cuda) for number in range(1, min(jobs, len(chosen) or 1)))]
    threads = [threading.Thread(target=work, args=(process,)) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: results[name] for name in chosen}


def _is_wanted(name: str, wanted: Iterable[str] | None, exact: set[str]) -> bool:
    if wanted is None or name in exact:
        return True
    return any(part in name for part in wanted if part not in exact)


def show(results: Results) -> None:
    """Print a table by suite."""
    table: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for name, result in results.items():
        for row in (name.partition(".")[0], "all"):
            table[row][result["outcome"]] += 1
    print(f"{'':34}{'passes':>8}{'fails':>8}{'skipped':>9}")
    for row in sorted(table, key=lambda row: row == "all"):
        print(f"{row:34}{table[row]['passes']:8}{table[row]['fails']:8}{table[row]['skipped']:9}")


def repeat(names: Sequence[str], limit: float = LIMIT) -> dict[str, int]:
    """Run each of these tests some more times with nothing beside it; returns how often each failed.

    This changes nothing about the verdict. It says what to look for: a test that fails each time is broken, one that
    does not has a race, or cannot stand other tests beside it.
    """
    process = Process("again", limit)
    try:
        return {name: sum(process.run(name)["outcome"] != "passes" for _ in range(AGAIN)) for name in names}
    finally:
        process.close()


def blame(results: Results, limit: float = LIMIT) -> list[str]:
    """Print which tests of the floor failed, and why; return their names."""
    known = floor()
    lost = [name for name, result in results.items() if name in known and result["outcome"] != "passes"]
    failures = repeat(lost, limit) if len(lost) <= MANY else {}
    for name in lost:
        failed = f", and {failures[name]} times out of {AGAIN} alone" if name in failures else ""
        print(f"used to pass: {name} (failed once with others{failed})")
        print(*(f"    {line}" for line in results[name]["why"].strip().splitlines()[-12:]), sep="\n")
    return lost


def tell(results: Results) -> list[str]:
    """Print why tests for devices failed or were skipped; return those that failed and are not known to."""
    known = cuda_failures()
    failing = [name for name, result in results.items() if result["outcome"] == "fails"]
    skipped = collections.Counter(result["why"] for result in results.values() if result["outcome"] == "skipped")
    print(*(f"skipped {count:3}: {why}" for why, count in skipped.items()), sep="\n")
    for name in failing:
        lines = results[name]["why"].strip().splitlines()
        print(f"fails: {name} ({'known: ' + known[name] if name in known else 'not known to'})")
        print(*(f"    {line}" for line in lines[-12:]), sep="\n")
    passing = [name for name in known if results.get(name, {}).get("outcome") == "passes"]
    print(*(f"known to fail, but passes: {name}" for name in passing), sep="\n")
    return [name for name in failing if name not in known]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names; all tests if there are none")
    parser.add_argument("--floor", action="store_true", help="those in floor.txt")
    parser.add_argument("--cuda", action="store_true", help="those for CUDA devices instead of the others")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time; each is two to four processes")
    parser.add_argument("--limit", type=float, help="seconds for each")
    parser.add_argument("--write-floor", action="store_true", help="write those that pass to floor.txt")
    given = parser.parse_args()
    wanted = list(floor()) if given.floor else given.names or None
    limit = given.limit or (CUDA_LIMIT if given.cuda else LIMIT)
    results = run(wanted, jobs=given.jobs, limit=limit, quiet=False, cuda=given.cuda)
    (OUT / "results.json").write_text(json.dumps(results, indent=1))
    show(results)
    if given.cuda:
        sys.exit(bool(tell(results)))
    passing = {name: result["seconds"] for name, result in results.items() if result["outcome"] == "passes"}
    if given.write_floor:
        lines = [f"{name} {seconds}\n" for name, seconds in passing.items()]
        FLOOR.write_text("# Tests of the reference's that pass, with the seconds each took.\n" + "".join(lines))
    elif FLOOR.exists():
        gone = [name for name in floor() if name not in results] if given.floor else []
        print(*(f"in the floor, but in no suite: {name}" for name in gone), sep="\n", end="\n" * bool(gone))
        sys.exit(bool(blame(results, limit) or gone))


if __name__ == "__main__":
    main()
