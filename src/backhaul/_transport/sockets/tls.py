"""TLS for TCP: what a worker proves itself with, and connections that channels can use as they use plain ones.

Both ends show a certificate and check the other's. Hosts are not checked, since workers are known by name and come from
anywhere: names are, by who knows them (``rpc.peers``). The handshake of the secret follows inside.

[Note: one at a time] A channel is read and written by different threads, and OpenSSL's connections bear only one at a
time. Nothing blocks here, so a lock around each call is enough.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

from backhaul._runtime import interrupts
from backhaul._transport.base import Event, Lost, Received
from backhaul._transport.sockets.channel import ChannelOwner, SocketChannel
from backhaul._types import Tls
from backhaul._wire.memory import Buffer
from backhaul.errors import AuthenticationError

_WRITE = 1 << 17  # bytes at once: what a reader has to wait for; no more than a turn of ``socket_channel``
_HELLO = b"\x16\x03"  # how TLS begins
_NOT_NOW = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
_OTHER_LANGUAGE = frozenset(
    ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG", "UNEXPECTED_MESSAGE")
)


def begins_tls(data: bytes) -> bool:
    """Whether these are the first bytes of somebody who speaks TLS."""
    return data[: len(_HELLO)] == _HELLO[: len(data)]


class Credentials:
    """A worker's certificate, key and authority, loaded. Raises ``ValueError`` if they are not what they should be."""

    def __init__(self, tls: Tls) -> None:
        self.names = tls.names
        self._server = self._load(tls, ssl.PROTOCOL_TLS_SERVER)
        self._server.num_tickets = 0  # connections are not resumed
        self._client = self._load(tls, ssl.PROTOCOL_TLS_CLIENT)

    @staticmethod
    def _load(tls: Tls, side: int) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        what = f"certificate {tls.certificate} with key {tls.key}"
        try:
            # An empty password: one that is asked for at the terminal would stop the program.
            context.load_cert_chain(tls.certificate, tls.key, password="")
            what = f"authority {tls.authority}"
            context.load_verify_locations(cafile=tls.authority)
        except OSError as error:  # ssl.SSLError is one
            raise ValueError(f"cannot use the {what}: {error}") from error
        return context

    def accept(self, sock: socket.socket) -> ssl.SSLSocket:
        """The server's side of a new connection; its handshake is still to be done."""
        return self._server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def connect(self, sock: socket.socket) -> ssl.SSLSocket:
        """The client's side, after its handshake. Takes ``sock`` over, and closes it if that fails."""
        secure = self._client.wrap_socket(sock, do_handshake_on_connect=False)
        try:
            _shake_hands(secure)
            return secure
        except ssl.SSLError as error:
            secure.close()
            raise AuthenticationError(explain(error)) from error
        except BaseException:
            secure.close()
            raise


@interrupts.waits
def _shake_hands(secure: ssl.SSLSocket) -> None:
    secure.do_handshake()


def explain(error: ssl.SSLError) -> str:
    """What went wrong with a connection, for people."""
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the certificate of the other side is not one of this cluster's authority, or not valid: "
            f"{error.verify_message}"
        )
    if reason in _OTHER_LANGUAGE:
        return "the other side does not speak TLS: give it Options(tls=...), or this one none"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "the other side showed no certificate"
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        return f"the other side did not accept the certificate of this one: {_words(reason)}"
    return f"TLS failed: {_words(reason) or error}"


def _words(reason: str) -> str:
    return reason.partition("ALERT_")[2].replace("_", " ").lower() or reason.replace("_", " ").lower()


class TlsSocket:
    """A TLS connection with those methods of a plain, non-blocking socket that channels use; see [Note: one at a time].

    Bytes that were decrypted and not yet read make no descriptor readable: read while ``pending``.
    """

    def __init__(self, secure: ssl.SSLSocket) -> None:
        self._secure = secure
        self._lock = threading.Lock()  # held for every call of OpenSSL
        self.family = secure.family

    def fileno(self) -> int:
        """The descriptor."""
        return self._secure.fileno()

    def pending(self) -> int:
        """How many bytes can be read without the descriptor."""
        with self._lock:
            return self._secure.pending()

    def peer_names(self) -> frozenset[str]:
        """Whom the peer's certificate names."""
        certificate: Any = self._secure.getpeercert() or {}
        return frozenset(name for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS")

    def do_handshake(self) -> None:
        """Go on with it. Raises ``ssl.SSLWantReadError`` or ``ssl.SSLWantWriteError`` if it is not over."""
        with self._lock:
            self._secure.do_handshake()

    def recv(self, size: int) -> bytes:
        """As of a socket."""
        with self._lock, _as_of_sockets():
            return self._secure.recv(size)

    def recv_into(self, memory: memoryview) -> int:
        """As of a socket."""
        try:
            with self._lock:
                return self._secure.recv_into(memory)
        except _NOT_NOW:
            raise BlockingIOError from None
        except ssl.SSLError as error:
            raise OSError(errno.EPROTO, explain(error)) from error

    def discard(self, size: int) -> int:
        """Take bytes from below without looking at them; 0: there will be none."""
        return len(socket.socket.recv(self._secure, size))

    def sendall(self, data: bytes) -> None:
        """As of a socket; for little that fits into its buffer."""
        with self._lock, _as_of_sockets():
            self._secure.sendall(data)

    def sendmsg(self, parts: Sequence[Buffer]) -> int:
        """As of a socket. What follows an error has to begin with the same bytes, and no fewer, as with channels."""
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
        """As of a socket, with no word to the peer. SSL sockets would go on in plain text from there."""
        socket.socket.shutdown(self._secure, how)

    def detach(self) -> int:
        """As of a socket. Takes no lock."""
        return self._secure.detach()

    def close(self) -> None:
        """As of a socket."""
        with self._lock:
            self._secure.close()


@contextlib.contextmanager
def _as_of_sockets() -> Iterator[None]:
    """Raise what plain sockets raise."""
    try:
        yield
    except _NOT_NOW:
        raise BlockingIOError from None
    except ssl.SSLError as error:
        raise OSError(errno.EPROTO, explain(error)) from error


def _pieces(parts: Sequence[Buffer]) -> Iterator[Buffer]:
    """The same bytes in pieces worth a call each: small parts joined, large ones cut."""
    small: list[Buffer] = []
    size = 0
    for part in parts:
        if size + len(part) <= _WRITE:
            small.append(part)
            size += len(part)
            continue
        if small:
            yield b"".join(small)
            small, size = [], 0
        view = memoryview(part)
        for start in range(0, len(view), _WRITE):
            yield view[start : start + _WRITE]
    if small:
        yield small[0] if len(small) == 1 else b"".join(small)


class TlsChannel(SocketChannel):
    """A channel over a TLS connection."""

    def __init__(self, endpoint: ChannelOwner, secure: TlsSocket, peer: str) -> None:
        super().__init__(endpoint, cast("socket.socket", secure), peer)
        self._secure = secure
        self.names = secure.peer_names()

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
