"""Hosts behind NAT for tests: each is in a network of its own, and its router hides it behind the router's address.
Needs root, iproute2 and iptables.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from .hosts import CABLE, Host, ip

INNER_ADDRESS = "192.168.77.2"
"""Of every hidden host: the networks behind different routers have the same addresses, as those of homes have."""

_ROUTER_ADDRESS = "192.168.77.1"
_FIRST_NUMBER = 100  # of routers on the bridge; hosts have lower ones

# Connections go out and nothing comes in that does not belong to one of them.
_RULES = (
    ("-t", "nat", "-A", "POSTROUTING", "-o", CABLE, "-j", "MASQUERADE"),
    ("-A", "FORWARD", "-i", CABLE, "-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "ACCEPT"),
    ("-A", "FORWARD", "-i", CABLE, "-j", "DROP"),
)


class Router(Host):
    """A host on the bridge with a second network behind it, which it hides."""

    def hide(self, inner: str) -> None:
        """Make the network of the namespace ``inner``."""
        self.ip("link", "add", "home", "type", "veth", "peer", "name", CABLE, "netns", inner)
        self.ip("addr", "add", f"{_ROUTER_ADDRESS}/24", "dev", "home")
        self.ip("link", "set", "home", "up")
        in_here = ("ip", "netns", "exec", self.namespace)
        subprocess.run([*in_here, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"], check=True, timeout=30)
        for rule in _RULES:
            subprocess.run([*in_here, "iptables", *rule], check=True, capture_output=True, text=True, timeout=30)


class HiddenHost(Host):
    """A host behind a router. It reaches the hosts on the bridge, and they do not reach it.

    Attributes:
        router: Its router: cut the router's cable to cut this host off.
    """

    def __init__(self, number: int, mark: str, folder: Path) -> None:
        super().__init__(_FIRST_NUMBER + 50 + number, mark, folder)
        self.router = Router(_FIRST_NUMBER + number, mark, folder)
        self.address = INNER_ADDRESS

    def connect(self) -> None:
        self.router.connect()
        ip("netns", "add", self.namespace)
        self.router.hide(self.namespace)
        self.ip("addr", "add", f"{INNER_ADDRESS}/24", "dev", CABLE)
        self.ip("link", "set", CABLE, "up")
        self.ip("link", "set", "lo", "up")
        self.ip("route", "add", "default", "via", _ROUTER_ADDRESS)


@contextlib.contextmanager
def hide_hosts(count: int, hosts: Sequence[Host], folder: Path) -> Iterator[list[HiddenHost]]:
    """Make hosts behind NAT that reach ``hosts``; skip the test if this machine cannot."""
    if shutil.which("iptables") is None:
        pytest.skip("NAT needs iptables (apt-get install iptables)")
    mark = hosts[0].namespace.split("-")[1]
    made = [HiddenHost(number, mark, folder) for number in range(1, count + 1)]
    try:
        try:
            for host in made:
                host.connect()
                others = [f"{other.address} {other.name}" for other in hosts]
                host.hosts_file.write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 {host.name}", *others, ""]))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"NAT cannot be made here: {error.stderr}")
        yield made
    finally:
        there = ip("netns", "list")
        for host in made:
            host.kill()
            for name in (host.namespace, host.router.namespace):
                if name in there:
                    ip("netns", "delete", name)
