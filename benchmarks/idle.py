"""What many workers of one machine cost while nothing happens, and how long it takes to connect them.

    .venv/bin/python benchmarks/idle.py --workers 16 64 128
    .venv/bin/python benchmarks/idle.py --workers 128 --shape star

In a mesh every worker calls every other one once. In a star all workers call worker 0. Then nothing happens for some
seconds. The processor time is that of all workers together, as a share of one core.
"""

from __future__ import annotations

import argparse
import logging
import os
import time

from processor_time import processor_seconds

import backhaul as bh

PATIENCE_SECONDS = 600.0

began = 0.0


class _Suspicions(logging.Handler):
    """Counts the workers that this process suspects or loses."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.count += "is suspected" in text or "is lost" in text


_suspicions = _Suspicions()


def attend() -> tuple[int, float]:
    """Say which process this is, and when its worker was ready."""
    return os.getpid(), began


def connect(targets: list[int]) -> float:
    """Call these workers, one after the other. Returns the time of the last answer."""
    for target in targets:
        bh.rpc_sync(target, attend, timeout=PATIENCE_SECONDS)
    return time.monotonic()


def suspected() -> int:
    """How often this worker has suspected or lost another one."""
    return _suspicions.count


def measure(size: int, shape: str, settle: float, seconds: float) -> tuple[float, float, int] | None:
    """Worker 0 lets all workers connect, and measures. The other workers serve."""
    global began
    began = time.monotonic()
    log = logging.getLogger("backhaul")
    log.addHandler(_suspicions)
    log.propagate = False
    if bh.get_worker_info().id:
        return None
    everybody = range(size)
    found = [future.wait() for future in [bh.rpc_async(i, attend, timeout=PATIENCE_SECONDS) for i in everybody]]
    start = time.monotonic()
    if shape == "mesh":
        rounds = [[(i + k) % size for k in range(1, size)] for i in everybody]
        connecting = [
            bh.rpc_async(i, connect, args=(targets,), timeout=PATIENCE_SECONDS) for i, targets in enumerate(rounds)
        ]
        connected = max(call.wait() for call in connecting) - start
    else:
        connected = start - max(ready for _, ready in found)
    time.sleep(settle)
    processes = [process for process, _ in found]
    before, at = processor_seconds(processes), time.monotonic()
    time.sleep(seconds)
    share = (processor_seconds(processes) - before) / (time.monotonic() - at)
    counts = [bh.rpc_async(i, suspected, timeout=PATIENCE_SECONDS) for i in everybody]
    return connected, share, sum(count.wait() for count in counts)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--shape", choices=("mesh", "star"), default="mesh")
    parser.add_argument("--settle", type=float, default=15.0, help="seconds between connecting and measuring")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to measure")
    given = parser.parse_args()
    for size in given.workers:
        connected, share, suspicions = bh.launch(
            measure,
            size,
            args=(size, given.shape, given.settle, given.seconds),
            start_method="forkserver",
            torchrun_variables=False,
            timeout=PATIENCE_SECONDS,
            options=bh.Options(shutdown_timeout=PATIENCE_SECONDS),
        )[0]
        print(
            f"{given.shape} of {size:4}: connected in {connected:.1f} s, idle {share * 100:.1f} % of a core, "
            f"{suspicions} suspicions",
            flush=True,
        )


if __name__ == "__main__":
    main()
