"""TLS for TCP: a worker's credentials.

Both ends show a certificate and check the certificate of the other. Host names are not checked, since a worker may run
on any host. The names of workers are checked where they are known (``_rpc.cluster``). The handshake of the secret
follows inside the TLS connection.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

from backhaul._options import Tls
from backhaul._runtime import interrupts
from backhaul._transport.sockets.certificates import Issued
from backhaul._transport.sockets.tls_socket import explain, identify
from backhaul.errors import AuthenticationError

_CLIENT_HELLO = b"\x16\x03"  # the first bytes of every TLS connection


def begins_tls(data: bytes) -> bool:
    """Whether these are the first bytes of a TLS connection."""
    return data[: len(_CLIENT_HELLO)] == _CLIENT_HELLO[: len(data)]


class Credentials:
    """A worker's certificate, key and authority, loaded. Raises ``ValueError`` if they cannot be used.

    Attributes:
        names: Whether the certificate of a peer must contain the peer's name.
        from_secret: Whether the certificates of all workers are made from the cluster secret.
        key: Identifies this worker's certificate, see ``Channel.key``.
    """

    def __init__(self, given: Tls | Issued) -> None:
        self.from_secret = isinstance(given, Issued)
        self.names = isinstance(given, Issued) or given.names
        self.key = _key_of(given)
        self._server = self._load(given, ssl.PROTOCOL_TLS_SERVER)
        self._server.num_tickets = 0  # connections are not resumed
        self._client = self._load(given, ssl.PROTOCOL_TLS_CLIENT)

    @classmethod
    def _load(cls, given: Tls | Issued, side: int) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        if isinstance(given, Tls):
            context.minimum_version = ssl.TLSVersion.TLSv1_2
        else:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
        what = f"certificate {_title(given.certificate)} with key {_title(given.key)}"
        try:
            with _as_path(given.certificate) as certificate, _as_path(given.key) as key:
                # With an empty password OpenSSL does not ask for one at the terminal, which would stop the program.
                context.load_cert_chain(certificate, key, password="")
            what = f"authority {_title(given.authority)}"
            with _as_path(given.authority) as authority:
                context.load_verify_locations(cafile=authority)
        except OSError as error:  # ssl.SSLError is one
            raise ValueError(f"cannot use the {what}: {error}") from error
        return context

    def accept(self, sock: socket.socket) -> ssl.SSLSocket:
        """Make the server's side of a new connection. The caller does the handshake."""
        return self._server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def begin(self, sock: socket.socket) -> ssl.SSLSocket:
        """Make the client's side of a connection. The caller does the handshake."""
        return self._client.wrap_socket(sock, do_handshake_on_connect=False)

    def connect(self, sock: socket.socket) -> ssl.SSLSocket:
        """Make the client's side of a connection, and do its handshake. Closes ``sock`` if that fails."""
        secure = self.begin(sock)
        try:
            _shake_hands(secure)
            return secure
        except ssl.SSLError as error:
            secure.close()
            raise AuthenticationError(explain(error, self)) from error
        except BaseException:
            secure.close()
            raise


_FIRST_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


def _key_of(given: Tls | Issued) -> str:
    """Identifies the certificate with which a worker shows itself: the first of the file."""
    with _as_path(given.certificate) as path:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    found = _FIRST_CERTIFICATE.search(text)
    return identify(ssl.PEM_cert_to_DER_cert(found[0])) if found is not None else ""


def _title(given: str | Path | bytes) -> str:
    return "given as bytes" if isinstance(given, bytes) else str(given)


@contextlib.contextmanager
def _as_path(given: str | Path | bytes) -> Iterator[str | Path]:
    """A path of these PEM data: a file in memory if they are no file. OpenSSL reads keys from files only."""
    if not isinstance(given, bytes):
        yield given
        return
    fd = os.memfd_create("backhaul-certificate")
    try:
        os.write(fd, given)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


@interrupts.waits
def _shake_hands(secure: ssl.SSLSocket) -> None:
    secure.do_handshake()
