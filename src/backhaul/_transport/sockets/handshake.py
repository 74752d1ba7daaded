"""The handshake of a new connection: both sides prove that they know the cluster secret, before either side looks at
anything else that the other sends. Pure: bytes in, bytes out.

    client -> server   magic, version, client nonce
    server -> client   magic, version, server nonce
    client -> server   proof of the client
    server -> client   verdict, proof of the server

A proof is an HMAC-SHA-256 over the role and both nonces, so that no proof can be replayed or sent back. The client
proves itself first: an attacker who connects gets nothing against which to try secrets.

The proofs of a lane, which is a further connection of a channel, are of another role, and over its *ticket* too. The
server finds the ticket by trying those that it expects.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Collection

from backhaul.errors import AuthenticationError

MAGIC = b"BACKHAUL"
VERSION = 1
_GREETING_BYTES = len(MAGIC) + 1 + 32
_PROOF_BYTES = 32
_ACCEPTED, _REFUSED = b"\x01", b"\x00"


def _proof(secret: bytes, role: bytes, client: bytes, server: bytes, ticket: bytes | None = None) -> bytes:
    if ticket is not None:
        role, client = role + b" of a lane", ticket + client
    return hmac.digest(secret, b"backhaul/1/" + role + b"/" + client + server, hashlib.sha256)


class _Side:
    """The part that both sides share: collects input until a message of a fixed size is complete."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = secrets.token_bytes(32)
        self._input = bytearray()
        self.done = False

    @property
    def wanted(self) -> int:
        """How many more bytes to read. Reading more would take bytes of the frames that follow."""
        return self._expected() - len(self._input)

    def _expected(self) -> int:
        raise NotImplementedError

    def _greeting(self) -> bytes:
        return MAGIC + bytes([VERSION]) + self._nonce

    def _check_greeting(self) -> bytes:
        if self._input[:2] == b"\x16\x03":
            raise AuthenticationError(
                "the other side speaks TLS, but this side does not; use the same Options(security=Security(tls=...)) "
                "on both sides"
            )
        if self._input[: len(MAGIC)] != MAGIC:
            raise AuthenticationError("the other side does not speak Backhaul")
        if self._input[len(MAGIC)] != VERSION:
            raise AuthenticationError(
                f"the other side uses version {self._input[len(MAGIC)]} of the handshake, this side version {VERSION}: "
                "install the same version of Backhaul on both"
            )
        return bytes(self._input[len(MAGIC) + 1 :])


class ServerHandshake(_Side):
    """The accepting side. Feed it the bytes that arrive; send the bytes that it returns.

    Attributes:
        ticket: Which ticket the client has proven to know; None: it opens a channel.

    Args:
        secret: What both sides must know.
        tickets: Those of the lanes that are expected.
    """

    def __init__(self, secret: bytes, tickets: Collection[bytes] = ()) -> None:
        super().__init__(secret)
        self._tickets = tickets
        self._client: bytes | None = None
        self.ticket: bytes | None = None

    def _expected(self) -> int:
        return _GREETING_BYTES if self._client is None else _PROOF_BYTES

    def feed(self, data: bytes) -> bytes:
        """Accept at most ``wanted`` bytes. Raises ``AuthenticationError``: send ``last_word`` then, and close."""
        self._input += data
        if self.wanted:
            return b""
        if self._client is None:
            self._client = self._check_greeting()
            self._input.clear()
            return self._greeting()
        for ticket in (None, *self._tickets):
            if hmac.compare_digest(self._input, _proof(self._secret, b"client", self._client, self._nonce, ticket)):
                self.ticket = ticket
                self.done = True
                return _ACCEPTED + _proof(self._secret, b"server", self._client, self._nonce, ticket)
        raise AuthenticationError(
            "the other side does not know the cluster secret, or the ticket of a lane is not valid"
        )

    refusal = _REFUSED + bytes(_PROOF_BYTES)

    @property
    def last_word(self) -> bytes:
        """What to send before closing. A client of another version waits for a greeting, which contains our version."""
        other_version = self._client is None and self._input.startswith(MAGIC)
        return self._greeting() if other_version else self.refusal

    wants_tls = MAGIC + b"\0" + b"TLS".ljust(32, b"\0")
    """The only bytes to send to a client that should have started with TLS."""


class ClientHandshake(_Side):
    """The connecting side. Send ``start()``; then use it like ``ServerHandshake``.

    Args:
        secret: What both sides must know.
        ticket: That of the lane; None: the connection is the first one of a channel.
    """

    def __init__(self, secret: bytes, ticket: bytes | None = None) -> None:
        super().__init__(secret)
        self._ticket = ticket
        self._server: bytes | None = None

    def start(self) -> bytes:
        """Return the first bytes to send."""
        return self._greeting()

    def _expected(self) -> int:
        return _GREETING_BYTES if self._server is None else 1 + _PROOF_BYTES

    def feed(self, data: bytes) -> bytes:
        """Accept at most ``wanted`` bytes. Raises ``AuthenticationError``."""
        self._input += data
        if self.wanted:
            return b""
        if self._server is None:
            if self._input == ServerHandshake.wants_tls:
                raise AuthenticationError(
                    "the other side takes TLS only: pass Options(security=Security(tls=...)) on this side"
                )
            self._server = self._check_greeting()
            self._input.clear()
            return _proof(self._secret, b"client", self._nonce, self._server, self._ticket)
        if self._input[:1] != _ACCEPTED:
            raise AuthenticationError(
                "the other side refused the connection: its cluster secret differs; use the same secret on both"
            )
        expected = _proof(self._secret, b"server", self._nonce, self._server, self._ticket)
        if not hmac.compare_digest(self._input[1:], expected):
            raise AuthenticationError("the other side does not know the cluster secret")
        self.done = True
        return b""
