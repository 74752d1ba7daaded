"""One *leg* of a relayed connection: the part between the relay and one of its two ends. Each end opens its leg, and
proves by a one-time key that the relay awaits it. Pure: bytes in, bytes out.

    end   -> relay   magic, version, number of the leg, nonce of the end
    relay -> end     magic, version, nonce of the relay
    end   -> relay   proof of the end
    relay -> end     verdict, proof of the relay: once the other end has come too

From then on the relay passes bytes on, and the two ends begin a connection of their own: TLS and the handshake of the
secret. A proof is an HMAC-SHA-256 with the key of the leg over the role and both nonces. The end and the relay know the
key from a channel on which each has proven itself as a member. The cluster secret is not used: a leg is not encrypted,
and whoever sees it must not be able to try secrets.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable

import msgspec

from backhaul._transport.sockets.handshake import VERSION
from backhaul.errors import AuthenticationError

LEG_MAGIC = b"RELAYLEG"
NUMBER_BYTES = 16
KEY_BYTES = 32
_END_NONCE_BYTES, _RELAY_NONCE_BYTES, _PROOF_BYTES = 16, 32, 32
_GREETING_BYTES = len(LEG_MAGIC) + 1 + 32  # of both sides
_ACCEPTED, _REFUSED = b"\x01", b"\x00"
REFUSAL = _REFUSED + bytes(_PROOF_BYTES)


class Leg(msgspec.Struct, array_like=True, frozen=True):
    """What an end needs to open its leg.

    Attributes:
        number: Names the leg. No secret.
        key: Known to the relay and to this end, and used once.
    """

    number: bytes
    key: bytes

    def __repr__(self) -> str:
        return f"Leg({self.number.hex()})"


def new_leg() -> Leg:
    """Make a leg with a fresh key."""
    return Leg(secrets.token_bytes(NUMBER_BYTES), secrets.token_bytes(KEY_BYTES))


def begins_leg(data: bytes) -> bool:
    """Whether a connection that begins with this byte is a leg. Neither TLS nor the handshake of the secret does."""
    return data[:1] == LEG_MAGIC[:1]


def proof(key: bytes, role: bytes, end: bytes, relay: bytes) -> bytes:
    """The proof of one side: ``role`` is ``end`` or ``relay``, followed by the nonces of both."""
    return hmac.digest(key, b"backhaul/1/relayed/" + role + b"/" + end + relay, hashlib.sha256)


class RelayHandshake:
    """The relay's side. Used like ``ServerHandshake``; but the verdict is sent later, see ``verdict``.

    Attributes:
        number: The number of the leg, once it is known.

    Args:
        key_of: The key of the leg with a number; None if the relay does not await it.
    """

    last_word = REFUSAL

    def __init__(self, key_of: Callable[[bytes], bytes | None]) -> None:
        self._key_of = key_of
        self._nonce = secrets.token_bytes(_RELAY_NONCE_BYTES)
        self._end = b""
        self._key = b""
        self._input = bytearray()
        self.number = b""
        self.done = False

    @property
    def wanted(self) -> int:
        """How many more bytes to read."""
        return (_PROOF_BYTES if self.number else _GREETING_BYTES) - len(self._input)

    def feed(self, data: bytes) -> bytes:
        """Accept at most ``wanted`` bytes. Raises ``AuthenticationError``: send ``last_word`` then, and close."""
        self._input += data
        if self.wanted:
            return b""
        given, self._input = bytes(self._input), bytearray()
        if not self.number:
            return self._greet(given)
        key = self._key_of(self.number)  # None: no such leg, or it was used, or its time is over
        if key is None or not hmac.compare_digest(given, proof(key, b"end", self._end, self._nonce)):
            raise AuthenticationError("it asks for a relayed connection that this worker does not await")
        self._key, self.done = key, True
        return b""

    def _greet(self, greeting: bytes) -> bytes:
        if not greeting.startswith(LEG_MAGIC) or greeting[len(LEG_MAGIC)] != VERSION:
            raise AuthenticationError("it asks for a relayed connection in a version that this worker does not know")
        rest = greeting[len(LEG_MAGIC) + 1 :]
        self.number, self._end = rest[:NUMBER_BYTES], rest[NUMBER_BYTES:]
        return LEG_MAGIC + bytes([VERSION]) + self._nonce

    @property
    def verdict(self) -> bytes:
        """What to send once the other end has come too: from then on, bytes are passed on."""
        assert self.done
        return _ACCEPTED + proof(self._key, b"relay", self._end, self._nonce)


class LegHandshake:
    """The side of an end. Used like ``ClientHandshake``."""

    def __init__(self, leg: Leg) -> None:
        self._leg = leg
        self._nonce = secrets.token_bytes(_END_NONCE_BYTES)
        self._relay: bytes | None = None
        self._input = bytearray()
        self.done = False

    def start(self) -> bytes:
        """Return the first bytes to send."""
        return LEG_MAGIC + bytes([VERSION]) + self._leg.number + self._nonce

    @property
    def wanted(self) -> int:
        """How many more bytes to read. Reading more would take bytes of the other end."""
        return (_GREETING_BYTES if self._relay is None else 1 + _PROOF_BYTES) - len(self._input)

    def feed(self, data: bytes) -> bytes:
        """Accept at most ``wanted`` bytes. Raises ``ConnectionRefusedError``."""
        self._input += data
        if self.wanted:
            return b""
        given, self._input = bytes(self._input), bytearray()
        if self._relay is None:
            if not given.startswith(LEG_MAGIC + bytes([VERSION])):
                raise ConnectionRefusedError("there is no relay")
            self._relay = given[len(LEG_MAGIC) + 1 :]
            return proof(self._leg.key, b"end", self._nonce, self._relay)
        if not hmac.compare_digest(given, _ACCEPTED + proof(self._leg.key, b"relay", self._nonce, self._relay)):
            raise ConnectionRefusedError("the relay refused: the other end did not come, or the key is not valid")
        self.done = True
        return b""
