"""Calls, gradients and references inside TorchScript.

With this imported once, before functions are scripted, ``rpc_sync``, ``rpc_async``, ``remote``, ``backward``,
``get_gradients`` and ``RRef[T]`` mean in script what they mean in Python. See ``docs/torchscript.md``.
"""

from __future__ import annotations

import torch

from backhaul._torch_support import require
from backhaul.errors import UnsupportedTorchError

_ADVICE = "backhaul.jit is for calls inside TorchScript; the rest of backhaul works without it"

if not hasattr(torch.jit, "script"):
    raise ImportError(f"torch {torch.__version__} has no TorchScript (torch.jit.script) here: {_ADVICE}")

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
        f"the TorchScript of torch {torch.__version__} is not one known here ({error}): {_ADVICE}"
    ) from error

__all__ = ["install", "remote_module", "uninstall"]
