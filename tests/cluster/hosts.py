"""Hosts for tests: network namespaces on one bridge, with cables that can be pulled. Needs root and iproute2.

The bridge has a namespace of its own. So the network of this machine stays as it is, and tests that run side by side
can use the same addresses. Each process of a host sees a host name and an ``/etc/hosts`` of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

CABLE = "cable"
"""The network interface of every host."""

WAIT_SECONDS = 90.0
_MOST_HOSTS = 250
_NEW_MOUNTS, _NEW_NAMES, _NETWORK = 0x00020000, 0x04000000, 0x40000000  # CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET
_BIND, _PRIVATE = 0x1000, 0x44000  # MS_BIND, MS_REC | MS_PRIVATE

# Runs in the namespace of a host: takes a name and a file for /etc/hosts, then becomes the command.
_SETTLE = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'


def ip(*args: str) -> str:
    """Run ``ip``; returns what it prints."""
    return subprocess.run(["ip", *args], check=True, capture_output=True, text=True, timeout=30).stdout


class Host:
    """One host: a network namespace with a cable to the bridge.

    Attributes:
        name: Its host name: ``host1``, ``host2``, ...
        namespace: The name of its network namespace.
        address: Its IPv4 address, in a network of 24 bits that all hosts share.
        address6: Its IPv6 address, in a network of 64 bits that all hosts share.
        link_local: Its link-local IPv6 address, without a scope; in all hosts the scope is ``CABLE``.
        hosts_file: What its processes see as ``/etc/hosts``. As Debian writes it, the host's own name means 127.0.1.1.
            A test may change the file before it starts a process.
    """

    def __init__(self, number: int, mark: str, folder: Path) -> None:
        self.name = f"host{number}"
        self.namespace = f"bh-{mark}-{number}"
        self.address = f"10.213.0.{number}"
        self.address6 = f"fd00:213::{number:x}"
        self.link_local = f"fe80::213:{number:x}"
        self.hosts_file = folder / f"{self.name}.hosts"
        self._port = f"port{number}"
        self._bridge = f"bh-{mark}-bridge"
        self._processes: list[subprocess.Popen[Any]] = []

    def connect(self) -> None:
        """Make the namespace and its cable."""
        ip("netns", "add", self.namespace)
        own = ["-n", self.namespace]
        ip(*own, "link", "add", CABLE, "type", "veth", "peer", "name", self._port, "netns", self._bridge)
        ip(*own, "link", "set", CABLE, "addrgenmode", "none")
        for address in (f"{self.address}/24", f"{self.address6}/64", f"{self.link_local}/64"):
            # Without the search for duplicates, during which an IPv6 address cannot be used.
            ip(*own, "addr", "add", address, "dev", CABLE, *(["nodad"] if ":" in address else []))
        ip("-n", self._bridge, "link", "set", self._port, "master", "bridge", "up")
        ip(*own, "link", "set", CABLE, "up")
        ip(*own, "link", "set", "lo", "up")

    def ip(self, *args: str) -> str:
        """Run ``ip`` in this host; returns what it prints."""
        return ip("-n", self.namespace, *args)

    def cut(self) -> None:
        """Pull the cable: what is sent is lost, and nobody is told."""
        ip("-n", self._bridge, "link", "set", self._port, "nomaster")

    def heal(self) -> None:
        """Put the cable back."""
        ip("-n", self._bridge, "link", "set", self._port, "master", "bridge")

    def command(self, *args: str | Path) -> list[str]:
        """The command that runs ``args`` in this host."""
        enter = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", _SETTLE]
        return [*enter, self.name, str(self.hosts_file), *map(str, args)]

    def start(
        self, *args: str | Path, environment: Mapping[str, str | None] | None = None, **given: Any
    ) -> subprocess.Popen[Any]:
        """Start a process in this host. It is killed, with its children, when the test ends.

        Args:
            args: The command.
            environment: Changes of the environment; None removes a variable.
            given: For ``subprocess.Popen``.
        """
        changed = {**os.environ, **(environment or {})}
        kept = {name: value for name, value in changed.items() if value is not None}
        process = subprocess.Popen(self.command(*args), env=kept, start_new_session=True, **given)
        self._processes.append(process)
        return process

    def run(self, *args: str | Path, **given: Any) -> subprocess.CompletedProcess[str]:
        """Run a command in this host to its end; returns what it has printed."""
        process = self.start(*args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **given)
        out, err = process.communicate(timeout=WAIT_SECONDS)
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    def enter(self) -> None:
        """Move the calling process, which must have one thread, into this host: much faster than to start another."""
        libc = ctypes.CDLL(None, use_errno=True)

        def check(result: int) -> None:
            if result:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

        with open(f"/run/netns/{self.namespace}") as file:
            check(libc.setns(file.fileno(), _NETWORK))
        check(libc.unshare(_NEW_MOUNTS | _NEW_NAMES))
        check(libc.mount(None, b"/", None, ctypes.c_ulong(_PRIVATE), None))
        check(libc.mount(os.fsencode(self.hosts_file), b"/etc/hosts", None, ctypes.c_ulong(_BIND), None))
        socket.sethostname(self.name)

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_processes": []}

    def kill(self) -> None:
        """Kill what the test has started in this host."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):  # its children may live longer than it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdout, process.stderr, process.stdin):
                if pipe is not None:
                    pipe.close()


@contextlib.contextmanager
def make_hosts(count: int, folder: Path) -> Iterator[list[Host]]:
    """Make hosts that reach each other; skip the test if this machine cannot. ``folder`` is for their files."""
    assert 0 < count < _MOST_HOSTS
    if shutil.which("ip") is None or shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need iproute2, unshare and root")
    mark = secrets.token_hex(3)
    bridge = f"bh-{mark}-bridge"
    hosts = [Host(number, mark, folder) for number in range(1, count + 1)]
    try:
        try:
            ip("netns", "add", bridge)
            ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
            ip("-n", bridge, "link", "set", "bridge", "up")
            for host in hosts:
                host.connect()
                others = [f"{other.address} {other.name}" for other in hosts if other is not host]
                host.hosts_file.write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 {host.name}", *others, ""]))
            hosts[0].run("true").check_returncode()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield hosts
    finally:
        for host in hosts:
            host.kill()
        made = ip("netns", "list")
        for name in (*(host.namespace for host in hosts), bridge):
            if name in made:
                ip("netns", "delete", name)  # this deletes the cable too


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    """Three hosts on one bridge."""
    with make_hosts(3, tmp_path) as made:
        yield made


def wait_for(path: Path, seconds: float = WAIT_SECONDS) -> str:
    """Wait until a file exists; returns what is in it."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} does not come"
        time.sleep(0.02)
    return path.read_text()


def wait_all(processes: Sequence[subprocess.Popen[Any]], seconds: float = WAIT_SECONDS) -> list[int]:
    """Wait for processes to end; returns their exit statuses."""
    deadline = time.monotonic() + seconds
    return [process.wait(max(deadline - time.monotonic(), 0.0)) for process in processes]
