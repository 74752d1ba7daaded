"""Backhaul: distributed autograd for PyTorch.

Workers call each other's functions with tensors; see ``init``, ``launch`` and ``cluster`` for how they start, and
``rpc_sync`` and ``rpc_async`` for calls. Calls are part of the autograd graph: ``loss.backward()`` runs over all
workers. ``nn.split`` puts modules of a model on workers.

The public names are listed in ``_public``. The first use of one, or the first worker that starts, imports all parts. So
``import backhaul`` adds little to the import of torch. In the process of the command ``backhaul`` it does not import
torch either: ``backhaul --help`` does not wait for it, and ``backhaul doctor`` also runs where it cannot be imported.
"""

import importlib as _importlib
import os as _os
import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING

from backhaul._rpc.before_nodes import before_nodes as _before_nodes

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


if not _is_command():
    from backhaul import _torch_support as _torch_support  # checks the torch that all parts use

if _TYPE_CHECKING:
    from backhaul._public import *  # noqa: F403
    from backhaul._public import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        if name.startswith("_") and name != "__all__":  # what the import system asks for
            raise AttributeError(f"module 'backhaul' has no attribute {name!r}")
        _import_all()
        try:
            return globals()[name]
        except KeyError:
            raise AttributeError(f"module 'backhaul' has no attribute {name!r}") from None

    def __dir__() -> list[str]:
        _import_all()
        return sorted(globals())


def _import_all() -> None:
    """Import all parts, and make the public names attributes of this module: compiled code looks for them there.

    All threads begin with the same module, so none waits for another that waits for it.
    """
    if "__all__" not in globals():
        public = _importlib.import_module("backhaul._public")  # without ``__all__`` while this thread is importing it
        globals().update({name: getattr(public, name) for name in public.__all__}, __all__=public.__all__)


_before_nodes.append(_import_all)
