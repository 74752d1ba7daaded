"""How a worker proves that it has left, also to members that it could not tell itself.

The record of a worker holds a *seal*: the hash of a secret that only the worker's process knows. A worker that leaves
tells the secret; the secret is the *proof* that it has left. Any worker that has the record can check the proof, and
nobody else could have made it. So a member that was cut off learns from any other member who has left, and needs to
trust none of them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

_KEY = secrets.token_bytes(32)  # of this process; the secrets of its workers are derived from it
_HEX_DIGITS = 32  # in a secret and in a seal


def secret_of(incarnation: str) -> str:
    """The secret of a worker of this process."""
    return hmac.digest(_KEY, incarnation.encode(), hashlib.sha256).hex()[:_HEX_DIGITS]


def seal_of(secret: str) -> str:
    """The seal in the record of the worker that has this secret."""
    return hashlib.sha256(b"backhaul/left/" + secret.encode("utf-8", "surrogatepass")).hexdigest()[:_HEX_DIGITS]
