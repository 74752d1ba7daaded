"""Runs programs on one system, alone: for profilers, and to see their losses.

.venv/bin/python benchmarks/programs rnn --steps 200
.venv/bin/python benchmarks/programs rnn pipeline --system reference
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
NAMES = ("rnn", "ddp", "cartpole", "parameter_server", "pipeline", "transformer")


def drive(program: str, warm: int, steps: int, driver: Any) -> None:
    """Print the losses of the first steps, and the time of a step."""
    print(program, "losses", *(f"{loss:.6f}" for loss in driver.run(warm)), flush=True)
    start = time.perf_counter()
    if steps:
        driver.run(steps)
        print(f"{program} {(time.perf_counter() - start) / steps * 1e3:.3f} ms a step", flush=True)


def main() -> None:
    """Run them, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("programs", nargs="+", choices=NAMES)
    parser.add_argument("--system", choices=("backhaul", "plain", "reference"), default="backhaul")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warm", type=int, default=10, help="steps before the clock starts; their losses are printed")
    options = parser.parse_args()
    os.environ["BENCHMARK_SYSTEM"] = options.system
    from programs import processes  # imported here because it chooses the system when it is imported

    for program in options.programs:
        processes.run(program, functools.partial(drive, program, options.warm, options.steps))


if __name__ == "__main__":
    main()
