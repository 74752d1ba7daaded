"""Two hosts for benchmarks: network namespaces with a fast cable, or with a slow link that loses packets.

The fast cable is a pair of veth devices. The slow link is a process between two TUN devices (``python links.py``): it
holds each packet back, and drops some. So it needs no ``netem``, which not every kernel has. Needs root and iproute2.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import os
import random
import secrets
import select
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

ADDRESSES = "10.215.0.1", "10.215.0.2"
CABLE = "cable"
_PATIENCE_SECONDS = 30
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_QUEUE_PACKETS = 1000  # of each direction, as netem's default
_PACKET_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Slow:
    """A slow link. The same in both directions.

    Attributes:
        delay: Seconds that a packet is on its way.
        rate: Bits per second.
        loss: Which share of the packets is lost.
        control: The congestion control of TCP.
    """

    delay: float = 0.02
    rate: float = 100e6
    loss: float = 0.01
    control: str = "cubic"


def ip(*args: str) -> None:
    """Run ``ip``."""
    subprocess.run(["ip", *args], check=True, timeout=_PATIENCE_SECONDS)


@contextlib.contextmanager
def two_hosts(slow: Slow | None = None) -> Iterator[tuple[str, str]]:
    """Make two namespaces whose addresses are ``ADDRESSES``. Returns their names."""
    mark = secrets.token_hex(3)
    names = f"bhl-{mark}-0", f"bhl-{mark}-1"
    with contextlib.ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
        if slow is None:
            ends = f"bhl{mark}0", f"bhl{mark}1"
            ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for name, end in zip(names, ends, strict=True):
                ip("link", "set", end, "netns", name)
                ip("-n", name, "link", "set", end, "name", CABLE)
        else:
            given = [str(number) for number in (slow.delay, slow.rate, slow.loss)]
            link = subprocess.Popen([sys.executable, __file__, *names, *given], stdout=subprocess.PIPE)
            stack.callback(link.wait)
            stack.callback(link.kill)
            assert link.stdout is not None
            if not link.stdout.readline():
                sys.exit("the slow link did not start")
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", CABLE)
            ip("-n", name, "link", "set", CABLE, "up")
            ip("-n", name, "link", "set", "lo", "up")
            if slow is not None:
                ip(
                    "-n",
                    name,
                    "route",
                    "replace",
                    "10.215.0.0/24",
                    "dev",
                    CABLE,
                    "src",
                    address,
                    "congctl",
                    slow.control,
                )
        yield names


def run_sides(names: tuple[str, str], program: str, *arguments: str, seconds: float) -> str:
    """Run a program in each host, with ``--side 0`` and ``--side 1``, a folder for both, and ``arguments``.

    Returns what side 0 prints.
    """
    with tempfile.TemporaryDirectory() as folder:
        sides = []
        for rank, name in enumerate(names):
            own = [sys.executable, "-W", "ignore", program, "--side", str(rank), "--folder", folder, *arguments]
            sides.append(subprocess.Popen(["ip", "netns", "exec", name, *own], stdout=subprocess.PIPE, text=True))
        try:
            shown, _ = sides[0].communicate(timeout=seconds)
            sides[1].communicate(timeout=seconds)
        finally:
            for side in sides:
                side.kill()
                side.wait()
    return shown


class _Direction:
    """The packets that are on their way to one end of a slow link."""

    def __init__(self, source: int, target: int, slow: Slow) -> None:
        self.source = source
        self._target = target
        self._slow = slow
        self._on_way: collections.deque[tuple[float, bytes]] = collections.deque()  # when each arrives
        self._free = 0.0  # when the link has sent all that it has taken
        self._draw = random.Random(source)

    def take(self, now: float) -> None:
        """Take the packets that wait."""
        with contextlib.suppress(BlockingIOError):
            while True:
                packet = os.read(self.source, _PACKET_BYTES)
                full = self._free > now + 8 * 1500 * _QUEUE_PACKETS / self._slow.rate
                if full or self._draw.random() < self._slow.loss:
                    continue
                self._free = max(self._free, now) + 8 * len(packet) / self._slow.rate
                self._on_way.append((self._free + self._slow.delay, packet))

    def deliver(self, now: float) -> float:
        """Hand over what has arrived. Returns when the next packet arrives."""
        while self._on_way and self._on_way[0][0] <= now:
            with contextlib.suppress(OSError):  # the other end is down
                os.write(self._target, self._on_way.popleft()[1])
        return self._on_way[0][0] if self._on_way else now + 1.0


def _open_tun(name: str) -> int:
    """A TUN device inside a namespace. The calling process stays in the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as file:
        if libc.setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", CABLE.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def run_link(names: tuple[str, str], slow: Slow) -> None:
    """Carry packets between two namespaces until the process is killed, or its parent has ended."""
    parent = os.getppid()
    ends = [_open_tun(name) for name in names]
    ways = [_Direction(ends[0], ends[1], slow), _Direction(ends[1], ends[0], slow)]
    poller = select.epoll()
    for end in ends:
        poller.register(end, select.EPOLLIN)
    print("up", flush=True)
    due = time.monotonic()
    while os.getppid() == parent:
        poller.poll(max(due - time.monotonic(), 0.0))
        now = time.monotonic()
        for way in ways:
            way.take(now)
        due = min(way.deliver(now) for way in ways)


if __name__ == "__main__":
    first, second, *numbers = sys.argv[1:]
    run_link((first, second), Slow(*map(float, numbers)))
