"""Dates of certificates: expired, and not valid yet."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from backhaul._command.certificate_checks import check_certificate
from backhaul._transport.sockets.certificates import key_as_pem, make_key, sign_authority, sign_worker

DAY = datetime.timedelta(days=1)


@pytest.mark.parametrize(("begin", "end"), [(-3, -1), (1, 3)])
def test_dates(tmp_path: Path, begin: int, end: int) -> None:
    now = datetime.datetime.now(datetime.UTC)
    signer, key = make_key(), make_key()
    authority = sign_authority(signer, "test", (now - 5 * DAY, now + 50 * DAY))
    worker = sign_worker(signer, authority, key.public_key(), "w", (now + begin * DAY, now + end * DAY))
    for name, certificate in (("authority", authority), ("w", worker)):
        (tmp_path / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (tmp_path / "w.key").write_bytes(key_as_pem(key))
    (tmp_path / "w.key").chmod(0o600)
    found = check_certificate(tmp_path / "w.pem", tmp_path / "w.key", tmp_path / "authority.pem", "w")
    assert [(each.topic, each.level) for each in found if each.level != "good"] == [("dates", "wrong")]
