"""Runs one program on one system, alone: for profilers, and to see its losses.

.venv/bin/python benchmarks/programs rnn --steps 200
.venv/bin/python benchmarks/programs rnn --system reference
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
NAMES = ("rnn", "ddp", "cartpole", "parameter_server", "pipeline", "transformer")


def main() -> None:
    """Run it, print its losses and the time of a step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("program", choices=NAMES)
    parser.add_argument("--system", choices=("backhaul", "reference"), default="backhaul")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warm", type=int, default=10, help="steps before the clock starts; their losses are printed")
    options = parser.parse_args()
    os.environ["BENCHMARK_SYSTEM"] = options.system
    from programs import processes  # it chooses the system when it is imported

    def drive(driver: Any) -> None:
        print("losses", *(f"{loss:.6f}" for loss in driver.run(options.warm)), flush=True)
        start = time.perf_counter()
        driver.run(options.steps)
        print(f"{(time.perf_counter() - start) / options.steps * 1e3:.3f} ms a step", flush=True)

    processes.run(options.program, drive)


if __name__ == "__main__":
    main()
