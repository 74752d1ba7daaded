"""The network interfaces of this host, their addresses, and the address from which this host reaches others. Asks the
system only; sends no packet.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_SIOCGIFADDR = 0x8915  # from linux/sockios.h
_INTERFACES_IPV6 = Path("/proc/net/if_inet6")
_NOT_USABLE = 0x48  # the address is tentative, or another host has it too
_DISCARD_PORT = 9  # of a datagram that is never sent

# Addresses for documentation, which no host has. The route to them is the default route.
_ANYWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface.

    Attributes:
        name: Its name.
        addresses: Its addresses, best first: IPv4, IPv6, and link-local IPv6 with the name of the interface as scope.
    """

    name: str
    addresses: tuple[str, ...]


class NoAddressError(ValueError):
    """This host has no address that others could use, or several and no way to tell which. The text says what to do."""


def interfaces() -> list[Interface]:
    """The interfaces of this host, loopback included."""
    by_name: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for name, found in by_name.items():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):  # this host has no IPv6
        rows = [line.split() for line in _INTERFACES_IPV6.read_text().splitlines()]
        found6 = [(ipaddress.IPv6Address(int(row[0], 16)), row[5]) for row in rows if not int(row[4], 16) & _NOT_USABLE]
        for address, name in sorted(found6, key=lambda each: each[0].is_link_local):
            by_name.setdefault(name, []).append(f"{address}%{name}" if address.is_link_local else str(address))
    return [Interface(name, tuple(found)) for name, found in by_name.items()]


def show(found: Sequence[Interface]) -> str:
    """Format interfaces for an error.

    >>> show([Interface("lo", ("127.0.0.1", "::1")), Interface("eth0", ())])
    'lo (127.0.0.1, ::1), eth0 (no address)'
    """
    return ", ".join(f"{each.name} ({', '.join(each.addresses) or 'no address'})" for each in found)


def is_loopback_address(address: str) -> bool:
    """Whether this is a loopback address; False for host names.

    >>> is_loopback_address("127.0.1.1"), is_loopback_address("::1"), is_loopback_address("fe80::1%eth0")
    (True, True, False)
    """
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def source_towards(host: str, family: socket.AddressFamily = socket.AF_UNSPEC) -> str | None:
    """The address of this host from which it reaches ``host``; None if there is no route or no such host."""
    try:
        found = socket.getaddrinfo(host, _DISCARD_PORT, family, socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for kind, _, _, _, where in found:
        with contextlib.suppress(OSError), socket.socket(kind, socket.SOCK_DGRAM) as sock:
            sock.connect(where)  # looks up the route; a datagram socket sends nothing here
            return numeric_host(sock.getsockname())
    return None


def numeric_host(where: Sequence[object]) -> str:
    """The host in the address of a socket, with the scope that Python leaves out for link-local addresses."""
    host = str(where[0])
    if len(where) == 4 and where[3] and "%" not in host:
        return f"{host}%{socket.if_indextoname(int(str(where[3])))}"
    return host


def own_address(towards: str | None = None, family: socket.AddressFamily = socket.AF_UNSPEC) -> str:
    """The address at which other hosts reach this host.

    That is the address from which this host reaches ``towards``, if ``towards`` is on another host. Otherwise it is
    the address of the default route, or of the only interface.

    Raises:
        NoAddressError: There is no such address, or there are several interfaces and no default route.
    """
    families = (socket.AF_INET, socket.AF_INET6) if family == socket.AF_UNSPEC else (family,)
    found = [source_towards(towards, family)] if towards else []
    found += [source_towards(_ANYWHERE[each], each) for each in families]
    for address in found:
        if address is not None and not is_loopback_address(address):
            return address
    there = [each for each in interfaces() if not all(map(is_loopback_address, each.addresses))]
    usable = [
        address
        for kind in families
        for each in there
        for address in each.addresses
        if (":" in address) == (kind == socket.AF_INET6)
    ]
    if len(there) == 1 and usable:
        return usable[0]
    if not usable:
        raise NoAddressError("this host has no network address but loopback; connect it to a network")
    raise NoAddressError(
        f"this host has several networks and no default route: {show(there)}; choose one of them with "
        f"Options(bind='if:{there[0].name}')"
    )
