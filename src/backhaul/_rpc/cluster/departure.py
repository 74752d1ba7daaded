"""How a worker proves that it has left, also to members that it could not tell itself.

The record of a worker holds a *seal*, the hash of a secret that only the worker's process knows. A worker that leaves
tells the secret, which is the *proof* that it has left. Whoever has the record can check the proof, whoever passes it
on: nobody else could have made it. So a member that was cut off learns from any other member who has left, and needs to
trust none of them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

_KEY = secrets.token_bytes(32)  # of this process: the secrets of its workers are made of it
_LENGTH = 32  # hexadecimal digits of secrets and seals


def secret_of(incarnation: str) -> str:
    """The secret of a worker of this process."""
    return hmac.digest(_KEY, incarnation.encode(), hashlib.sha256).hex()[:_LENGTH]


def seal_of(secret: str) -> str:
    """What stands in the record of the worker that has this secret."""
    return hashlib.sha256(b"backhaul/left/" + secret.encode("utf-8", "surrogatepass")).hexdigest()[:_LENGTH]
