"""TLS: two processes over real sockets, certificates that are wrong in every way, and peers that speak another
language.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import backhaul as bh
from backhaul._rpc.cluster.own_endpoint import SECRET_VARIABLE
from backhaul._rpc.node import Node, describe, shutdown_together, start_node
from backhaul._transport.base import Received
from backhaul._transport.sockets.certificates import check_strength, issue
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._transport.sockets.tls import Credentials
from backhaul._wire.frames import Frame
from backhaul.testing.transport_conformance import PATIENCE, Pollers

from ..certificates import files_of, make_certificates
from .attackers import SECRET, dial, prove, read_to_end, say

NAMES = ["alice", "bob"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cluster's certificates, by rank."""
    made = tmp_path_factory.mktemp("cluster")
    make_certificates(made, NAMES)
    return made


@pytest.fixture(scope="session")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same names of another authority."""
    made = tmp_path_factory.mktemp("strangers")
    make_certificates(made, NAMES, b"another authority")
    return made


@pytest.fixture(scope="session")
def expired(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates that were good until yesterday, of an authority that still is."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command")
    made = tmp_path_factory.mktemp("expired")
    new = ["-newkey", "rsa:2048", "-nodes", "-subj"]

    def openssl(*command: str) -> None:
        subprocess.run(["openssl", *command], cwd=made, check=True, capture_output=True)

    openssl("req", "-x509", *new, "/CN=authority", "-keyout", "ca.key", "-out", "authority.pem")
    for rank in range(2):
        openssl("req", *new, "/CN=worker", "-keyout", f"{rank}.key", "-out", "request")
        signed = ["-CA", "authority.pem", "-CAkey", "ca.key", "-set_serial", str(rank), "-days", "-1"]
        openssl("x509", "-req", "-in", "request", *signed, "-out", f"{rank}.pem")
    return made


def listening(credentials: Credentials | None) -> SocketEndpoint:
    return SocketEndpoint(secret=SECRET, unix=False, bind="127.0.0.1", credentials=credentials)


@contextlib.contextmanager
def pair(server: Credentials | None, client: Credentials | None) -> Iterator[tuple[SocketEndpoint, SocketEndpoint]]:
    with (
        contextlib.closing(listening(server)) as there,
        contextlib.closing(listening(client)) as here,
        Pollers(there, act=answer),
        Pollers(here),
    ):
        yield there, here


def answer(event: Received) -> None:
    for frame in event.frames:
        event.channel.send(Frame(4, frame.number, frame.body, frame.buffers))


def mixed(folder: Path, authority: Path, rank: int = 0) -> Credentials:
    """A certificate of one authority with trust in another."""
    files = files_of(folder, rank)
    return Credentials(bh.Tls(certificate=files.certificate, key=files.key, authority=authority / "authority.pem"))


def test_both_sides_have_to_be_of_the_authority(
    folder: Path, strangers: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = Credentials(files_of(folder, 0))
    cases = {
        "this cluster's authority did not sign it": (good, Credentials(files_of(strangers, 0))),
        "did not accept the certificate": (good, mixed(strangers, folder)),
        "authority did not sign it": (mixed(strangers, folder), good),
    }
    for text, (server, client) in cases.items():
        with pair(server, client) as (there, here), pytest.raises(bh.errors.AuthenticationError) as caught:
            here.connect(there.addresses[0], timeout=PATIENCE)
        assert text in str(caught.value), (text, str(caught.value))
    with pair(good, good) as (there, here):
        channel = here.connect(there.addresses[0], timeout=PATIENCE)
        assert channel.names == {"alice"}
    assert any("certificate" in message for message in caplog.messages)


def test_expired_certificates_are_named_so(expired: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    both = Credentials(files_of(expired, 0)), Credentials(files_of(expired, 1))
    with pair(*both) as (there, here), pytest.raises(bh.errors.AuthenticationError, match="expired"):
        here.connect(there.addresses[0], timeout=PATIENCE)
    server = mixed(folder, expired)  # a good one, which is shown an old one
    client = mixed(expired, folder)
    with (
        pair(server, client) as (there, here),
        pytest.raises(bh.errors.AuthenticationError, match="certificate expired"),
    ):
        here.connect(there.addresses[0], timeout=PATIENCE)
    assert any("expired" in message for message in caplog.messages)


def test_the_secret_is_asked_for_inside(folder: Path) -> None:
    credentials = Credentials(files_of(folder, 0))
    with pair(credentials, credentials) as (there, here):
        here._connector.secret = b"another"
        with pytest.raises(bh.errors.AuthenticationError, match="secret"):
            here.connect(there.addresses[0], timeout=PATIENCE)


def test_who_speaks_another_language_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    credentials = Credentials(files_of(folder, 0))
    with pair(credentials, None) as (there, here), pytest.raises(bh.errors.AuthenticationError, match="takes TLS only"):
        here.connect(there.addresses[0], timeout=PATIENCE)
    with (
        pair(None, credentials) as (there, here),
        pytest.raises(bh.errors.AuthenticationError, match="does not speak TLS"),
    ):
        here.connect(there.addresses[0], timeout=PATIENCE)
    assert any("it does not speak TLS" in message for message in caplog.messages)
    assert any("speaks TLS, but this side does not" in message for message in caplog.messages)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\x16",
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/1.1\r\n\r\n",
        random.Random(1).randbytes(3000),
        b"\x16\x03" + random.Random(2).randbytes(500),
    ],
    ids=["nothing", "a byte", "a header", "http", "noise", "noise that begins as TLS does"],
)
def test_noise_on_a_tls_port_closes_that_connection_alone(folder: Path, said: bytes) -> None:
    credentials = Credentials(files_of(folder, 0))
    with pair(credentials, credentials) as (there, here):
        with dial(there.addresses[0]) as sock:
            say(sock, said)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            read_to_end(sock)
        assert here.connect(there.addresses[0], timeout=PATIENCE).names == {"alice"}
        with (
            pytest.raises((AssertionError, ConnectionError, bh.errors.AuthenticationError)),
            dial(there.addresses[0]) as sock,
        ):
            prove(sock)


def test_old_versions_of_tls_are_refused(folder: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command")
    files = files_of(folder, 0)
    with pair(Credentials(files), None) as (there, _):
        where = there.addresses[0].removeprefix("tcp:")
        for version, fine in (("-tls1_1", False), ("-tls1_2", True), ("-tls1_3", True)):
            done = subprocess.run(
                ["openssl", "s_client", "-connect", where, version, "-cert", files.certificate, "-key", files.key],
                input="",
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                check=False,
            )
            assert ("New, TLSv1" in done.stdout) is fine, done.stdout + done.stderr


def test_files_that_are_no_certificates_are_named(folder: Path, tmp_path: Path) -> None:
    files = files_of(folder, 0)
    empty = tmp_path / "empty"
    empty.touch()
    for wrong in ({"certificate": empty}, {"key": files_of(folder, 1).key}, {"authority": tmp_path / "none"}):
        given = {"certificate": files.certificate, "key": files.key, "authority": files.authority, **wrong}
        with pytest.raises(ValueError, match="cannot use"):
            Credentials(bh.Tls(**given))


# Workers.


@contextlib.contextmanager
def workers(folder: Path, ranks: list[int], *, names: bool = True) -> Iterator[list[bh.Worker]]:
    """Alice and Bob, with the certificates of these ranks."""
    options = []
    for rank in ranks:
        files = files_of(folder, rank)
        tls = bh.Tls(certificate=files.certificate, key=files.key, authority=files.authority, names=names)
        options.append(bh.Options(shutdown_timeout=5, connect_timeout=PATIENCE, security=bh.Security(tls=tls)))
    ends = [listening(Credentials(each.security.tls)) for each in options]  # type: ignore[arg-type]
    each = list(zip(NAMES, ends, options, strict=True))
    records = [describe(name, rank, end, opts, host="here") for rank, (name, end, opts) in enumerate(each)]
    nodes = [start_node(own, records, end, opts) for own, (_, end, opts) in zip(records, each, strict=True)]
    try:
        with nodes[0].worker:
            yield [node.worker for node in nodes]
    finally:
        shutdown_together(nodes, graceful=False, timeout=5)


def test_names_are_bound_to_certificates(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with workers(folder, [0, 1]):
        assert bh.rpc_sync("bob", torch.add, args=(torch.ones(1), 1)) == 2
    with workers(folder, [0, 0]) as (_, bob):  # Bob shows Alice's
        with pytest.raises(bh.errors.AuthenticationError, match="is for 'alice'"):
            bh.rpc_sync("bob", torch.zeros, args=(1,))
        with bob, pytest.raises(bh.PeerLostError):
            bh.rpc_sync("alice", torch.zeros, args=(1,))
        assert any("the certificate of 'bob' is for 'alice'" in message for message in caplog.messages)
    with workers(folder, [0, 0], names=False):
        assert bh.rpc_sync("bob", torch.add, args=(torch.ones(1), 1)) == 2


def test_many_threads_both_ways(folder: Path) -> None:
    """Reading and writing at once is what OpenSSL's connections do not bear by themselves."""
    with workers(folder, [0, 1]) as both:
        errors: list[BaseException] = []

        def work(worker: bh.Worker, to: str) -> None:
            try:
                with worker:
                    for size in (1, 100, 20_000, 300_000) * 3:
                        x = torch.rand(size)
                        assert torch.equal(bh.rpc_sync(to, torch.neg, args=(x,)), -x)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(both[n % 2], NAMES[1 - n % 2])) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors


