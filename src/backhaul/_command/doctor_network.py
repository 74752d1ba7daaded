"""Checks of the network of this host, of what the environment says about the cluster, and of connections."""

from __future__ import annotations

import datetime
import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from backhaul._command.findings import Finding
from backhaul._command.run_places import read_hosts
from backhaul._rpc.cluster.environment import find_place
from backhaul._transport.sockets.addresses import split_port
from backhaul._transport.sockets.certificates import HOW_TO_MAKE_A_SECRET, check_strength
from backhaul._transport.sockets.interfaces import NoAddressError, interfaces, is_loopback_address, own_address, show

_CONNECT_SECONDS = 5.0
_HOSTS_SECONDS = 120.0
_FIRST_YEAR = 2025  # no host that runs this has an earlier date
_DEFAULT_PORT = 29_500  # of torchrun and Kubernetes
_LAST_LINES = 6


def read_master(text: str) -> tuple[str, int]:
    """The host and the port."""
    host, port = split_port(text)
    if not host or not port:
        raise ValueError(f"--master must be HOST:PORT, got {text!r}")
    return host, port


def read_host_list(text: str) -> list[str]:
    """The hosts of a list, or of a file."""
    file = Path(text)
    return [each.host for each in read_hosts(file.read_text() if file.is_file() else text)]


def check_network() -> Iterator[Finding]:
    """Loopback, the interfaces, the address that others use, and the name of this host."""
    yield _check_loopback()
    try:
        found = show([each for each in interfaces() if each.name != "lo" and each.addresses])
        yield Finding("network", "good", f"other hosts reach this one at {own_address()}; interfaces: {found}")
    except NoAddressError as error:
        yield Finding("network", "note", f"for workers on several hosts: {error}", "one host needs no network")
    yield _check_own_name()
    yield _check_port(_DEFAULT_PORT)


def _check_loopback() -> Finding:
    fix = "bring it up: ip link set lo up"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        return Finding("loopback", "wrong", f"127.0.0.1 does not work: {error}", fix)
    return Finding("loopback", "good", "127.0.0.1 works")


def _check_own_name() -> Finding:
    name = socket.gethostname()
    try:
        found = sorted({str(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError as error:
        return Finding(
            "own name",
            "note",
            f"'{name}' does not resolve: {error}; Backhaul does not need it, but other programs may",
            f"add a line to /etc/hosts: 127.0.1.1 {name}",
        )
    if all(map(is_loopback_address, found)):
        text = f"'{name}' means {', '.join(found)} here; workers tell others the address of the network instead"
        return Finding("own name", "good", text)
    return Finding("own name", "good", f"'{name}' means {', '.join(found)}")


def _check_port(port: int) -> Finding:
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return Finding("ports", "wrong", f"cannot listen on port {port}: {error}", "allow this process to listen")
        return Finding(
            "ports", "note", f"another program listens on {port}, the usual port", "set MASTER_PORT to a free port"
        )
    return Finding("ports", "good", f"{port}, the usual port of rank 0, is free")


def check_environment() -> Iterator[Finding]:
    """What a launcher says about this process."""
    try:
        place = find_place(os.environ, parent=os.getppid())
    except ValueError as error:
        yield Finding("launcher", "wrong", str(error), "start all processes with one launcher, or unset the variables")
        return
    if place.rank is None:
        yield Finding("launcher", "good", "none started this process; see docs/clusters.md for those that are known")
    elif place.size is None or place.method is None:
        missing = "WORLD_SIZE" if place.size is None else "MASTER_ADDR and MASTER_PORT"
        text = f"{place.source} says rank {place.rank}, and not all that init needs"
        yield Finding("launcher", "wrong", text, f"set {missing}")
    else:
        text = f"{place.source}: rank {place.rank} of {place.size}; workers meet at {place.method}"
        yield Finding("launcher", "good", text)


def check_security() -> Iterator[Finding]:
    """The secret and the clock."""
    secret = os.environ.get("BACKHAUL_SECRET")
    if secret is None:
        yield Finding(
            "secret",
            "good",
            "BACKHAUL_SECRET is not set, which is right for one host; workers on several hosts need one",
        )
    else:
        try:
            check_strength(secret.encode())
        except ValueError:
            yield Finding(
                "secret", "wrong", "BACKHAUL_SECRET is too easy to guess", f"make another: {HOW_TO_MAKE_A_SECRET}"
            )
        else:
            yield Finding("secret", "good", f"BACKHAUL_SECRET is set, with {len(secret)} characters")
    now = datetime.datetime.now(datetime.UTC)
    if now.year < _FIRST_YEAR:
        fix = "set the clock (timedatectl set-ntp true): certificates of your own would not be valid yet"
        yield Finding("clock", "note", f"this host says that it is {now:%Y-%m-%d}", fix)
    else:
        yield Finding("clock", "good", f"{now:%Y-%m-%d %H:%M} UTC; certificates from the secret are valid at any time")


def check_master(host: str, port: int) -> Iterator[Finding]:
    """Resolve the name and connect."""
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        yield Finding(
            "master", "wrong", f"'{host}' does not resolve: {error}", "use its address, or add it to /etc/hosts"
        )
        return
    address = str(found[0][4][0])
    began = time.monotonic()
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_SECONDS) as sock:
            own = str(sock.getsockname()[0])
    except ConnectionRefusedError:
        yield Finding(
            "master",
            "wrong",
            f"{where} ({address}) answers, and nothing listens on the port",
            f"start the first worker there, or for a test: python -m http.server {port}",
        )
    except TimeoutError:
        yield Finding(
            "master",
            "wrong",
            f"{where} ({address}) did not answer within {_CONNECT_SECONDS:g} s",
            "look for a firewall between the hosts, and for a wrong address",
        )
    except OSError as error:
        yield Finding("master", "wrong", f"cannot connect to {where} ({address}): {error}", "check address and network")
    else:
        took = (time.monotonic() - began) * 1e3
        yield Finding("master", "good", f"connected to {where} from {own} in {took:.1f} ms")


def check_hosts(hosts: Sequence[str], ssh: str | None) -> Iterator[Finding]:
    """Start a worker on each host, as ``backhaul run`` does. Each calls every other."""
    command = [sys.executable, "-P", "-m", "backhaul", "run", "--hosts", ",".join(hosts)]
    command += ["--ssh", ssh] if ssh else []
    began = time.monotonic()
    try:
        done = subprocess.run(
            [*command, "-m", "backhaul._command.doctor_meeting"],
            capture_output=True,
            text=True,
            timeout=_HOSTS_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield Finding("hosts", "wrong", f"the workers did not meet within {_HOSTS_SECONDS:g} s", "look for a firewall")
        return
    if done.returncode:
        lines = [line.rstrip("─ ") for line in done.stderr.strip().splitlines()]
        last = "\n".join([line for line in lines if line][-_LAST_LINES:])
        fix = "see whether `ssh HOST` works without a password, and Python and Backhaul are at the same path there"
        yield Finding("hosts", "wrong", f"workers on {', '.join(hosts)} failed:\n{last}", fix)
        return
    for line in sorted(done.stdout.splitlines()):
        yield Finding("hosts", "good", line.partition("|")[2].strip())
    yield Finding("hosts", "good", f"{len(hosts)} workers met in {time.monotonic() - began:.1f} s")
