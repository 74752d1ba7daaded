"""Lets scripts call the functions of this package; see ``backhaul.jit``."""

from __future__ import annotations

import threading
from typing import Any

import msgspec

from backhaul.compat import autograd
from backhaul.compat.rpc import api
from backhaul.jit import references
from backhaul.jit.installation import add
from backhaul.jit.names import Api
from backhaul.jit.references import NOT_SAVED, classes

classes.unchecked.add(api.RRef)
add(
    Api(
        "backhaul.compat.rpc",
        api.rpc_sync,
        api.rpc_async,
        api.remote,
        api.rpc_async_in_script,
        (
            (autograd.backward, "backhaul::dist_backward"),
            (autograd.get_gradients, "backhaul::get_gradients"),
        ),
        (autograd.context,),
    )
)


class _Saving(threading.local):
    """Writes RRefs to files and reads them, as far as the reference supports it.

    A program may enable this on one thread for a while, to send the file in a call. Each RRef that is written must be
    read exactly once, because the owner keeps the value until then.
    """

    enabled = False

    def save(self, reference: Any) -> str:
        if not self.enabled or not isinstance(reference, api.RRef):
            raise RuntimeError(NOT_SAVED)
        return msgspec.json.encode(reference._serialize()).decode()

    def load(self, state: str) -> api.RRef[Any]:
        return api.RRef._deserialize(msgspec.json.decode(state, type=tuple[int, str, int, int]))


_saving = references.saving = _Saving()


def _enable_jit_rref_pickle() -> None:
    """Let this thread save modules that hold RRefs."""
    _saving.enabled = True


def _disable_jit_rref_pickle() -> None:
    """End what ``_enable_jit_rref_pickle`` began."""
    _saving.enabled = False