def program() -> Any:
    worker = bh.current_worker()
    if worker.name != "alice":
        return None
    x = torch.rand(200_000, requires_grad=True)
    with bh.context() as ctx:
        y = bh.rpc_sync("bob", torch.mul, args=(x, 3)).sum()
        ctx.backward(y)
        assert torch.equal(ctx.grads[x], torch.full_like(x, 3))
    channel = worker.part(Node).peers.find("bob").channel
    assert channel is not None
    return type(channel).__name__, sorted(channel.names or ()), worker.endpoint.shm_bytes


bh.expose(torch.mul)


@pytest.mark.parametrize("trusted", [True, False])
def test_a_launch_with_certificates_of_its_own(trusted: bool) -> None:
    options = bh.Options(transport="tcp", security=bh.Security(tls="auto", trusted=trusted))
    found = bh.launch(program, NAMES, options=options, timeout=100, start_method="forkserver")
    assert found == [("TlsChannel", ["bob"], 0), None]


def test_untrusting_workers_with_names_accept_no_channel_without_a_certificate(folder: Path) -> None:
    """Certificates mean nothing if a worker can also be reached by a Unix socket."""
    files = files_of(folder, 0)
    named = bh.Options(security=bh.Security(tls=files, trusted=False))
    assert named.tcp_only
    assert not bh.Options(security=bh.Security(tls=files)).tcp_only
    plain = bh.Options(security=bh.Security(trusted=False), shutdown_timeout=5)
    ends = [listening(Credentials(files)), SocketEndpoint(secret=SECRET)]
    each = list(zip(NAMES, ends, (named, plain), strict=True))
    records = [describe(name, rank, end, opts, host="here") for rank, (name, end, opts) in enumerate(each)]
    nodes = [start_node(own, records, end, opts) for own, (_, end, opts) in zip(records, each, strict=True)]
    try:
        with nodes[0].worker, pytest.raises(bh.errors.AuthenticationError, match="no certificate"):
            bh.rpc_sync("bob", "anything")
    finally:
        shutdown_together(nodes, graceful=False, timeout=5)


