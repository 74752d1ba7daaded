"""Certificates for the workers of one launch. An authority signs one for each worker; its key is then deleted.

Python's ``ssl`` cannot make certificates. The ``cryptography`` package (extra ``tls``) makes them, or else the
``openssl`` command.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from backhaul._options import Tls

_VALID_DAYS = 365  # workers that run long reconnect with the same certificate


def files_of(folder: Path, rank: int) -> Tls:
    """Return the files that ``make_certificates`` has made for the worker of that rank."""
    return Tls(
        certificate=folder / f"{rank}.pem", key=folder / f"{rank}.key", authority=folder / "authority.pem", names=True
    )


def make_certificates(folder: Path, names: Sequence[str]) -> None:
    """Make a certificate for each worker, by rank, with the worker's name as subject alternative name.

    Once this returns, the authority's key is deleted: no further certificate can be made.

    Raises:
        RuntimeError: Neither the ``cryptography`` package nor the ``openssl`` command is installed.
    """
    if importlib.util.find_spec("cryptography") is not None:
        _with_cryptography(folder, names)
    elif (command := shutil.which("openssl")) is not None:
        _with_openssl(command, folder, names)
    else:
        raise RuntimeError(
            "tls='auto' cannot make certificates: install the 'cryptography' package (pip install 'backhaul[tls]') or "
            "the openssl command, or pass your own certificates with Options(security=Security(tls=Tls(...)))"
        )


def _private(path: Path, data: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def _with_cryptography(folder: Path, names: Sequence[str]) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    pem = serialization.Encoding.PEM
    now = datetime.datetime.now(datetime.UTC)

    def called(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])

    def describe(subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(authority)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=_VALID_DAYS))
        )

    authority = called("backhaul launch")
    signer = ec.generate_private_key(ec.SECP256R1())
    own = describe(authority, signer.public_key())
    own = own.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    own = own.add_extension(x509.SubjectKeyIdentifier.from_public_key(signer.public_key()), critical=False)
    (folder / "authority.pem").write_bytes(own.sign(signer, hashes.SHA256()).public_bytes(pem))
    for rank, name in enumerate(names):
        key = ec.generate_private_key(ec.SECP256R1())
        made = describe(called("backhaul worker"), key.public_key())
        made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        made = made.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        files = files_of(folder, rank)
        Path(files.certificate).write_bytes(made.sign(signer, hashes.SHA256()).public_bytes(pem))
        plain = serialization.NoEncryption()
        _private(Path(files.key), key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))


_CONFIGURATION = """
[req]
distinguished_name = subject
prompt = no
[subject]
CN = {subject}
[authority]
basicConstraints = critical, CA:true, pathlen:0
subjectKeyIdentifier = hash
[worker]
subjectAltName = DNS:{name}
authorityKeyIdentifier = keyid
"""


def _with_openssl(command: str, folder: Path, names: Sequence[str]) -> None:
    authority, signer = folder / "authority.pem", folder / "authority.key"
    settings, request = folder / "settings", folder / "request"
    days = ("-days", str(_VALID_DAYS))

    def run(*arguments: str | Path) -> None:
        done = subprocess.run([command, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{command} {arguments[0]} failed to make certificates: {done.stderr.strip()}")

    def make_key(path: Path) -> None:
        _private(path, b"")
        run("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path)

    try:
        make_key(signer)
        settings.write_text(_CONFIGURATION.format(subject="backhaul launch", name="none"))
        with_settings = ("-config", settings)
        run(
            "req", "-x509", "-new", *with_settings, "-extensions", "authority", "-key", signer, *days, "-out", authority
        )
        for rank, name in enumerate(names):
            files = files_of(folder, rank)
            make_key(Path(files.key))
            settings.write_text(_CONFIGURATION.format(subject="backhaul worker", name=name))
            run("req", "-new", *with_settings, "-key", files.key, "-out", request)
            number = f"0x{secrets.token_hex(16)}"
            signed = ("-CA", authority, "-CAkey", signer, "-set_serial", number, *days)
            extended = ("-extfile", settings, "-extensions", "worker")
            run("x509", "-req", "-in", request, *signed, *extended, "-out", files.certificate)
    finally:
        for path in (signer, settings, request):
            path.unlink(missing_ok=True)
