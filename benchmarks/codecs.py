"""Measures codecs between two hosts: errors, bytes, and times over links of different rates.

    .venv/bin/python benchmarks/codecs.py --mib 4

The hosts are two network namespaces with a cable between them, and ``tc`` limits its rate. Needs root and iproute2.
Each time is the median of calls that send a tensor and get one of the same size back.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from links import ADDRESSES, CABLE, run_sides, two_hosts

import backhaul as bh
from backhaul._rpc.node import Node
from backhaul._wire.tensors.buffer_forms import readable_forms, restore, shrink

RATES = {"100 Mbit/s": "100mbit", "1 Gbit/s": "1gbit", "no limit": ""}
WAIT_SECONDS = 120.0


def scale(x: torch.Tensor) -> torch.Tensor:
    """What the other host computes."""
    return x * 1.0


def samples(elements: int) -> dict[str, torch.Tensor]:
    """Tensors like those of programs."""
    draw = torch.Generator().manual_seed(0)
    normal = torch.randn(elements, generator=draw)
    return {
        "activations (GELU)": torch.nn.functional.gelu(normal),
        "activations (ReLU)": torch.relu(normal),
        "gradients (normal, 1e-5)": normal * 1e-5,
        "gradients (wide)": normal * torch.exp(2 * torch.randn(elements, generator=draw)) * 1e-5,
        "token ids (int64)": torch.randint(0, 50_000, (elements // 2,), generator=draw),
    }


def limit(names: tuple[str, str], rate: str) -> None:
    """Limit the rate of the cable, in both directions."""
    for name in names:
        tc = ["ip", "netns", "exec", name, "tc", "qdisc"]
        subprocess.run([*tc, "del", "dev", CABLE, "root"], check=False, capture_output=True, timeout=30)
        if rate:
            how = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            subprocess.run([*tc, "add", "dev", CABLE, "root", *how], check=True, timeout=30)


def options(folder: str, rank: int, codec: bh.Codec | None) -> bh.Options:
    """Those of one worker."""
    return bh.Options(
        transport="tcp",
        bind=ADDRESSES[rank],
        init_method=f"file://{folder}/store",
        compression=codec,
        security=bh.Security(secret="of the benchmark", allow_plain=True),
    )


def run_side(folder: str, rank: int, codec: bh.Codec | None, elements: int, repeat: int) -> None:
    """One of the two workers. Rank 0 prints the bytes of a tensor on the wire, and the median in milliseconds."""
    torch.set_num_threads(1)
    bh.init(f"worker{rank}", rank=rank, world_size=2, options=options(folder, rank, codec))
    if rank == 0:
        x = samples(elements)["activations (GELU)"]
        bh.rpc_sync("worker1", scale, args=(x,))
        connections = bh.current_worker().part(Node).peers.connections
        before, times = connections.bytes_sent, []
        for _ in range(repeat):
            begun = time.perf_counter()
            bh.rpc_sync("worker1", scale, args=(x,))
            times.append(time.perf_counter() - begun)
        print((connections.bytes_sent - before) / repeat, 1e3 * statistics.median(times))
    bh.shutdown()


def measure(names: tuple[str, str], codec: str, elements: int, repeat: int) -> tuple[float, float]:
    """Bytes of a tensor on the wire, and milliseconds of a call."""
    given = ["--codec", codec, "--elements", str(elements), "--repeat", str(repeat)]
    shown = run_sides(names, __file__, *given, seconds=WAIT_SECONDS)
    nbytes, milliseconds = map(float, shown.split())
    return nbytes, milliseconds


def took(function: Callable[[], Any]) -> float:
    """The median of some runs, in milliseconds."""
    times = []
    for _ in range(9):
        begun = time.perf_counter()
        function()
        times.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(times)


def show_errors(elements: int) -> None:
    """Print what each codec does to each sample, in this process."""
    print("| tensor | codec | bytes | largest error / largest value | RMS error / RMS value | encode | decode |")
    print("|---|---|---|---|---|---|---|")
    torch.set_num_threads(1)
    for name, x in samples(elements).items():
        memory = bytearray(x.numel() * x.element_size())
        torch.frombuffer(memory, dtype=x.dtype).copy_(x)
        for form in readable_forms():
            made = shrink(memory, form, x.dtype)
            if made is None:
                continue
            sent = bytearray(len(made))
            torch.frombuffer(sent, dtype=torch.uint8).copy_(made)
            got = torch.frombuffer(restore(sent, form, x.dtype, len(memory)), dtype=x.dtype)
            old, error = x.double(), got.double() - x.double()
            most = float(error.abs().max() / old.abs().max())
            mean = float(error.square().mean().sqrt() / old.square().mean().sqrt())
            encode = took(functools.partial(shrink, memory, form, x.dtype))
            decode = took(functools.partial(restore, sent, form, x.dtype, len(memory)))
            share = len(made) / len(memory)
            print(f"| {name} | {form} | {share:.1%} | {most:.1e} | {mean:.1e} | {encode:.1f} ms | {decode:.1f} ms |")


def show_times(elements: int, repeat: int) -> None:
    """Print what calls between the two hosts take."""
    print(f"| codec | bytes | {' | '.join(RATES)} |")
    print("|---|---|" + "---|" * len(RATES))
    with two_hosts() as names:
        for codec in ("none", *readable_forms()):
            row, share = [], 0.0
            for rate in RATES.values():
                limit(names, rate)
                nbytes, milliseconds = measure(names, codec, elements, repeat)
                share = nbytes / (4 * elements)
                row.append(f"{milliseconds:.0f} ms")
            print(f"| {codec} | {share:.1%} | {' | '.join(row)} |", flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=float, default=4.0, help="size of the tensor")
    parser.add_argument("--repeat", type=int, default=9, help="calls for each time")
    parser.add_argument("--errors", action="store_true", help="only the errors, without hosts")
    for hidden in ("--side", "--elements"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    for hidden in ("--folder", "--codec"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side is not None:
        codec = None if given.codec == "none" else bh.Codec(forward=given.codec, backward=given.codec)
        run_side(given.folder, given.side, codec, given.elements, given.repeat)
        return
    elements = int(given.mib * (1 << 18))
    show_errors(elements)
    if given.errors:
        return
    if os.geteuid() != 0 or not any((Path(folder) / "tc").exists() for folder in ("/sbin", "/usr/sbin", "/usr/bin")):
        sys.exit("the times need root and iproute2, to make two hosts")
    print()
    show_times(elements, given.repeat)


if __name__ == "__main__":
    main()
