"""``python -m tools.release``: builds and checks a release, and prints what it has made."""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

from backhaul import __version__
from tools.release.bill_of_materials import describe_release
from tools.release.distributions import ROOT, build, find_epoch

CHECK_SECONDS = 120


def main() -> int:
    """Make the release."""
    parser = argparse.ArgumentParser(prog="make dist", description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "dist", help="where the files go (default: dist)")
    parser.add_argument("--tag", help="the tag of the release; it must be that of the version")
    arguments = parser.parse_args()
    if arguments.tag not in {None, f"v{__version__}"}:
        parser.error(f"the tag of version {__version__} is v{__version__}, not {arguments.tag}")
    epoch = find_epoch()
    files = build(arguments.folder, epoch)
    subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *map(str, files)], timeout=CHECK_SECONDS, check=True
    )
    bill = arguments.folder / f"backhaul-{__version__}.cdx.json"
    bill.write_text(describe_release("backhaul", {path.name: path for path in files}, epoch), encoding="utf-8")
    for path in (*files, bill):
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}  {path.stat().st_size:,} bytes")
    return 0


sys.exit(main())
