"""TLS for TCP: a worker's credentials, and TLS connections that channels use like plain sockets.

Both ends show a certificate and check the certificate of the other. Host names are not checked, since a worker may run
on any host. The names of workers are checked where they are known (``_rpc.cluster``). The handshake of the secret
follows inside the TLS connection.

[Note: one at a time] Different threads read and write a channel, and OpenSSL allows only one thread at a time to use a
connection. No call here blocks, so a lock around each call is enough.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from backhaul._options import Tls
from backhaul._runtime import interrupts
from backhaul._transport.base import Event, Lost, Received
from backhaul._transport.sockets.certificates import Issued
from backhaul._transport.sockets.channel import ChannelOwner, SocketChannel
from backhaul._wire.memory import Buffer
from backhaul.errors import AuthenticationError

_WRITE_BYTES = 1 << 17  # in one call; a thread that reads waits for it. At most ``socket_writer.TURN_BYTES``
_NOT_VERIFIED = ssl.SSLCertVerificationError
_CLIENT_HELLO = b"\x16\x03"  # the first bytes of every TLS connection
_NOT_NOW = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
_NOT_TLS = frozenset(
    ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG", "UNEXPECTED_MESSAGE")
)


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

    def connect(self, sock: socket.socket) -> ssl.SSLSocket:
        """Make the client's side of a connection, and do its handshake. Closes ``sock`` if that fails."""
        secure = self._client.wrap_socket(sock, do_handshake_on_connect=False)
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
    return _identify(ssl.PEM_cert_to_DER_cert(found[0])) if found is not None else ""


def _identify(certificate: bytes) -> str:
    return hashlib.sha256(certificate).hexdigest()


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


def explain(error: ssl.SSLError, credentials: Credentials | None = None) -> str:
    """Say for people what went wrong with a connection. ``credentials``: those of this side."""
    reason = error.reason or ""
    refused = "ALERT" in reason and any(word in reason for word in ("CERTIFICATE", "UNKNOWN_CA", "DECRYPT_ERROR"))
    if credentials is not None and credentials.from_secret and (refused or isinstance(error, _NOT_VERIFIED)):
        return (
            "the other side does not know the cluster secret, or it uses certificates of its own: use the same secret "
            "and the same Options(security=Security(tls=...)) on both"
        )
    if isinstance(error, _NOT_VERIFIED):
        return (
            f"the certificate of the other side is not valid, or this cluster's authority did not sign it: "
            f"{error.verify_message}"
        )
    if reason in _NOT_TLS:
        return "the other side does not speak TLS: use the same Options(security=Security(tls=...)) on both"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "the other side showed no certificate"
    if refused:
        return f"the other side did not accept the certificate of this side: {_words(reason)}"
    return f"TLS failed: {_words(reason) or error}"


def _words(reason: str) -> str:
    return reason.partition("ALERT_")[2].replace("_", " ").lower() or reason.replace("_", " ").lower()


class TlsSocket:
    """A TLS connection with the methods of a plain, non-blocking socket that channels use; see [Note: one at a time].

    The descriptor is not readable while decrypted bytes wait to be read: read until ``pending`` is 0.
    """

    def __init__(self, secure: ssl.SSLSocket) -> None:
        self._secure = secure
        self._lock = threading.Lock()  # held for every call of OpenSSL
        # On a Unix socket, the process at the other end is a relay: it shares no memory with this one.
        self.family = secure.family if secure.family != socket.AF_UNIX else socket.AF_INET

    def fileno(self) -> int:
        """Like ``socket.fileno``."""
        return self._secure.fileno()

    def pending(self) -> int:
        """How many decrypted bytes wait to be read."""
        with self._lock:
            return self._secure.pending()

    def peer_names(self) -> frozenset[str]:
        """The worker names in the peer's certificate."""
        certificate: Any = self._secure.getpeercert() or {}
        return frozenset(name for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS")

    def peer_key(self) -> str:
        """Identifies the peer's certificate, see ``Channel.key``."""
        return _identify(self._secure.getpeercert(binary_form=True) or b"")

    def do_handshake(self) -> None:
        """Continue the handshake. Raises ``ssl.SSLWantReadError`` or ``ssl.SSLWantWriteError`` if it is not done."""
        with self._lock:
            self._secure.do_handshake()

    def recv(self, size: int) -> bytes:
        """Like ``socket.recv``."""
        with self._lock, _as_of_sockets():
            return self._secure.recv(size)

    def recv_into(self, memory: memoryview) -> int:
        """Like ``socket.recv_into``."""
        try:
            with self._lock:
                return self._secure.recv_into(memory)
        except _NOT_NOW:
            raise BlockingIOError from None
        except ssl.SSLError as error:
            raise OSError(errno.EPROTO, explain(error)) from error

    def discard(self, size: int) -> int:
        """Read encrypted bytes and drop them. Returns how many; 0: the peer has closed the connection."""
        return len(socket.socket.recv(self._secure, size))

    def sendall(self, data: bytes) -> None:
        """Like ``socket.sendall``, for a few bytes that fit into the socket's buffer."""
        with self._lock, _as_of_sockets():
            self._secure.sendall(data)

    def sendmsg(self, parts: Sequence[Buffer]) -> int:
        """Like ``socket.sendmsg``. After an error the caller must repeat the same bytes, and no fewer; channels do."""
        sent = 0
        try:
            for piece in _pieces(parts):
                with self._lock, _as_of_sockets():
                    count = self._secure.send(piece)
                sent += count
                if count < len(piece):
                    break
        except BlockingIOError:
            if not sent:
                raise
        return sent

    def shutdown(self, how: int) -> None:
        """Like ``socket.shutdown``, without a TLS message. An SSL socket would continue in plain text after one."""
        socket.socket.shutdown(self._secure, how)

    def detach(self) -> int:
        """Like ``socket.detach``. Takes no lock."""
        return self._secure.detach()

    def close(self) -> None:
        """Like ``socket.close``."""
        with self._lock:
            self._secure.close()


@contextlib.contextmanager
def _as_of_sockets() -> Iterator[None]:
    """Translate errors of SSL into those of plain sockets."""
    try:
        yield
    except _NOT_NOW:
        raise BlockingIOError from None
    except ssl.SSLError as error:
        raise OSError(errno.EPROTO, explain(error)) from error


def _pieces(parts: Sequence[Buffer]) -> Iterator[Buffer]:
    """The same bytes in pieces of a good size for one call: small parts are joined, large parts are cut."""
    small: list[Buffer] = []
    size = 0
    for part in parts:
        if size + len(part) <= _WRITE_BYTES:
            small.append(part)
            size += len(part)
            continue
        if small:
            yield b"".join(small)
            small, size = [], 0
        view = memoryview(part)
        for start in range(0, len(view), _WRITE_BYTES):
            yield view[start : start + _WRITE_BYTES]
    if small:
        yield small[0] if len(small) == 1 else b"".join(small)


class TlsChannel(SocketChannel):
    """A channel over a TLS connection."""

    def __init__(self, endpoint: ChannelOwner, secure: TlsSocket, peer: str) -> None:
        super().__init__(endpoint, cast("socket.socket", secure), peer)
        self._secure = secure
        self.names = secure.peer_names()
        self.key = secure.peer_key()

    def _has_buffered(self) -> bool:
        return self._secure.pending() > 0

    def _read(self) -> Event | None:
        event = super()._read()
        while isinstance(event, Received) and self._secure.pending():
            more = super()._read()
            if isinstance(more, Lost):
                return more
            if more is not None:
                event.frames.extend(more.frames)
        return event
