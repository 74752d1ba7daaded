"""Certificates: those that each worker makes from the cluster secret, so that nothing is exchanged, and the parts of
which ``backhaul certs`` makes others.

Everybody who knows the secret can compute the key of the cluster's authority, and sign a certificate with it. So a
worker that comes later, or again, needs nothing but the secret. Private keys are made where they are used and never
leave that process.

[Note: guessing] A server shows its certificate before the client has proven anything, so everybody who can connect gets
a signature with which to try secrets. ``scrypt`` makes each try expensive, and ``check_strength`` refuses secrets that
are short.

[Note: time] The certificates are valid at any time. They end with the process, since their keys do. A time limit would
protect nothing and would fail on hosts whose clocks are wrong.
"""

from __future__ import annotations

import datetime
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

Times = tuple[datetime.datetime, datetime.datetime]
"""From when to when a certificate is valid, in UTC."""

MIN_SECRET_BYTES = 16
_MIN_DIFFERENT_BYTES = 6

# Each try of a secret takes 32 MiB and tens of milliseconds. Changing these is a new version of the protocol.
_SALT = b"backhaul/authority/1"
_COST, _BLOCK = 1 << 15, 8
_KEY_BYTES = 48  # half as long again as the key, so that all keys are equally probable

_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of the group of the curve P-256
_BEGIN, _END = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31, 23, 59, 59)  # "no expiration" in RFC 5280


@dataclass(frozen=True, slots=True)
class Issued:
    """A new private key with its certificate, and the authority that signed it. All are PEM."""

    key: bytes
    certificate: bytes
    authority: bytes

    def __repr__(self) -> str:
        return "Issued(...)"


def check_strength(secret: bytes) -> None:
    """Raise ``ValueError`` if a secret is too short to make keys from. A long secret may still be easy to guess.

    >>> check_strength(b"0123456789abcdef")
    """
    if len(secret) < MIN_SECRET_BYTES or len(set(secret)) < _MIN_DIFFERENT_BYTES:
        raise ValueError(
            f"the cluster secret is too easy to guess for use between hosts: it needs {MIN_SECRET_BYTES} characters or "
            f"more, of which {_MIN_DIFFERENT_BYTES} differ; make one with: {HOW_TO_MAKE_A_SECRET}"
        )


HOW_TO_MAKE_A_SECRET = "python3 -c 'import secrets; print(secrets.token_hex(32))'"


def issue(secret: bytes, name: str) -> Issued:
    """Make a certificate for the worker of that name, signed by the authority of everybody who knows the secret.

    Takes tens of milliseconds. Whoever knows the secret can make a certificate of any name.
    """
    # Imported here and below: it takes 0.1 s, and most programs stay on one host.
    from cryptography.hazmat.primitives import serialization

    signer, key = _authority_key(secret), make_key()
    times = (_BEGIN, _END)
    authority = sign_authority(signer, _AUTHORITY, times)
    certificate = sign_worker(signer, authority, key.public_key(), name, times)
    pem = serialization.Encoding.PEM
    return Issued(key_as_pem(key), certificate.public_bytes(pem), authority.public_bytes(pem))


def make_key() -> ec.EllipticCurvePrivateKey:
    """A new private key."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def key_as_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key, not encrypted."""
    from cryptography.hazmat.primitives import serialization

    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


def sign_authority(signer: ec.EllipticCurvePrivateKey, name: str, times: Times) -> x509.Certificate:
    """The certificate of an authority, signed by itself. It may sign workers, and no other authority."""
    from cryptography import x509

    public = signer.public_key()
    subject = _common_name(name)
    return _sign(
        signer,
        subject,
        public,
        subject,
        times,
        x509.BasicConstraints(ca=True, path_length=0),
        x509.SubjectKeyIdentifier.from_public_key(public),
        _usage(digital_signature=False, key_cert_sign=True),
    )


def sign_worker(
    signer: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    holder: ec.EllipticCurvePublicKey,
    name: str,
    times: Times,
) -> x509.Certificate:
    """The certificate of the worker of that name, for both sides of a connection."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    return _sign(
        signer,
        authority.subject,
        holder,
        _common_name(
            "backhaul worker"
        ),  # a common name has at most 64 characters, and the name of a worker may have more
        times,
        x509.BasicConstraints(ca=False, path_length=None),
        x509.SubjectAlternativeName([x509.DNSName(name)]),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
        x509.SubjectKeyIdentifier.from_public_key(holder),
        _usage(digital_signature=True, key_cert_sign=False),
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
    )


def _common_name(text: str) -> x509.Name:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _sign(
    signer: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    holder: ec.EllipticCurvePublicKey,
    subject: x509.Name,
    times: Times,
    *extensions: x509.ExtensionType,
) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(holder)
        .serial_number(x509.random_serial_number())
        .not_valid_before(times[0])
        .not_valid_after(times[1])
    )
    for extension in extensions:
        critical = isinstance(extension, x509.BasicConstraints | x509.KeyUsage)
        made = made.add_extension(extension, critical=critical)
    return made.sign(signer, hashes.SHA256())


def _usage(*, digital_signature: bool, key_cert_sign: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


_AUTHORITY = "backhaul cluster"


def _authority_key(secret: bytes) -> ec.EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    stretched = hashlib.scrypt(secret, salt=_SALT, n=_COST, r=_BLOCK, p=1, maxmem=1 << 26, dklen=_KEY_BYTES)
    return ec.derive_private_key(int.from_bytes(stretched, "big") % (_ORDER - 1) + 1, ec.SECP256R1())
