"""The native core: the straight line of a message in C++, with the same bytes as its Python twins in ``_wire``.

``core`` is the compiled module, or None: then Python does all of the work. Every function of the core returns None for
what it does not handle, and Python goes on. The core knows no threads, sockets, locks or policy. ``build`` compiles it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import os
from typing import Any

from backhaul._native.build import library_path

log = logging.getLogger("backhaul")

SWITCH = "BACKHAUL_NATIVE"
"""The environment variable that turns the core off if it is ``0``."""

NAME = "backhaul_core"


def _load() -> Any:
    if os.environ.get(SWITCH) == "0":
        return None
    path = library_path()
    if not path.exists():
        return None
    try:
        loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
        spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except Exception as error:
        log.warning("the native core %s cannot be loaded, so Backhaul runs without it: %s", path, error)
        return None
    return module


core: Any = _load()
