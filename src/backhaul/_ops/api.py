"""``remote_op``. The rest of this package is imported when it is first called, since it needs more of torch."""

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
_making = threading.Lock()  # guards _made, and the names that operators are given


@graph_break(
    "it makes an operator, which is to be done once, outside of compiled functions; what it returns is called inside"
)
def remote_op(
    fn: Function, to: str | int | WorkerInfo, *, fake: Function | None = None, timeout: float | None = None
) -> RemoteOp:
    """Make a call that stays inside of compiled graphs: an operator that runs ``fn`` on another worker.

    What it returns is called like ``fn``. It works under ``torch.compile(fullgraph=True)``, ``torch.func`` and in eager
    mode, and its gradients, of any order, need no context: plain ``loss.backward()`` is fine. They are computed over
    there, by running ``fn`` again with the same arguments and the same random numbers.

    Where ``fn`` uses tensors of its worker that require grad, such as parameters of a module there, their gradients are
    added to the context that was current when the operator ran. Without one, ``backward`` raises an error; so does the
    operator itself where no argument requires grad, since then no gradient comes back to it.

    Args:
        fn: A function of tensors, lists of tensors and plain values that returns a tensor, or a tuple or list of them;
            its annotations say so. Travels as for ``rpc_sync``.
        to: Name, id or ``WorkerInfo`` of the worker that runs it.
        fake: What to run on fake tensors, to learn the shapes of the results; default: ``fn``. For functions that use
            what only their worker has, call other workers, or depend on what is in a tensor.
        timeout: Seconds that each call may take; 0: any time; None: the worker's default.

    Raises:
        TypeError: An operator cannot take or return what ``fn`` does, or its annotations do not say.
        UnsupportedTorchError: This torch lacks what operators need.

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
        return id(function)  # which is not given to another: what was made keeps the function
    return function
