"""Backhaul: distributed autograd for PyTorch.

Workers call each other's functions with tensors; see ``init``, ``launch`` and ``cluster`` for how they start, and
``rpc_sync`` and ``rpc_async`` for calls. Calls are part of the autograd graph: ``loss.backward()`` runs over all
workers. ``nn.split`` puts modules of a model on workers.

The public names are listed in ``_public``. The process of the command ``backhaul`` imports them when it first uses one:
``backhaul --help`` does not wait for torch, and ``backhaul doctor`` also runs where torch cannot be imported.
"""

import os as _os
import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING

__version__ = "0.1.0"


def _is_command() -> bool:
    """Whether this process is the command: ``backhaul ...``, ``python -m backhaul ...``, or a part of ``run``. A child
    that multiprocessing has started is none, though it has the arguments of its parent.
    """
    program, given = next(iter(getattr(_sys, "argv", ())), ""), _sys.orig_argv
    if program == "-m":  # Python is looking for the module that it shall run
        module = given[given.index("-m") + 1] if "-m" in given else ""
        return module == "backhaul" or module.startswith("backhaul._command.")
    return _os.path.basename(program) == "backhaul" and program in given


if _TYPE_CHECKING or not _is_command():
    from backhaul._public import *  # noqa: F403
    from backhaul._public import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        if name.startswith("__") and name != "__all__":  # what the import system asks for
            raise AttributeError(f"module 'backhaul' has no attribute {name!r}")
        this = globals().pop("__getattr__")  # the import below looks for modules of the package as attributes
        try:
            from backhaul import _public
        except BaseException:
            globals()["__getattr__"] = this
            raise
        globals().update({each: getattr(_public, each) for each in _public.__all__}, __all__=_public.__all__)
        if name not in globals():
            raise AttributeError(f"module 'backhaul' has no attribute {name!r}")
        return globals()[name]
