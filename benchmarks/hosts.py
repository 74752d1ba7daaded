"""Measures Backhaul between two hosts beside ``torch.distributed.rpc`` and ``iperf3``: a fast cable, and a slow link.

    .venv/bin/python benchmarks/hosts.py

The hosts are two network namespaces (``links.py``). The slow link has 20 ms, 100 Mbit/s and 1 % loss in each direction,
and TCP uses cubic there. Needs root, iproute2 and iperf3. The systems take turns, ``--rounds`` times.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from links import ADDRESSES, CABLE, Slow, run_sides, two_hosts

WAIT_SECONDS = 300.0
BULK_FLOATS = 1 << 20  # 4 MiB
SMALL_CALLS = 150  # alone
PORT = 29610


def echo(x: torch.Tensor) -> torch.Tensor:
    """What the other host returns."""
    return x


def take(x: torch.Tensor) -> int:
    """What the other host does with a tensor that goes one way."""
    return x.numel()


Call = Callable[..., Any]
"""``rpc_sync`` of a system."""


def measure_echo(call: Call, repeat: int) -> dict[str, Any]:
    """64 MiB there and back."""
    x = torch.rand(16 << 20)
    call("worker1", echo, args=(x[: 1 << 20],))
    return {"seconds": [timed(lambda: call("worker1", echo, args=(x,))) for _ in range(repeat)]}


def measure_bulk(call: Call, repeat: int) -> dict[str, Any]:
    """4 MiB one way; small calls alone; and small calls while another thread sends 4 MiB all the time."""
    x, small = torch.rand(BULK_FLOATS), torch.rand(16)
    call("worker1", take, args=(small,))
    first = timed(lambda: call("worker1", take, args=(x,)))
    alone = [timed(lambda: call("worker1", take, args=(x,))) for _ in range(repeat)]
    quiet = [timed(lambda: call("worker1", echo, args=(small,))) for _ in range(SMALL_CALLS)]
    beside: list[float] = []
    over = threading.Event()

    def send_bulk() -> None:
        for _ in range(repeat):
            call("worker1", take, args=(x,))
        over.set()

    thread = threading.Thread(target=send_bulk)
    thread.start()
    while not over.is_set():
        beside.append(timed(lambda: call("worker1", echo, args=(small,))))
    thread.join()
    return {"first": first, "seconds": alone, "quiet": quiet, "beside": beside}


WORK = {"echo": measure_echo, "bulk": measure_bulk}


def timed(function: Callable[[], Any]) -> float:
    """How many seconds a call takes."""
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def run_reference(rank: int, folder: str, work: Callable[[Call], dict[str, Any]]) -> dict[str, Any] | None:
    """One of the two workers of ``torch.distributed.rpc``."""
    from torch.distributed import rpc

    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = CABLE
    method = f"tcp://{ADDRESSES[0]}:{PORT}"
    # What it takes between real hosts. Here it would see that both processes are on one, and share memory.
    ways: dict[str, Any] = {"_transports": ["uv"], "_channels": ["mpt_uv"]}
    options = rpc.TensorPipeRpcBackendOptions(init_method=method, rpc_timeout=WAIT_SECONDS, **ways)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    found = work(rpc.rpc_sync) if rank == 0 else None
    rpc.shutdown()
    return found


def run_backhaul(rank: int, folder: str, work: Callable[[Call], dict[str, Any]], **given: Any) -> dict[str, Any] | None:
    """One of the two workers of Backhaul."""
    import backhaul as bh

    options = bh.Options(
        transport="tcp",
        bind=ADDRESSES[rank],
        init_method=f"file://{folder}/store",
        timeout=WAIT_SECONDS,
        shutdown_timeout=WAIT_SECONDS,
        security=bh.Security(secret="of the benchmark", allow_plain=not given.pop("tls")),
        **given,
    )
    bh.init(f"worker{rank}", rank=rank, world_size=2, options=options)
    found = work(bh.rpc_sync) if rank == 0 else None
    bh.shutdown()
    return found


def run_side(given: argparse.Namespace) -> None:
    """One of two workers; rank 0 prints what it has found."""
    torch.set_num_threads(1)

    def work(call: Call) -> dict[str, Any]:
        return WORK[given.work](call, given.repeat)

    if given.system == "reference":
        found = run_reference(given.side, given.folder, work)
    else:
        lanes = {} if given.lanes is None else {"lanes": given.lanes}
        found = run_backhaul(given.side, given.folder, work, tls=given.tls, **lanes)
    if found is not None:
        print(json.dumps(found))


def measure(names: tuple[str, str], work: str, system: str, repeat: int, *more: str) -> dict[str, Any]:
    """Run two workers, one in each host."""
    given = ["--work", work, "--system", system, "--repeat", str(repeat), *more]
    shown = run_sides(names, __file__, *given, seconds=WAIT_SECONDS)
    found: dict[str, Any] = json.loads(shown.splitlines()[-1])
    return found


def run_iperf(names: tuple[str, str], streams: int) -> float:
    """The bits per second that iperf3 reaches."""
    enter = ["ip", "netns", "exec"]
    server = subprocess.Popen([*enter, names[1], "iperf3", "-s", "-1", "--forceflush"], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        while b"listening" not in server.stdout.readline():
            pass
        client = [*enter, names[0], "iperf3", "-c", ADDRESSES[1], "-t", "4", "-P", str(streams), "-J"]
        shown = subprocess.run(client, capture_output=True, text=True, check=True, timeout=WAIT_SECONDS).stdout
    finally:
        server.kill()
        server.wait()
    return float(json.loads(shown)["end"]["sum_received"]["bits_per_second"])


SYSTEMS = {
    "Backhaul": ("backhaul",),
    "Backhaul, TLS": ("backhaul", "--tls"),
    "Backhaul, one connection": ("backhaul", "--lanes", "1"),
    "reference": ("reference",),
}


def show_cable(rounds: int, repeat: int) -> None:
    """Print what a fast cable carries."""
    best, found = 0.0, dict[str, list[float]]()
    with two_hosts() as names:
        for _ in range(rounds):
            best = max(best, *(run_iperf(names, streams) for streams in (1, 4)))
            for title, (system, *more) in SYSTEMS.items():
                seconds = measure(names, "echo", system, repeat, *more)["seconds"]
                found.setdefault(title, []).append(statistics.median(seconds))
    print("| 64 MiB there and back, fast cable | time | rate | of iperf3 |")
    print("|---|---|---|---|")
    for title, times in found.items():
        seconds = min(times)
        rate = 2 * (64 << 20) * 8 / seconds
        print(f"| {title} | {1e3 * seconds:.0f} ms | {rate / 1e9:.1f} Gbit/s | {rate / best:.0%} |")
    print(f"| iperf3, the best of all rounds | | {best / 1e9:.1f} Gbit/s | |", flush=True)


def show_slow(rounds: int, repeat: int, link: Slow) -> None:
    """Print what a slow link carries."""
    found = dict[str, list[dict[str, Any]]]()
    with two_hosts(link) as names:
        for _ in range(rounds):
            for title, (system, *more) in SYSTEMS.items():
                found.setdefault(title, []).append(measure(names, "bulk", system, repeat, *more))
    print("| slow link | 4 MiB one way | the first time | a small call alone | 99 % | beside 4 MiB | 90 % | 99 % |")
    print("|---|---|---|---|---|---|---|---|")
    for title, each in found.items():
        bulk = statistics.median(seconds for one in each for seconds in one["seconds"])
        first = statistics.median(one["first"] for one in each)
        shown = []
        for kind, shares in (("quiet", (50, 99)), ("beside", (50, 90, 99))):
            cuts = statistics.quantiles((seconds for one in each for seconds in one[kind]), n=100)
            shown += [f"{1e3 * cuts[share - 1]:.0f} ms" for share in shares]
        print(f"| {title} | {bulk:.2f} s | {first:.2f} s | {' | '.join(shown)} |", flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="how often the systems take turns")
    parser.add_argument("--repeat", type=int, default=9, help="transfers in each turn")
    parser.add_argument("--link", choices=("fast", "slow"), help="only this one")
    parser.add_argument("--loss", type=float, default=Slow().loss, help="the share of packets that the slow link loses")
    parser.add_argument("--only", help="only the systems with this in their name")
    parser.add_argument("--skip", help="not the systems with this in their name")
    for hidden in ("--side", "--lanes"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    for hidden in ("--folder", "--work", "--system"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--tls", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side is not None:
        run_side(given)
        return
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "iperf3"))):
        sys.exit("this needs root, iproute2 and iperf3, to make two hosts")
    for title in list(SYSTEMS):
        if (given.only and given.only not in title) or (given.skip and given.skip in title):
            del SYSTEMS[title]
    if given.link != "slow":
        show_cable(given.rounds, given.repeat)
    if given.link != "fast":
        show_slow(given.rounds, given.repeat, Slow(loss=given.loss))


if __name__ == "__main__":
    main()
