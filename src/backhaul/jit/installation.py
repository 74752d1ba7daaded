"""Adds Backhaul to torch's compiler, and removes it."""

from __future__ import annotations

import atexit
import functools
import threading

from backhaul._autograd.api import backward, context, get_gradients
from backhaul._rpc.api import rpc_async, rpc_sync
from backhaul._rpc.before_nodes import prepare
from backhaul._rref.remote import remote
from backhaul.jit import current_worker, torch_compiler
from backhaul.jit.names import Api
from backhaul.jit.operators import api_names
from backhaul.jit.references import classes
from backhaul.jit.rewriting import rewrite

_lock = threading.Lock()  # guards _patches and api_names
_patches: torch_compiler.Patches | None = None

NATIVE = Api(
    "backhaul",
    rpc_sync,
    rpc_async,
    remote,
    rpc_async,
    ((backward, "backhaul::dist_backward"), (get_gradients, "backhaul::get_gradients")),
    (context,),
)


def install() -> None:
    """Let functions that are scripted from now on make Backhaul's calls. Importing ``backhaul.jit`` does this.

    Example:
        >>> import backhaul.jit  # installs
        >>> backhaul.jit.install()  # does nothing a second time
    """
    global _patches
    prepare()  # the compiler looks for the functions among the attributes of ``backhaul``
    with _lock:
        if _patches is None:
            _patches = torch_compiler.Patches(
                replace_names=api_names.replace,
                type_of_annotation=classes.type_of_annotation,
                infer_type=classes.infer_type,
                on_compiled=functools.partial(rewrite, api_names=api_names),
            )
            current_worker.install()
            for api in api_names.apis.values():
                _set_operators(api, True)


def uninstall() -> None:
    """Restore torch's compiler. Functions that were scripted before still work.

    Example:
        >>> import backhaul.jit
        >>> backhaul.jit.uninstall()
        >>> backhaul.jit.install()
    """
    global _patches
    with _lock:
        if _patches is not None:
            _patches.remove()
            _patches = None
            for api in api_names.apis.values():
                _set_operators(api, False)


atexit.register(uninstall)  # torch releases its hooks only after Python's interpreter has ended


def add(api: Api) -> None:
    """Recognize the functions of another API, too."""
    with _lock:
        api_names.add(api)
        if _patches is not None:
            _set_operators(api, True)


def _set_operators(api: Api, present: bool) -> None:
    for function, operator in api.operators:
        torch_compiler.set_operator(function, operator if present else None)


api_names.add(NATIVE)
