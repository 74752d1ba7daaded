"""Modules of FSDP2 (``torch.distributed.fsdp.fully_shard``) in passes over workers.

FSDP2 gathers the parameters of a module when a gradient arrives at an output of the module. It reduces their gradients
when a gradient arrives at an input of the module, and at the end of the engine's run. A pass over workers calls the
engine many times, and writes ``.grad`` after each run. So FSDP2 would find no gradients. While a thread runs a part of
a pass, ``patches`` therefore lets FSDP2 gather parameters, but not reduce gradients. ``ShardedShare`` does that at the
end of the worker's share.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from backhaul._autograd.torch_engine.run import Node, OfRun
from backhaul._runtime import interrupts
from backhaul._torch_support import require

State = Any  # torch's FSDPState: what FSDP2 knows about a module

SHARDED = "FSDP2"
"""The key that joins all sources of a worker that reach modules of FSDP2. Every rank must reduce gradients in the same
order, so the modules of a worker take part in one group.
"""

_STATES = "torch.distributed.fsdp._fully_shard._fsdp_state"
_PARAMETERS = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


def _loaded(name: str) -> Any:
    """A module of torch; None while the program has not imported it."""
    return sys.modules.get(name)


def _states_by_module() -> Any:
    """Torch's table of the states of modules, also of other kinds; None if this torch has none."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return {}
    return getattr(_loaded("torch.distributed._composable_state"), "_module_state_mapping", None)


def states() -> list[State]:
    """The states of all FSDP2 modules of this process, in the order in which they were made."""
    module = _loaded(_STATES)
    if module is None:
        return []
    table = _states_by_module()
    if table is not None and not table:
        return []
    require("torch.distributed.fsdp.fully_shard")
    found = dict.fromkeys(reference() for reference in list((table or {}).values()))
    return [state for state in found if isinstance(state, module.FSDPState)]


def _groups(state: State) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch had one group for each state
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def among(nodes: Iterable[Node]) -> bool:
    """Whether one of ``nodes`` is at an input of an FSDP2 module."""
    module = _loaded(_PARAMETERS)
    if module is None or not _states_by_module():
        return False
    kind = module.RegisterPostBackwardFunction._backward_cls
    return any(type(node) is kind for node in nodes)


class ShardedShare:
    """What one pass does with FSDP2 modules on one worker. Thread-safe.

    Args:
        found: The states of the modules.
        at_driver: Whether the worker drives the pass. The driver knows when the pass is over, and calls ``finish``
            then. Other workers call ``finish`` when the group that has joined all modules has run.

    Attributes:
        joined_ran: Whether that group has run.
    """

    def __init__(self, found: Iterable[State], *, at_driver: bool) -> None:
        self.at_driver = at_driver
        self.joined_ran = False
        self._parameters: dict[int, tuple[torch.Tensor, State]] = {}  # by id: the gathered ones, which are the leaves
        for state in found:
            for group in _groups(state):
                for each in group.fsdp_params:
                    parameter = getattr(each, "_unsharded_param", None)
                    if parameter is not None:
                        self._parameters[id(parameter)] = parameter, state
        self._lock = threading.Lock()  # guards _waiting
        self._waiting: dict[State, None] = {}  # modules that got gradients

    def __contains__(self, leaf: torch.Tensor) -> bool:
        """Whether ``leaf`` is a parameter of an FSDP2 module."""
        return id(leaf) in self._parameters

    def joins(self, leaves: Iterable[int], nodes: Iterable[Node]) -> bool:
        """Whether a group with these leaves, given by ids, and nodes is the one that has joined all modules."""
        return any(leaf in self._parameters for leaf in leaves) or among(nodes)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While this thread runs a part of the pass: do not reduce gradients."""
        _running.begin(self)
        try:
            yield
        finally:
            _running.end()

    def put_off(self, state: State) -> None:
        """A gradient has arrived at an output of a module: reduce gradients in ``finish``."""
        with self._lock:
            self._waiting[state] = None
        state._state_ctx.post_backward_final_callback_queued = True

    def reach(self, leaves: Iterable[int]) -> None:
        """Leaves, given by ids, have got gradients."""
        with self._lock:
            for leaf in leaves:
                if leaf in self._parameters:
                    self._waiting[self._parameters[leaf][1]] = None

    @interrupts.calls_out
    def finish(self) -> None:
        """All gradients of this worker are in ``.grad``: reduce those of FSDP2 modules."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        if not waiting:
            return
        done: set[int] = set()  # ids of what all states below one root share
        _running.begin(None)  # this may be a pass inside a part of another
        try:
            for state in states():
                if state in waiting and id(state._state_ctx) not in done:
                    done.add(id(state._state_ctx))
                    state._root_post_backward_final_callback()
        finally:
            _running.end()


_running: OfRun[ShardedShare | None] = OfRun()


def replacements() -> list[tuple[Any, str, Callable[..., None]]]:
    """What ``patches`` replaces in FSDP2: classes, names of their methods, and our functions."""
    state, group = _loaded(_STATES).FSDPState, _loaded(_PARAMETERS).FSDPParamGroup
    register, post_backward = state._register_root_post_backward_final_callback, group.post_backward

    def register_callback(self: State) -> None:
        share = _running.get()
        if share is None:
            register(self)
        else:
            share.put_off(self)

    def reduce_now(self: Any, *unused: Any) -> None:
        if _running.get() is None:
            post_backward(self, *unused)

    _patched.add(register_callback)
    return [
        (state, "_register_root_post_backward_final_callback", register_callback),
        (group, "post_backward", reduce_now),
    ]


def is_patched() -> bool:
    """Whether our functions are in place."""
    return _loaded(_STATES).FSDPState._register_root_post_backward_final_callback in _patched


_patched: set[Callable[..., None]] = set()
