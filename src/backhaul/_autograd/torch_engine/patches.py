"""What autograd patches in torch. Installed with the first worker of the process, removed with the last.

``docs/patches.md`` lists every patch of the package with its reason. Importing this module changes nothing in torch.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import graph
from torch.autograd.function import _HookMixin
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import distributed
from torch.utils.hooks import RemovableHandle

from backhaul._autograd.torch_engine import entry, sharded
from backhaul._autograd.torch_engine.graph_task import task_for
from backhaul._autograd.torch_engine.hooks import count_own_handle, is_own_hook, node_hooks
from backhaul._autograd.torch_engine.reducers import reducers
from backhaul._autograd.torch_engine.run import Node, allows_checkpoints, own_run
from backhaul.errors import BackhaulError

_undo: list[Callable[[], None]] = []  # removes the patches that are installed, the last first
_doors: tuple[Any, Any] = (None, None)  # what ``_engine_run_backward`` was when ``guard_backward`` last checked it
_guarding = threading.Lock()  # guards _doors
_seen_handles = 0  # hook handles that existed when the patches were last removed; node hooks are not among them


def install() -> None:
    """Patch torch. Does nothing if the patches are there."""
    if _undo:
        return
    if RemovableHandle.next_id > _seen_handles:
        node_hooks.possible = True  # the program registered hooks while nothing watched; some may be on nodes
    _watch_node_hooks()
    _answer_multi_grad_hooks()
    _watch_modules()
    _enter_backward()
    _allow_checkpoints()
    _refuse_static_graphs()


def uninstall() -> None:
    """Leave torch as ``install`` found it, except where other code has replaced our function since."""
    global _seen_handles
    if _undo:
        _seen_handles = RemovableHandle.next_id
    while _undo:
        _undo.pop()()


def _replace(owner: Any, name: str, replacement: Any) -> None:
    original = vars(owner)[name]
    setattr(owner, name, replacement)

    def restore() -> None:
        if vars(owner).get(name) is replacement:
            setattr(owner, name, original)

    _undo.append(restore)


def _watch_node_hooks() -> None:
    """Notice hooks on nodes: torch calls ``_register_hook`` for every hook that Python registers on one."""
    register = getattr(_HookMixin, "_register_hook", None)
    if register is None:  # this torch has another way: assume that there are hooks
        node_hooks.possible = True
        return

    def watched(hooks: Any, hook: Any) -> Any:
        if not is_own_hook(hook):
            node_hooks.possible = True
        return register(hooks, hook)

    _replace(_HookMixin, "_register_hook", staticmethod(watched))


def _answer_multi_grad_hooks() -> None:
    """Tell multi-grad hooks about the whole pass where torch would tell about one run of the engine."""
    graph_task, will_run = torch._C._current_graph_task_id, torch._C._will_engine_execute_node

    def current_graph_task_id() -> int:
        task = task_for(sys._getframe(1))
        return graph_task() if task is None else task.number

    def will_engine_execute_node(node: Node) -> bool:
        task = task_for(sys._getframe(1))
        return will_run(node) if task is None else task.runs(node)

    _replace(torch._C, "_current_graph_task_id", current_graph_task_id)
    _replace(torch._C, "_will_engine_execute_node", will_engine_execute_node)


def _enter_backward() -> None:
    """Let Backhaul take over backward passes that reach back to other workers. ``entry.require`` says whether it does:
    not at this place, since workers that record no calls outside contexts can do without.
    """
    replacement = entry.make_entry(graph._engine_run_backward)
    for owner in (graph, torch.autograd):
        if "_engine_run_backward" in vars(owner):
            _replace(owner, "_engine_run_backward", replacement)


def _allow_checkpoints() -> None:
    """Let reentrant checkpoints run where all leaves get their gradients in ``.grad``."""
    is_valid = getattr(torch.autograd, "_is_checkpoint_valid", None)
    if is_valid is None:  # this torch has another way
        return

    def is_checkpoint_valid() -> bool:
        allowed = allows_checkpoints(sys._getframe(1))
        return bool(is_valid()) if allowed is None else allowed

    _replace(torch.autograd, "_is_checkpoint_valid", is_checkpoint_valid)


def _refuse_static_graphs() -> None:
    """With a static graph, DDP reduces gradients for the first time when one run of the engine ends. In a pass there
    would be no gradients at that time, and DDP would never reduce any.
    """
    sink = getattr(distributed, "_DDPSink", None)
    if sink is None:  # this torch has another way
        return
    backward = sink.backward

    def refuse_or_pass_on(ctx: Any, *grads: Any) -> Any:
        if ctx.ddp_weakref().static_graph and own_run(sys._getframe(1)) is not None:
            raise BackhaulError(
                "DistributedDataParallel(static_graph=True) cannot take part in a backward pass over workers, because "
                "it expects one run of the engine; make it without static_graph"
            )
        return backward(ctx, *grads)

    _replace(sink, "backward", staticmethod(refuse_or_pass_on))


def guard_backward() -> None:
    """Make sure that backward passes still come to Backhaul, since a tensor is received that they may lead to. Other
    code that patched torch before the first worker may have put back what it found.

    Raises:
        UnsupportedTorchError: They do not come, and cannot be made to.
    """
    if graph._engine_run_backward is not _doors[0] or vars(torch.autograd)["_engine_run_backward"] is not _doors[1]:
        _check_backward()


def _check_backward() -> None:
    global _doors
    with _guarding:
        if not _undo:
            return  # the last worker has ended
        if entry.missed():
            _enter_backward()
            entry.require()
        _doors = graph._engine_run_backward, vars(torch.autograd)["_engine_run_backward"]


def _watch_modules() -> None:
    """Notice new DDP modules through a hook that torch offers for that."""
    count_own_handle()
    handle = register_module_module_registration_hook(reducers.on_submodule)
    _undo.append(reducers.forget_search)
    _undo.append(handle.remove)


def sharded_share(*, at_driver: bool) -> sharded.ShardedShare | None:
    """What a pass does with the FSDP2 modules of this process; None if there are none. See ``ShardedShare``."""
    found = sharded.states()
    if not found:
        return None
    _put_off_reductions()
    return sharded.ShardedShare(found, at_driver=at_driver)


def _put_off_reductions() -> None:
    """Let FSDP2 reduce gradients when a worker's share of a pass is over, not in each run of the engine."""
    with _guarding:
        if _undo and not sharded.is_patched():
            for owner, name, replacement in sharded.replacements():
                _replace(owner, name, replacement)
