"""``remote_op``. Its first call imports the rest of this package, which needs more of torch than calls do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from backhaul._runtime.compile_marks import graph_break
from backhaul._torch_support import require
from backhaul._types import WorkerInfo

if TYPE_CHECKING:
    from backhaul._ops.remote_op import RemoteOp

Function = Callable[..., Any]

_made: dict[Any, RemoteOp] = {}
_making = threading.Lock()  # guards _made, and the names of operators


@graph_break("remote_op creates an operator; call remote_op once, outside compiled functions, and its result inside")
def remote_op(
    fn: Function, to: str | int | WorkerInfo, *, fake: Function | None = None, timeout: float | None = None
) -> RemoteOp:
    """Create an operator that runs ``fn`` on another worker and stays inside compiled graphs.

    The result is called like ``fn``. It works under ``torch.compile(fullgraph=True)``, under ``torch.func`` and in
    eager mode. Its gradients, of any order, need no context: plain ``loss.backward()`` works. The other worker computes
    them by running ``fn`` again with the same arguments and the same random numbers.

    ``fn`` may use tensors of its worker that require grad, such as the parameters of a module there. Their gradients
    are added to the context that was current when the operator ran. Without a context, ``backward`` raises an error. If
    no argument requires grad, the operator itself raises, because no gradient would come back to it.

    Args:
        fn: A function of tensors, lists of tensors and plain values that returns a tensor, or a tuple or list of
            tensors. Its annotations must say so. It is sent like a function of ``rpc_sync``.
        to: Name, id or ``WorkerInfo`` of the worker that runs ``fn``.
        fake: The function that runs on fake tensors and gives the shapes of the results; ``fn`` by default. Needed if
            ``fn`` uses objects that only its worker has, calls other workers, or depends on the values in a tensor.
        timeout: Time limit of each call, in seconds; 0: no limit; None: the worker's default.

    Raises:
        TypeError: An operator cannot have the parameters or the result of ``fn``, or annotations are missing.
        UnsupportedTorchError: This version of torch lacks a function that operators need.

    Example:
        >>> import torch, backhaul as bh
        >>> def head(x: torch.Tensor, power: int = 2) -> torch.Tensor:
        ...     return torch.sin(x).pow(power)
        >>> with bh.cluster(2):
        ...     there = bh.remote_op(head, to="worker1")
        ...     torch.func.grad(lambda x: there(x).sum())(torch.zeros(2))
        tensor([0., 0.])
    """
    require("backhaul.remote_op")
    from backhaul._ops.remote_op import RemoteOp

    where = to.name if isinstance(to, WorkerInfo) else to
    key = (_identity(fn), where, _identity(fake), timeout)
    with _making:
        if key not in _made:
            _made[key] = RemoteOp(fn, where, fake, timeout)
        return _made[key]


def _identity(function: Function | None) -> Any:
    try:
        hash(function)
    except TypeError:
        return id(function)  # no other function gets this id: the operator keeps its function alive
    return function
