"""A listening TCP socket: the address on which it listens, and the address that other workers are told. Knows no
connections.
"""

from __future__ import annotations

import errno
import logging
import re
import socket
from dataclasses import dataclass

from backhaul._transport.sockets import addresses
from backhaul._transport.sockets.interfaces import (
    NoAddressError,
    interfaces,
    is_loopback_address,
    numeric_host,
    own_address,
    show,
)

log = logging.getLogger("backhaul")

_BACKLOG = 1024
_INTERFACE = re.compile(r"if:([^:\s]+)(?::(\d{1,5}))?")
_WILDCARDS = {"0.0.0.0": socket.AF_INET, "::": socket.AF_UNSPEC}  # Linux accepts IPv4 at :: too


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where a worker listens by TCP, and what it tells others.

    Attributes:
        host: A numeric address, or a wildcard.
        port: 0: any free port.
        shown_host: The host that others are told.
        shown_port: The port that others are told; 0: that of the socket.
        interface: The interface of a link-local address, or that the user has named; else None.
    """

    host: str
    port: int
    shown_host: str
    shown_port: int = 0
    interface: str | None = None

    @property
    def beyond_loopback(self) -> bool:
        """Whether other hosts may reach the worker."""
        return not is_loopback_address(self.host) or not (
            self.shown_host == self.host or addresses.is_loopback(self.shown_host)
        )


def listen_address(bind: str | None, advertise: str | None = None, towards: str | None = None) -> ListenAddress:
    """Decide where to listen.

    Args:
        bind: ``Options.bind``. None: the address from which this host reaches ``towards``.
        advertise: ``Options.advertise``.
        towards: A host that all workers reach, such as the one with the store.

    Raises:
        ValueError: ``bind`` or ``advertise`` is not an address of this host; ``NoAddressError``: this host has none.
    """
    shown_host, shown_port = addresses.split_port(advertise) if advertise is not None else ("", 0)
    if bind is None:
        host, port, interface = own_address(towards), 0, None
    elif (given := _INTERFACE.fullmatch(bind)) is not None:
        interface, port = given[1], int(given[2] or 0)
        host = _address_of_interface(interface)
    else:
        host, port = addresses.split_port(bind)
        host, interface = _resolve(bind, host, towards), None
    if addresses.is_link_local(host):
        interface = host.partition("%")[2] or interface
        if not interface:
            raise ValueError(f"bind={bind!r} is a link-local address: name its interface, as in bind='{host}%eth0'")
    return ListenAddress(host, port or shown_port, shown_host or _shown(host, towards), shown_port, interface)


def _address_of_interface(name: str) -> str:
    there = interfaces()
    for each in there:
        if each.name == name:
            if each.addresses:
                return each.addresses[0]
            raise ValueError(f"the network interface '{name}' has no address; this host has: {show(there)}")
    raise ValueError(f"this host has no network interface '{name}'; it has: {show(there)}")


def _resolve(bind: str, host: str, towards: str | None) -> str:
    """The numeric address of a host as the user gave it."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"bind={bind!r}: there is no host '{host}' ({error}); give an address, a host name, or 'if:' and the name "
            f"of an interface; this host has: {show(interfaces())}"
        ) from error
    resolved = [numeric_host(info[4]) for info in found]
    beyond = [address for address in resolved if not is_loopback_address(address)]
    if beyond or is_loopback_name(host):
        return (beyond or resolved)[0]
    # The name of this host stands in /etc/hosts with a loopback address, as on Debian. Its user means the host.
    address = own_address(towards)
    log.info("bind=%r resolves to %s, which other hosts cannot reach; listening on %s", bind, resolved[0], address)
    return address


def is_loopback_name(host: str) -> bool:
    """Whether a host was given that means loopback for everybody: an address, or a name of localhost."""
    name = host.lower().rstrip(".")
    return is_loopback_address(host) or name.startswith(("localhost", "ip6-l")) or name.endswith(".localhost")


def _shown(host: str, towards: str | None) -> str:
    if host not in _WILDCARDS:
        return host
    try:
        return own_address(towards, _WILDCARDS[host])
    except NoAddressError as error:
        if any(not is_loopback_address(address) for each in interfaces() for address in each.addresses):
            raise NoAddressError(
                f"bind={host!r} listens on all addresses, and nothing says which of them others use: {error}, or give "
                "Options(advertise='<host>')"
            ) from error
        return "::1" if host == "::" else "127.0.0.1"


class TcpListener:
    """A TCP socket that listens. Connections wait in the system until an ``Acceptor`` takes the socket over.

    Attributes:
        sock: The socket.
        address: The address that others are told.
        where: Where it listens.
    """

    def __init__(self, where: ListenAddress) -> None:
        self.where = where
        family, _, _, _, place = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)[0]
        self.sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if where.port:
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.sock.setblocking(False)
            self.sock.bind(place)
            self.sock.listen(_BACKLOG)
        except OSError as error:
            self.sock.close()
            raise _explain(error, where) from error
        self.address = addresses.show_tcp(where.shown_host, where.shown_port or self.sock.getsockname()[1])

    def close(self) -> None:
        """Stop listening."""
        self.sock.close()


def _explain(error: OSError, where: ListenAddress) -> Exception:
    if error.errno == errno.EADDRNOTAVAIL:
        return ValueError(f"{where.host} is not an address of this host, which has: {show(interfaces())}")
    if error.errno == errno.EADDRINUSE:
        return OSError(
            error.errno, f"another process listens on port {where.port} of {where.host}; choose another port"
        )
    return OSError(error.errno, f"cannot listen on {where.host}, port {where.port}: {error.strerror}")
