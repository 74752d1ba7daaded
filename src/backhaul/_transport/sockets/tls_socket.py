"""TLS connections that channels use like plain sockets.

[Note: one at a time] Different threads read and write a channel, and OpenSSL allows only one thread at a time to use a
connection. No call here blocks, so a lock around each call is enough.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from backhaul._wire.memory import Buffer

if TYPE_CHECKING:
    from backhaul._transport.sockets.tls import Credentials

_WRITE_BYTES = 1 << 17  # in one call; a thread that reads waits for it. At most ``socket_writer.TURN_BYTES``
_NOT_VERIFIED = ssl.SSLCertVerificationError
_NOT_NOW = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
_NOT_TLS = frozenset(
    ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG", "UNEXPECTED_MESSAGE")
)


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


def identify(certificate: bytes) -> str:
    """A short name of a certificate, which no other has."""
    return hashlib.sha256(certificate).hexdigest()


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
        return identify(self._secure.getpeercert(binary_form=True) or b"")

    def getpeername(self) -> Any:
        """Like ``socket.getpeername``."""
        return self._secure.getpeername()

    def getsockname(self) -> Any:
        """Like ``socket.getsockname``."""
        return self._secure.getsockname()

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Like ``socket.setsockopt``."""
        self._secure.setsockopt(level, option, value)

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
