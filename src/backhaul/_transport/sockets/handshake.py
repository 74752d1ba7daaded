"""Who may speak: both sides of a new connection prove that they know the cluster secret, before anything else
that they send is looked at. Pure: bytes in, bytes out.

    client -> server   magic, version, client nonce
    server -> client   magic, version, server nonce
    client -> server   proof of the client
    server -> client   verdict, proof of the server

A proof is an HMAC-SHA-256 over the role and both nonces, so that none can be replayed or sent back. The client proves
first: a stranger who connects gets nothing to try secrets against.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from backhaul.errors import AuthenticationError

MAGIC = b"BACKHAUL"
VERSION = 1
_GREETING = len(MAGIC) + 1 + 32
_PROOF = 32
_ACCEPTED, _REFUSED = b"\x01", b"\x00"


def _proof(secret: bytes, role: bytes, client: bytes, server: bytes) -> bytes:
    return hmac.digest(secret, b"backhaul/1/" + role + b"/" + client + server, hashlib.sha256)


class _Side:
    """What both sides share: collecting input until a fixed-size piece is there."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = secrets.token_bytes(32)
        self._input = bytearray()
        self.done = False

    @property
    def wanted(self) -> int:
        """How many more bytes to read, never one too many: what follows belongs to the frames."""
        return self._expected() - len(self._input)

    def _expected(self) -> int:
        raise NotImplementedError

    def _greeting(self) -> bytes:
        return MAGIC + bytes([VERSION]) + self._nonce

    def _check_greeting(self) -> bytes:
        if self._input[:2] == b"\x16\x03":
            raise AuthenticationError("the other side speaks TLS, but this port is without: Options(tls=...) differ")
        if self._input[: len(MAGIC)] != MAGIC:
            raise AuthenticationError("the other side does not speak Backhaul")
        if self._input[len(MAGIC)] != VERSION:
            raise AuthenticationError(
                f"the other side shakes hands in version {self._input[len(MAGIC)]}, this one in {VERSION}"
            )
        return bytes(self._input[len(MAGIC) + 1 :])


class ServerHandshake(_Side):
    """The accepting side. Feed it what arrives; send what it returns."""

    def __init__(self, secret: bytes) -> None:
        super().__init__(secret)
        self._client: bytes | None = None

    def _expected(self) -> int:
        return _GREETING if self._client is None else _PROOF

    def feed(self, data: bytes) -> bytes:
        """Take in at most ``wanted`` bytes. Raises ``AuthenticationError``; send ``last_word`` then, and close."""
        self._input += data
        if self.wanted:
            return b""
        if self._client is None:
            self._client = self._check_greeting()
            self._input.clear()
            return self._greeting()
        if not hmac.compare_digest(self._input, _proof(self._secret, b"client", self._client, self._nonce)):
            raise AuthenticationError("the other side does not know the cluster secret")
        self.done = True
        return _ACCEPTED + _proof(self._secret, b"server", self._client, self._nonce)

    refusal = _REFUSED + bytes(_PROOF)

    @property
    def last_word(self) -> bytes:
        """What to send before closing. A client of another version waits for a greeting, which tells it ours."""
        other_version = self._client is None and self._input.startswith(MAGIC)
        return self._greeting() if other_version else self.refusal

    wants_tls = MAGIC + b"\0" + b"TLS".ljust(32, b"\0")
    """What to send instead of all else to a client that should have begun with TLS."""


class ClientHandshake(_Side):
    """The connecting side. Send ``start()``, then as the server."""

    def __init__(self, secret: bytes) -> None:
        super().__init__(secret)
        self._server: bytes | None = None

    def start(self) -> bytes:
        """The first bytes to send."""
        return self._greeting()

    def _expected(self) -> int:
        return _GREETING if self._server is None else 1 + _PROOF

    def feed(self, data: bytes) -> bytes:
        """Take in at most ``wanted`` bytes. Raises ``AuthenticationError``."""
        self._input += data
        if self.wanted:
            return b""
        if self._server is None:
            if self._input == ServerHandshake.wants_tls:
                raise AuthenticationError("the other side takes TLS only: give this one Options(tls=...)")
            self._server = self._check_greeting()
            self._input.clear()
            return _proof(self._secret, b"client", self._nonce, self._server)
        if self._input[:1] != _ACCEPTED:
            raise AuthenticationError("the other side refused this one: their cluster secrets differ")
        if not hmac.compare_digest(self._input[1:], _proof(self._secret, b"server", self._nonce, self._server)):
            raise AuthenticationError("the other side does not know the cluster secret")
        self.done = True
        return b""
