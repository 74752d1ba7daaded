"""Measures what ``import backhaul`` adds to the import of torch, and what the first use of a public name adds, in
processor time: each in processes of its own, whose least value counts.

    .venv/bin/python benchmarks/import_time.py
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

PROGRAM = """
import gc, sys, time
{before}
collected, began, modules = gc.get_stats()[2]["collections"], time.process_time(), len(sys.modules)
{measured}
seconds = time.process_time() - began
print(seconds, len(sys.modules) - modules, gc.get_stats()[2]["collections"] - collected)
"""

STEPS = (
    ("import torch", "", "import torch"),
    ("import backhaul", "import torch", "import backhaul"),
    ("the first use of a name", "import torch, backhaul", "backhaul.init"),
    ("the same without the collection", "import torch, backhaul, gc; gc.disable()", "backhaul.init"),
)


def measure(before: str, measured: str) -> tuple[float, int, int]:
    """Run the program once. Returns seconds of processor time, modules, and full garbage collections."""
    command = [sys.executable, "-c", PROGRAM.format(before=before, measured=measured)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=True)
    seconds, modules, collections = done.stdout.split()
    return float(seconds), int(modules), int(collections)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="processes for each row")
    runs = parser.parse_args().runs
    for name, before, measured in STEPS:
        found = sorted(measure(before, measured) for _ in range(runs + 1))  # one more: the first may write bytecode
        seconds, modules, collections = found[0]
        middle = found[len(found) // 2][0]
        print(
            f"{name:32} {1000 * seconds:7.1f} ms (median {1000 * middle:.1f}), {modules} modules, "
            f"{collections} full garbage collections"
        )


if __name__ == "__main__":
    main()
