"""Certificates in files, as users make them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import backhaul as bh
from backhaul._transport.sockets.certificates import issue


def make_certificates(folder: Path, names: Sequence[str], authority: bytes = b"some authority") -> None:
    """Make a certificate for each name, by rank."""
    for rank, name in enumerate(names):
        made, files = issue(authority, name), files_of(folder, rank)
        Path(files.certificate).write_bytes(made.certificate)
        Path(files.key).write_bytes(made.key)
        Path(files.authority).write_bytes(made.authority)


def files_of(folder: Path, rank: int, *, names: bool = True) -> bh.Tls:
    """The files of one rank."""
    return bh.Tls(
        certificate=folder / f"{rank}.pem", key=folder / f"{rank}.key", authority=folder / "authority.pem", names=names
    )
