"""What one hostile message costs a worker that does not trust its peers.

    make hostile                       # with the default limits
    make hostile ARGS=--unlimited      # with Options.limits.values out of the way

A member sends messages that are small on the wire and large once they are made. For each: how long no other thread of
the worker got to run, how long the message kept a thread busy, and by how much the worker's memory grew.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

import backhaul as bh
from backhaul._rpc.node import Node
from backhaul._wire.frames import Frame
from backhaul._wire.messages import TREE, Kind, Payload, Request, pack
from backhaul._wire.tensors.specs import Part, TensorSpec, TensorTable
from backhaul._worker.worker import current_worker

TICK = 0.0005  # seconds between two looks of the thread that notices pauses
NUMBER = 1 << 40  # of the first hostile call: no other has it
_longest = [0.0]


def _request(payload: Payload) -> bytes:
    return pack(Request("take", payload))


def _tree(*flat: object) -> bytes:
    return _request(Payload(plain=list(flat), loose=TREE))


def messages() -> dict[str, bytes]:
    """The hostile ones, by name."""
    same_hash = [[6, (n * sys.hash_info.modulus).to_bytes(12, "little", signed=True)] for n in range(16_000)]
    shape = TensorTable((TensorSpec((0,)),), (Part(0, "float32", (1 << 60,) * 60_000),))
    return {
        "800,000 empty lists": _tree([1, *[[1]] * 800_000]),
        "32,500 empty lists, which pass": _tree([1, *[[1]] * 32_500]),
        "200,000 records of a tensor": _request(
            Payload(TensorTable(ordinary=(msgspec.msgpack.encode(("float32", (1,), False, False)),) * 200_000), [1])
        ),
        "a set of 16,000 equal hashes": _tree([4, *same_hash]),
        "a tensor of 60,000 dimensions": _request(Payload(shape, [[0, 0]], loose=TREE)),
    }


@bh.expose(name="take")
def take(*args: object) -> None:
    """Do nothing with the arguments."""


def _watch() -> None:
    before = time.monotonic()
    while True:
        time.sleep(TICK)
        now = time.monotonic()
        _longest[0] = max(_longest[0], now - before)
        before = now


@bh.expose(name="begin")
def begin() -> int:
    """Forget pauses; returns how much memory this process has, and lets its peak begin there."""
    if _longest[0] == 0.0:
        threading.Thread(target=_watch, daemon=True).start()
    _longest[0] = TICK
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


@bh.expose(name="end")
def end() -> tuple[float, float, int]:
    """The longest pause, the time that the threads of this process ran, and the most memory that it had."""
    return _longest[0], time.process_time(), _memory("VmHWM")


def _memory(field: str) -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) * 1024


def attack(settle: float) -> None:
    """Send the messages as worker 0, and print what they cost worker 1. It is done with a message when it
    has done next to nothing for ``settle`` seconds.
    """
    if bh.get_worker_info().name != "worker0":
        return
    peer = current_worker().part(Node).peers.find("worker1")
    table = Table("message", "bytes", "others stood still (s)", "processor (s)", "memory (MiB)", "times its size")
    for number, (name, body) in enumerate(messages().items(), NUMBER):
        before, (_, used, _) = bh.rpc_sync("worker1", "begin"), bh.rpc_sync("worker1", "end")
        assert peer.channel is not None
        peer.channel.send(Frame(Kind.REQUEST, number, body, [b"1234"] if "dimensions" in name else ()))
        while True:  # until it is dealt with, or has cost the channel
            try:
                _, spent, _ = bh.rpc_sync("worker1", "end", timeout=300)
                time.sleep(settle)
                pause, busy, most = bh.rpc_sync("worker1", "end", timeout=300)
            except bh.PeerLostError:
                continue
            if busy - spent < settle / 4:
                break
        grown = max(most - before, 0)
        figures = (f"{len(body):,}", f"{pause:.3f}", f"{busy - used:.3f}", f"{grown >> 20}", f"{grown / len(body):.0f}")
        table.add_row(name, *figures)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--unlimited", action="store_true", help="without Options.limits.values")
    parser.add_argument("--settle", type=float, default=0.5, help="seconds of rest after which a message is dealt with")
    given = parser.parse_args()
    limits = bh.Limits(values=1 << 40, tensors=1 << 40) if given.unlimited else bh.Limits()
    bh.launch(
        attack,
        2,
        args=(given.settle,),
        options=bh.Options(limits=limits, security=bh.Security(trusted=False), liveness=bh.Liveness(lost_after=0)),
    )


if __name__ == "__main__":
    main()
