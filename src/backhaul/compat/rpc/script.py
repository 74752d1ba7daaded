"""Inside TorchScript, the names of this package mean calls of Backhaul's; see ``backhaul.jit``."""

from __future__ import annotations

from backhaul.compat import autograd
from backhaul.compat.rpc import api
from backhaul.jit.installation import add
from backhaul.jit.names import Api

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
