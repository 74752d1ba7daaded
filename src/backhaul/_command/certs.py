"""Make, show and check certificates for TLS between workers.

  backhaul certs make trainer table        certificates for two workers
  backhaul certs show certs/trainer.pem    what is in a certificate
  backhaul certs check certs/trainer.pem   whether a worker can use it

Workers that share a secret need no certificates: each makes its own from the secret. Certificates
of your own also keep a member of the cluster from claiming the name of another member.
"""

from __future__ import annotations

import datetime
import os
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backhaul._command.certificate_checks import check_certificate, describe
from backhaul._command.findings import report_findings
from backhaul._command.output import FINE, CommandFailure, Output
from backhaul._transport.sockets.certificates import Times, key_as_pem, make_key, sign_authority, sign_worker
from backhaul._types import check_name

if TYPE_CHECKING:
    from cryptography import x509

_AUTHORITY = "authority"  # the name of its files
_EARLIER = datetime.timedelta(minutes=5)  # clocks of hosts differ


def add_arguments(parser: ArgumentParser) -> None:
    """Three subcommands."""
    children = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    make = children.add_parser("make", help="make certificates", description="Make certificates for workers.")
    make.add_argument("names", nargs="+", metavar="NAME", help="the name of a worker")
    make.add_argument("--folder", type=Path, default=Path("certs"), help="where the files are (%(default)s)")
    make.add_argument("--days", type=int, default=365, help="how long the certificates are valid (%(default)s)")
    make.add_argument("--authority-name", default="backhaul cluster", help="of a new authority (%(default)s)")
    show = children.add_parser("show", help="show certificates", description="Show what is in certificates.")
    show.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a PEM file")
    check = children.add_parser("check", help="check a certificate", description="Check that a worker can use files.")
    check.add_argument("certificate", type=Path, help="the certificate of a worker")
    check.add_argument("--key", type=Path, help="its private key; the file ending in .key, if not given")
    check.add_argument("--authority", type=Path, help="the authority; authority.pem beside it, if not given")
    check.add_argument("--name", help="the name of the worker; that of the file, if not given")
    for child in (make, show, check):
        child.add_argument("--json", action="store_true", default=SUPPRESS, help="print JSON, for programs")


def main(given: Namespace, output: Output) -> int:
    """Make, show or check."""
    try:
        return {"make": _make, "show": _show, "check": _check}[given.action](given, output)
    except FileNotFoundError as error:
        raise CommandFailure(f"there is no file {error.filename}") from error
    except (OSError, ValueError) as error:
        raise CommandFailure(str(error)) from error


# Making.


def _make(given: Namespace, output: Output) -> int:
    for name in given.names:
        if check_name(name) == _AUTHORITY:
            raise ValueError(f"a worker cannot be called {name!r} here: the files of the authority have this name")
    if given.days < 1:
        raise ValueError(f"--days must be 1 or more, got {given.days}")
    folder: Path = given.folder
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    times = (now - _EARLIER, now + datetime.timedelta(days=given.days))
    taken = [folder / f"{name}{end}" for name in given.names for end in (".pem", ".key")]
    if there := [str(path) for path in taken if path.exists()]:
        raise ValueError(f"{', '.join(there)} exists already; remove it first, or choose another --folder")
    signer, authority, is_new = _authority(folder, given.authority_name, times)
    times = (times[0], min(times[1], authority.not_valid_after_utc))
    for name in given.names:
        _make_worker(folder, name, signer, authority, times)
    made = [
        {"name": name, "certificate": f"{folder / name}.pem", "key": f"{folder / name}.key"} for name in given.names
    ]
    data = {"authority": str(folder / f"{_AUTHORITY}.pem"), "new_authority": is_new, "workers": made}
    output.report(data, lambda: _made_text(folder, given.names, is_new, times))
    return FINE


def _authority(folder: Path, name: str, times: Times) -> tuple[Any, x509.Certificate, bool]:
    """The authority of the folder, and whether it is new."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    path = folder / f"{_AUTHORITY}.pem"
    key_path = path.with_suffix(".key")
    if path.exists() != key_path.exists():
        raise ValueError(f"{folder} has only one of {path.name} and {key_path.name}; both are needed to sign")
    if path.exists():
        signer = serialization.load_pem_private_key(key_path.read_bytes(), None)
        return signer, x509.load_pem_x509_certificate(path.read_bytes()), False
    key = make_key()
    certificate = sign_authority(key, name, times)
    _write(key_path, key_as_pem(key), 0o600)
    _write(path, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    return key, certificate, True


def _make_worker(folder: Path, name: str, signer: Any, authority: x509.Certificate, times: Times) -> None:
    from cryptography.hazmat.primitives import serialization

    key = make_key()
    certificate = sign_worker(signer, authority, key.public_key(), name, times)
    _write(folder / f"{name}.key", key_as_pem(key), 0o600)
    _write(folder / f"{name}.pem", certificate.public_bytes(serialization.Encoding.PEM), 0o644)


def _write(path: Path, data: bytes, mode: int) -> None:
    """A new file. Nobody can read a key before its permissions are set."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)


def _made_text(folder: Path, names: Sequence[str], is_new: bool, times: Times) -> str:
    from rich.markup import escape

    first = names[0]
    where = "new" if is_new else "as before"
    return "\n".join(
        [
            f"In [bold]{escape(str(folder))}[/], valid until {times[1]:%Y-%m-%d}:",
            f"  authority.pem   the authority ({where}): every worker gets it",
            "  authority.key   signs for new workers: [bold]keep it away from the workers[/]",
            *(f"  {name}.pem, {name}.key   only worker {name} gets them" for name in names),
            "",
            f"In the program of {first}:",
            f'  tls = bh.Tls(certificate="{first}.pem", key="{first}.key", authority="authority.pem")',
            f'  bh.init("{first}", options=bh.Options(security=bh.Security(tls=tls)))',
        ]
    )


# Showing and checking.


def _show(given: Namespace, output: Output) -> int:
    found = [{"file": str(path), **each} for path in given.files for each in describe(path)]
    output.report(found, lambda: "\n\n".join(_shown(each) for each in found))
    return FINE


def _shown(found: dict[str, Any]) -> str:
    from rich.markup import escape

    rows = [f"[bold]{escape(found['file'])}[/]"]
    for name, value in found.items():
        if name != "file":
            text = ", ".join(value) if isinstance(value, list) else value
            rows.append(f"  {name.replace('_', ' '):<14} {escape(text)}")
    return "\n".join(rows)


def _check(given: Namespace, output: Output) -> int:
    certificate: Path = given.certificate
    key = given.key or certificate.with_suffix(".key")
    authority = given.authority or certificate.with_name(f"{_AUTHORITY}.pem")
    return report_findings(check_certificate(certificate, key, authority, given.name or certificate.stem), output)
