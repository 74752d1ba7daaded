"""Hooks on nodes of the graph: whether there are any, which, and what they do to a gradient."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from backhaul._autograd.torch_engine.run import Node

F = TypeVar("F", bound=Callable[..., Any])


def own_hook(hook: F) -> F:
    """Mark a hook of ours. We remove such a hook before user code can ask for it, so it does not count as a hook."""
    hook.backhaul_own = True  # type: ignore[attr-defined]
    return hook


def is_own_hook(hook: object) -> bool:
    """Whether ``own_hook`` has marked a hook."""
    return getattr(hook, "backhaul_own", False)


@own_hook
def _nothing(*_: object) -> None:
    """A hook that is never called."""


class NodeHooks:
    """Finds the hooks of nodes, for which torch has no function.

    Registering a hook and looking at the table of its handle shows the other hooks. That costs more than everything
    else that is done for a leaf. So it is done only if ``possible``: some program code may have registered a hook on a
    node. ``patches`` watches the function that torch calls for that.

    Attributes:
        possible: Whether a node may have a hook. It never becomes False again.
    """

    def __init__(self) -> None:
        self.possible = False

    def of(self, register: Callable[..., Any]) -> list[Callable[..., Any]]:
        """The hooks of a node that ``register``, a method of the node, has registered."""
        if not self.possible:
            return []
        handle = register(_nothing)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        return list(hooks.values()) if hooks is not None else []


node_hooks = NodeHooks()

own_handles = 0
"""Hook handles that we have made, as long as nobody else has made one. If ``RemovableHandle.next_id`` is larger, the
program has registered a hook of some kind. Multi-grad hooks, which ask for the ``GraphTask``, may be among them.
"""


def count_own_handle() -> None:
    """Call this before we make a handle that does not count as a hook of the program."""
    global own_handles
    if RemovableHandle.next_id == own_handles:
        own_handles += 1


def pass_hooks(node: Node, grad: torch.Tensor | None) -> torch.Tensor | None:
    """Call the hooks of a node that does not run with the gradient that arrived there; return what they make of it."""
    if grad is None or not node_hooks.possible:
        return grad
    for hook in node_hooks.of(node.register_prehook):
        changed = hook((grad,))
        if changed is not None:
            if not isinstance(changed, tuple):
                raise TypeError(f"expected tuple, but the hook {hook} returned a {type(changed).__name__}")
            (grad,) = changed
    for hook in node_hooks.of(node.register_hook):
        hook((None,), (grad,))
    return grad


class NodeWatch:
    """Until ``__exit__``, calls ``seen`` with each gradient that arrives at a node, after all tensor hooks."""

    __slots__ = ("_tables",)

    def __init__(self, nodes: Iterable[Node], seen: Callable[[Node, torch.Tensor | None], None]) -> None:
        self._tables: list[dict[int, Any]] = []
        for node in nodes:
            table = collections.OrderedDict({0: functools.partial(seen, node)})
            bearer: Any = torch.empty(0)
            bearer._backward_hooks = table
            node._register_hook_dict(bearer)  # torch cannot undo this; an empty table does nothing
            self._tables.append(table)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        for table in self._tables:
            table.clear()
