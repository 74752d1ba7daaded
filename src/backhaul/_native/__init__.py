"""The native core: the straight line of a message in C++, with the same bytes as its twins in Python.

``core`` is the compiled module, or None: then Python does all of the work. For what a function of the core does not
handle, it calls its twin in Python or returns None. The core starts no threads, takes no locks and uses no sockets,
except that it polls descriptors while a thread spins. ``build`` compiles it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import os
import threading
from pathlib import Path
from typing import Any

import torch  # noqa: F401 (the core is linked to its libraries, which this loads)

from backhaul._native import build

log = logging.getLogger("backhaul")

NAME = "backhaul_core"

_said = threading.Lock()  # held for good once ``compile_later`` was called


def _load() -> Any:
    choice = os.environ.get(build.SWITCH, "")
    if choice == "0":
        return None
    try:
        path = Path(choice) if os.sep in choice else build.library_path()
        if not path.exists():
            return None
        module = _load_from(path, trusted=os.sep in choice)
    except Exception as error:
        log.warning(
            "the native core of Backhaul cannot be loaded, so Backhaul runs without it: %s. If the file is broken, "
            "remove it: it is compiled again",
            error,
        )
        return None
    return module


def _load_from(path: Path, *, trusted: bool = False) -> Any:
    if not (trusted or build.is_own(path)):
        raise PermissionError(f"other users can write to {path} or to its folder; take that permission away")
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    build.note_use(path)
    return module


def check() -> str | None:
    """Why the library that is compiled cannot be loaded, and what to do; None if it can be, or if there is none."""
    path = build.library_path()
    if not path.exists():
        return None
    try:
        _load_from(path)
    except Exception as error:
        return (
            f"The native core at {path} cannot be loaded: {error}. If the file is broken, remove it and run this again."
        )
    return None


def compile_later() -> None:
    """Start to compile the core in the background, for the next start of a program, if it is neither there nor turned
    off. Logs one line for each process. Called when a worker starts.
    """
    if core is not None or os.environ.get(build.SWITCH) == "0" or not _said.acquire(blocking=False):
        return
    try:
        path = build.library_path()
        if path.exists():
            return  # it cannot be loaded, or was compiled meanwhile
        failed = path.with_suffix(".failed")
        if build.command(path) is None:
            log.info(build.NO_COMPILER)
        elif failed.exists():
            log.info(failed.read_text())
        else:
            log.info("Backhaul compiles its native core in the background, for the next start: %s", path)
            build.build_later()
    except Exception as error:
        log.info("Backhaul runs without its native core: %s", error)


core: Any = _load()
