"""A process that runs tests of the reference's: reads a name from each line it is given, writes how it went."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import unittest


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what tests print goes to the log
    from tests.reference import suites

    print(json.dumps(suites.names(suites.CUDA if "--cuda" in sys.argv else suites.SUITES)), file=answers)
    for line in sys.stdin:
        suite, _, test = line.strip().partition(".")
        lacking = suites.lacking(suite, test)
        if lacking:
            print(json.dumps({"outcome": "skipped", "seconds": 0.0, "why": lacking}), file=answers)
            continue
        result = unittest.TestResult()
        began = time.monotonic()
        suites.CLASSES[suite](test).run(result)
        for child in multiprocessing.active_children():
            child.kill()
            child.join()
        problems = result.failures + result.errors
        outcome = "fails" if problems else "skipped" if result.skipped else "passes"
        seconds = round(time.monotonic() - began, 1)
        why = problems[0][1] if problems else result.skipped[0][1] if result.skipped else ""
        print(json.dumps({"outcome": outcome, "seconds": seconds, "why": why}), file=answers)


if __name__ == "__main__":
    main()
