"""Names the program that this process runs, so that workers know whether they share a ``__main__``."""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
from pathlib import Path

_PROCESS_TOKEN = secrets.token_hex(8)  # used with the process id, because a fork copies the token


def main_identity() -> str:
    """The hash of the program's text, or where there is no file (REPL, notebook) a name of the process. All workers of
    one process share their ``__main__``.
    """
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        if path:
            return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        pass
    return f"{_PROCESS_TOKEN}-{os.getpid()}"
