"""Addresses of the socket transport: ``unix:@name`` (abstract socket of this host) and ``tcp:host:port``."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

SocketAddress = str | tuple[str, int]

MAX_PORT = 65535

_BRACKETED = re.compile(r"\[(?P<host>[^][/\s]+)\](:(?P<port>\d+))?")
_WITH_PORT = re.compile(r"(?P<host>[^][/\s:]+):(?P<port>\d+)")
_BARE = re.compile(r"(?P<host>[^][/\s:]+|[^][/\s]*:[^][/\s]*:[^][/\s]*)(?P<port>)")  # no colon, or several


def parse(address: str) -> tuple[socket.AddressFamily, SocketAddress]:
    """Split an address into its family and the argument of ``socket.connect``. IPv6 hosts stand in brackets.

    >>> parse("tcp:[::1]:7000")
    (<AddressFamily.AF_INET6: 10>, ('::1', 7000))
    """
    scheme, _, rest = address.partition(":")
    if scheme == "unix" and rest.startswith("@") and len(rest) > 1:
        return socket.AF_UNIX, "\0" + rest[1:]
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not _is_port(port):
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


def split_port(text: str) -> tuple[str, int]:
    """Split ``host`` or ``host:port`` as people write it; the port is 0 if there is none.

    >>> split_port("10.0.0.5"), split_port("node7:7000"), split_port("fe80::1%eth0"), split_port("[::1]:7000")
    (('10.0.0.5', 0), ('node7', 7000), ('fe80::1%eth0', 0), ('::1', 7000))
    """
    found = _BRACKETED.fullmatch(text) or _WITH_PORT.fullmatch(text) or _BARE.fullmatch(text)
    if found is None or (found["port"] and not _is_port(found["port"])):
        raise ValueError(f"not a host or host:port: {text!r}; put an IPv6 address with a port in brackets")
    return found["host"], int(found["port"] or 0)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) <= MAX_PORT


def localize(host: str, own_scope: str | None, interfaces: Sequence[str]) -> str:
    """Replace the scope of a link-local address: it names an interface of the host that has the address, and this host
    may call its interface to the same network differently.

    Args:
        host: Any host; only link-local addresses change.
        own_scope: The interface on which this worker listens, if it listens on one.
        interfaces: The names of this host's interfaces, without loopback.

    Raises:
        ValueError: This host has several interfaces, and nothing says which one leads to the address.

    Example:
        >>> localize("fe80::1%eth0", None, ["ens3"])
        'fe80::1%ens3'
    """
    address, _, scope = host.partition("%")
    if not is_link_local(address):
        return host
    if own_scope is not None:
        return f"{address}%{own_scope}"
    if scope in interfaces:
        return host
    if len(interfaces) == 1:
        return f"{address}%{interfaces[0]}"
    raise ValueError(
        f"{host} is a link-local address, and this host has several interfaces ({', '.join(interfaces)}): listen on "
        "the one that leads there, with Options(bind='if:<interface>')"
    )


def is_link_local(host: str) -> bool:
    """Whether this is an IPv6 address that is valid on one link only; False for host names.

    >>> is_link_local("fe80::1%eth0"), is_link_local("fd00::1"), is_link_local("localhost")
    (True, False, False)
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return address.version == 6 and address.is_link_local


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