@bh.expose(name="tls.for_carol", to=("carol",))
def for_carol() -> str:
    return "yes"


def impersonate() -> dict[str, str] | None:
    """Runs on every worker. Bob says that he is Carol, with each certificate that he can get."""
    worker = bh.current_worker()
    if worker.name == "carol":
        assert bh.rpc_sync("alice", "tls.for_carol") == "yes"
    if worker.name != "bob":
        return None
    secret = os.environ[SECRET_VARIABLE].encode()
    known = [peer.record for peer in worker.part(Node).peers]
    carol = next(record for record in known if record.name == "carol")
    own, found = worker.options.security.tls, {}
    for what, certificate in {"made": issue(secret, "carol"), "own": own}.items():
        if isinstance(certificate, str):
            continue
        end = SocketEndpoint(secret=secret, unix=False, bind="127.0.0.1", credentials=Credentials(certificate))
        options = dataclasses.replace(worker.options, timeout=PATIENCE)
        with start_node(carol, known, end, options).worker:
            try:
                found[what] = bh.rpc_sync("alice", "tls.for_carol")
            except bh.BackhaulError as error:
                found[what] = type(error).__name__
            finally:
                bh.shutdown(graceful=False)
    return found


def test_no_worker_of_a_launch_can_take_the_name_of_another() -> None:
    options = bh.Options(security=bh.Security(tls="auto", trusted=False))
    names = ["alice", "bob", "carol"]
    _, found, _ = bh.launch(impersonate, names, options=options, timeout=100, start_method="forkserver")
    assert found == {"made": "AuthenticationError", "own": "PeerLostError"}


