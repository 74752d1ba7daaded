"""Addresses mean one thing each, and what is none is refused."""

from __future__ import annotations

import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul._transport.sockets.addresses import host_identity, is_loopback, localize, parse, show_tcp, split_port
from backhaul._transport.sockets.tcp_listener import listen_address


@pytest.mark.parametrize(
    ("address", "family", "where"),
    [
        ("unix:@name", socket.AF_UNIX, "\0name"),
        ("unix:@with:colons@and@ats", socket.AF_UNIX, "\0with:colons@and@ats"),
        ("tcp:127.0.0.1:7000", socket.AF_INET, ("127.0.0.1", 7000)),
        ("tcp:some-host.example:1", socket.AF_INET, ("some-host.example", 1)),
        ("tcp:[::1]:65535", socket.AF_INET6, ("::1", 65535)),
        ("tcp:[fe80::1%eth0]:7000", socket.AF_INET6, ("fe80::1%eth0", 7000)),
    ],
)
def test_parse(address: str, family: socket.AddressFamily, where: object) -> None:
    assert parse(address) == (family, where)


@pytest.mark.parametrize(
    "address",
    [
        "",
        ":",
        "unix",
        "unix:",
        "unix:@",
        "unix:/tmp/socket",  # only abstract names
        "UNIX:@name",
        "tcp",
        "tcp:",
        "tcp:host",
        "tcp::7000",
        "tcp:host:",
        "tcp:host:port",
        "tcp:host:-1",
        "tcp:host:65536",
        "tcp:host:99999999999999999999",
        "tcp:host: 7000",
        "tcp:host:7_000",
        "tcp:host:\u00b2",  # a digit to str.isdigit, but no number
        "tcp:[]:7000",
        "tcp:::1:7000",  # without brackets it is a guess where the host ends
        "tls:host:7000",
        "inproc:0",
        "tcp://host:7000",
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError):
        parse(address)


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    for address in (text, f"tcp:{text}", f"unix:{text}"):
        try:
            family, where = parse(address)
        except ValueError:
            continue
        if isinstance(where, str):
            assert family == socket.AF_UNIX
            assert f"unix:@{where[1:]}" == address
        else:
            assert where[0]
            assert 0 <= where[1] <= 65535


@given(st.ip_addresses().map(str), st.integers(0, 65535))
def test_what_is_shown_is_parsed_back(host: str, port: int) -> None:
    family, where = parse(show_tcp(host, port))
    assert where == (host, port)
    assert family == (socket.AF_INET6 if ":" in host else socket.AF_INET)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "2001:db8::1", "no such host", "not..a..host"])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_a_name_is_loopback_only_if_all_its_addresses_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*ips: str) -> None:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 0)) for ip in ips]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)

    resolve("127.0.0.1", "::1")
    assert is_loopback("name")
    resolve("127.0.0.1", "192.0.2.1")
    assert not is_loopback("name")
    resolve("fe80::1%eth0")
    assert not is_loopback("name")
    resolve()
    assert not is_loopback("name")


def test_the_host_stays_the_same() -> None:
    assert host_identity() == host_identity() != ""


def test_a_host_without_proc_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: object) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "readlink", fail)
    assert host_identity() == socket.gethostname()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("10.0.0.5", ("10.0.0.5", 0)),
        ("10.0.0.5:7000", ("10.0.0.5", 7000)),
        ("node7:1", ("node7", 1)),
        ("fd00::1", ("fd00::1", 0)),
        ("[fd00::1]", ("fd00::1", 0)),
        ("[fe80::1%eth0]:7000", ("fe80::1%eth0", 7000)),
    ],
)
def test_hosts_and_ports_as_people_write_them(text: str, found: tuple[str, int]) -> None:
    assert split_port(text) == found


@pytest.mark.parametrize(
    "text",
    ["", ":7000", "host:", "host:port", "host:65536", "[::1", "[]", "[::1]7000", "[::1]:", "two words", "a/b", "::]"],
)
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        split_port(text)


def test_the_scope_of_a_link_local_address_is_the_own_interface() -> None:
    there = "fe80::1%eth0"
    assert localize(there, "lan1", ["eth0", "lan1"]) == "fe80::1%lan1"  # where this worker listens
    assert localize(there, None, ["lan1", "eth0"]) == there
    assert localize(there, None, ["lan1"]) == "fe80::1%lan1"
    assert localize("fd00::1", "lan1", []) == "fd00::1"
    for interfaces in ([], ["lan1", "lan2"]):
        with pytest.raises(ValueError, match="link-local"):
            localize(there, None, interfaces)


def test_where_a_worker_listens() -> None:
    plain = listen_address("127.0.0.1:7000")
    assert (plain.host, plain.port, plain.shown_host, plain.shown_port) == ("127.0.0.1", 7000, "127.0.0.1", 0)
    assert not plain.beyond_loopback
    forwarded = listen_address("127.0.0.1", "[fd00::7]:7001")
    assert (forwarded.port, forwarded.shown_host, forwarded.shown_port) == (7001, "fd00::7", 7001)
    assert forwarded.beyond_loopback
    assert listen_address("127.0.0.1:7000", "node7:7001").port == 7000
    assert listen_address("localhost").host in ("127.0.0.1", "::1")
    assert listen_address("if:lo").interface == "lo"
    for wrong in ("if:", "if:no-such-interface", "no such host", "127.0.0.1:70000", "fe80::1"):
        with pytest.raises(ValueError):
            listen_address(wrong)
