"""Calls, gradients and references inside TorchScript.

Import this module once, before functions are scripted. Then ``rpc_sync``, ``rpc_async``, ``remote``, ``backward``,
``get_gradients`` and ``RRef[T]`` mean the same in script as in Python. See ``docs/torchscript.md``.
"""

from __future__ import annotations

import torch

from backhaul._torch_support import require
from backhaul.errors import UnsupportedTorchError

_ADVICE = "only calls inside TorchScript need backhaul.jit; the rest of backhaul works without it"

if not hasattr(torch.jit, "script"):
    raise ImportError(f"torch {torch.__version__} has no TorchScript (torch.jit.script): {_ADVICE}")

try:
    require("backhaul.jit")
    from backhaul.jit.installation import install, uninstall
    from backhaul.jit.modules import remote_module

    install()
except UnsupportedTorchError as error:
    error.add_note(_ADVICE)
    raise
except (AttributeError, ImportError) as error:
    raise ImportError(
        f"backhaul.jit does not support the TorchScript of torch {torch.__version__} ({error}): {_ADVICE}"
    ) from error

__all__ = ["install", "remote_module", "uninstall"]
