"""Addresses of the socket transport: ``unix:@name`` (abstract socket of this host) and ``tcp:host:port``."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path

SocketAddress = str | tuple[str, int]


def parse(address: str) -> tuple[socket.AddressFamily, SocketAddress]:
    """Split an address into its family and the argument of ``socket.connect``. IPv6 hosts stand in brackets.

    >>> parse("tcp:[::1]:7000")
    (<AddressFamily.AF_INET6: 10>, ('::1', 7000))
    """
    scheme, _, rest = address.partition(":")
    if scheme == "unix" and rest.startswith("@") and len(rest) > 1:
        return socket.AF_UNIX, "\0" + rest[1:]
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"not a socket address: {address!r} (unix:@name or tcp:host:port)")
    if host.startswith("[") and host.endswith("]") and len(host) > 2:
        return socket.AF_INET6, (host[1:-1], int(port))
    if any(sign in host for sign in ":/[]"):
        raise ValueError(f"not a host: {host!r}; put an IPv6 address in brackets")
    return socket.AF_INET, (host, int(port))


def show_tcp(host: str, port: int) -> str:
    """Format the address of a TCP host and port.

    >>> show_tcp("::1", 7000), show_tcp("127.0.0.1", 7000)
    ('tcp:[::1]:7000', 'tcp:127.0.0.1:7000')
    """
    return f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether all addresses of ``host`` are loopback addresses."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):  # there is no such host, or this is not a host's name
        return False
    return bool(found) and all(ipaddress.ip_address(str(ip).partition("%")[0]).is_loopback for ip in found)


def host_identity() -> str:
    """Return a string that two processes share exactly if they can reach each other's abstract Unix sockets."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()