# Certificates from the secret.


def test_everybody_with_the_secret_makes_certificates_that_the_others_accept(caplog: pytest.LogCaptureFixture) -> None:
    alice, bob = (Credentials(issue(SECRET, name)) for name in NAMES)
    with pair(alice, bob) as (there, here):
        assert here.connect(there.addresses[0], timeout=PATIENCE).names == {"alice"}
    stranger = Credentials(issue(SECRET + b"!", "bob"))
    for server, client in ((alice, stranger), (stranger, alice)):
        with (
            pair(server, client) as (there, here),
            pytest.raises(bh.errors.AuthenticationError, match="does not know the cluster secret"),
        ):
            here.connect(there.addresses[0], timeout=PATIENCE)
    assert all("cluster secret" in message for message in caplog.messages)


def test_a_certificate_of_the_user_is_not_accepted_in_place_of_one_from_the_secret(folder: Path) -> None:
    with (
        pair(Credentials(issue(SECRET, "alice")), Credentials(files_of(folder, 1))) as (there, here),
        pytest.raises(bh.errors.AuthenticationError),
    ):
        here.connect(there.addresses[0], timeout=PATIENCE)


def test_openssl_accepts_the_certificates(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command")
    make_certificates(tmp_path, NAMES)
    for purpose in ("sslserver", "sslclient"):
        subprocess.run(
            ["openssl", "verify", "-x509_strict", "-purpose", purpose, "-CAfile", "authority.pem", "0.pem", "1.pem"],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )
    shown = subprocess.run(
        ["openssl", "x509", "-noout", "-text", "-in", "0.pem"], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout
    assert "DNS:alice" in shown


def test_keys_are_made_anew(tmp_path: Path) -> None:
    """Only the authority's key follows from the secret, and nothing shows that key."""
    first, second = issue(SECRET, "alice"), issue(SECRET, "alice")
    assert first.key != second.key
    assert "KEY" not in repr(first)
    assert b"PRIVATE" not in first.certificate + first.authority


def test_secrets_that_are_easy_to_guess_make_no_certificates() -> None:
    for weak in (b"", b"secret", b"fifteen letters", b"a" * 40, b"12345" * 10):
        with pytest.raises(ValueError, match="token_hex"):
            check_strength(weak)
    for fine in (b"sixteen letters!", bytes(range(16)), b"0123456789abcdef"):
        check_strength(fine)
