"""Patches that the process needs only while it has a worker. Knows neither workers nor patches.

A room that patches torch or the interpreter registers ``install`` and ``uninstall`` here. ``_worker`` calls ``begin``
when the first worker starts and ``end`` when the last one has ended. So ``import backhaul`` patches nothing.
"""

from __future__ import annotations

from collections.abc import Callable

_patches: list[tuple[Callable[[], None], Callable[[], None]]] = []
_begun = False


def while_workers_run(install: Callable[[], None], uninstall: Callable[[], None]) -> None:
    """Call ``install`` when the first worker starts and ``uninstall`` when the last has ended. Call it at import."""
    _patches.append((install, uninstall))
    if _begun:
        install()


def begin() -> None:
    """A worker starts. The caller holds the lock of the table of workers, here and in ``end``."""
    global _begun
    if not _begun:
        _begun = True
        for install, _ in _patches:
            install()


def end() -> None:
    """The last worker has ended."""
    global _begun
    if _begun:
        _begun = False
        for _, uninstall in reversed(_patches):
            uninstall()
