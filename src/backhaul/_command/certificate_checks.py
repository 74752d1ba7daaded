"""Reads certificates, and says whether a worker can use them. Writes nothing."""

from __future__ import annotations

import datetime
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backhaul._command.findings import Finding

if TYPE_CHECKING:
    from cryptography import x509

_SOON = datetime.timedelta(days=14)


def _good(topic: str, text: str) -> Finding:
    return Finding(topic, "good", text)


def _wrong(topic: str, text: str, fix: str) -> Finding:
    return Finding(topic, "wrong", text, fix)


def describe(path: Path) -> list[dict[str, Any]]:
    """What is in the certificates of a file. Raises ``ValueError`` if there are none."""
    from cryptography.hazmat.primitives import hashes

    return [
        {
            "subject": each.subject.rfc4514_string(),
            "signed_by": each.issuer.rfc4514_string(),
            "worker_names": _names_of(each),
            "is_authority": "yes" if _is_authority(each) else "no",
            "valid_from": each.not_valid_before_utc.isoformat(" ", "minutes"),
            "valid_until": each.not_valid_after_utc.isoformat(" ", "minutes"),
            "sha256": each.fingerprint(hashes.SHA256()).hex(),
        }
        for each in _load(path)
    ]


def check_certificate(path: Path, key: Path, authority: Path, name: str) -> list[Finding]:
    """Check the files of one worker. Raises ``ValueError`` or ``OSError`` if one cannot be read."""
    certificate, roots = _load(path)[0], _load(authority)
    return [
        _check_key(path, key),
        *_check_permissions(key),
        _check_signature(certificate, _load(path)[1:] + roots, authority),
        *_check_times(certificate, path),
        *(each for root in roots for each in _check_times(root, authority)),
        _check_name(certificate, name),
        _check_usage(certificate),
    ]


def _load(path: Path) -> list[x509.Certificate]:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} has no certificate in PEM: {error}") from error


def _names_of(certificate: x509.Certificate) -> list[str]:
    from cryptography import x509

    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return found.value.get_values_for_type(x509.DNSName)


def _is_authority(certificate: x509.Certificate) -> bool:
    from cryptography import x509

    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def _check_key(path: Path, key: Path) -> Finding:
    """OpenSSL compares them, as it does for a worker."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(path, key, password="")
    except FileNotFoundError:
        return _wrong("key", f"there is no key {key}", "name it with --key")
    except OSError as error:  # ssl.SSLError is one
        return _wrong("key", f"{key} is not the key of {path}: {error}", "use the two files that were made together")
    return _good("key", f"{key} is the key of {path}")


def _check_permissions(key: Path) -> Iterator[Finding]:
    if key.exists():
        if key.stat().st_mode & 0o077:
            yield _wrong("key", f"other users can read or change {key}", f"chmod 600 {key}")
        else:
            yield _good("key", f"no other user can read {key}")


def _check_signature(certificate: x509.Certificate, signers: list[x509.Certificate], authority: Path) -> Finding:
    for signer in signers:
        try:
            certificate.verify_directly_issued_by(signer)
        except Exception:  # cryptography has several errors for this, and all mean no
            continue
        if not _is_authority(signer):
            return _wrong(
                "authority", f"{authority} may not sign: it is no authority", "give the certificate of an authority"
            )
        return _good("authority", f"{authority} has signed it")
    return _wrong(
        "authority",
        f"{authority} has not signed it",
        "give each worker the authority.pem that was made with its certificate",
    )


def _check_times(certificate: x509.Certificate, path: Path) -> Iterator[Finding]:
    now, end = datetime.datetime.now(datetime.UTC), certificate.not_valid_after_utc
    if now < certificate.not_valid_before_utc:
        yield _wrong(
            "dates",
            f"{path} is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC; this host says that it is "
            f"{now:%Y-%m-%d %H:%M}",
            "set the clock of this host",
        )
    elif now >= end - _SOON:
        fix = "make a new one with `backhaul certs make`; a new authority needs another --folder"
        if now >= end:
            yield _wrong("dates", f"{path} has expired on {end:%Y-%m-%d}", fix)
        else:
            yield Finding("dates", "note", f"{path} expires soon, on {end:%Y-%m-%d}", fix)
    else:
        yield _good("dates", f"{path} is valid until {end:%Y-%m-%d}")


def _check_name(certificate: x509.Certificate, name: str) -> Finding:
    names = _names_of(certificate)
    if name in names:
        return _good("name", f"it is for the worker {name}")
    return _wrong(
        "name",
        f"it is for {', '.join(names) or 'no name'}, not for {name}",
        "give the name of the worker with --name, or use Tls(..., names=False) if no worker has its own certificate",
    )


def _check_usage(certificate: x509.Certificate) -> Finding:
    """A worker is the server of some connections and the client of others."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    try:
        allowed = set(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except x509.ExtensionNotFound:
        return _good("use", "it may be used for both sides of a connection")
    if {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH} <= allowed:
        return _good("use", "it may be used for both sides of a connection")
    return _wrong("use", "it may be used for one side of a connection only", "allow serverAuth and clientAuth")
