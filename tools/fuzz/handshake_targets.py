"""Fuzz targets that read handshakes."""

from __future__ import annotations

import secrets
from typing import Any

from backhaul._transport.sockets import handshake
from backhaul._transport.sockets.handshake import ClientHandshake, ServerHandshake
from backhaul.errors import AuthenticationError
from tools.fuzz.target import FindingError, Target

_SECRET = b"nobody outside knows it"


class _FixedNonces:
    """Replaces random nonces with a fixed one, so that an input always has the same effect."""

    def __enter__(self) -> None:
        self._token = secrets.token_bytes
        handshake.secrets.token_bytes = lambda _=32: bytes(32)  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        handshake.secrets.token_bytes = self._token  # type: ignore[attr-defined]


class ServerTarget(Target):
    """The server side of the handshake. No mutated input may count as a proof."""

    name = "server"
    expected = (AuthenticationError,)
    _side: type[ServerHandshake] | type[ClientHandshake] = ServerHandshake

    def _honest(self) -> bytes:
        """What the other side sends if it knows the secret."""
        with _FixedNonces():
            client, server = ClientHandshake(_SECRET), ServerHandshake(_SECRET)
            first = client.start()
            greeting = server.feed(first)
            proof = client.feed(greeting)
            verdict = server.feed(proof)
        return first + proof if self._side is ServerHandshake else greeting + verdict

    def seeds(self) -> list[bytes]:
        honest = self._honest()
        return [honest, honest[:41] + bytes(40), honest + b"BkHl\1" + bytes(40)]

    def take(self, data: bytes) -> object:
        side: Any = self._side.__new__(self._side)
        with _FixedNonces():
            side.__init__(_SECRET)
        said, at = b"", 0
        while not side.done and at < len(data):
            wanted = side.wanted
            if not 0 < wanted <= 64:
                raise FindingError(f"the handshake asks for {wanted} bytes")
            piece = data[at : at + min(wanted, 1 + (data[at] & 63))]
            at += len(piece)
            said += side.feed(piece)
        if side.done and data[:at] != self._valid():
            raise FindingError(f"the handshake accepted {data[:at].hex()}")
        if side.done:
            return at  # the bytes after this are frames; no earlier byte was read as part of a frame
        return None

    def _valid(self) -> bytes:
        if not hasattr(self, "_known"):
            self._known = self._honest()
        return self._known


class ClientTarget(ServerTarget):
    """The client side of the handshake."""

    name = "client"
    _side = ClientHandshake
