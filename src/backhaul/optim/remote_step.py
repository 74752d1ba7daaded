"""Steps of ``torch.optim`` optimizers over parameters of other workers.

torch's own ``step`` passes such parameters by, because it sees no gradients of them. Then each owner steps its
parameters: one message to each owner, all owners at once. A hook that torch calls before every step of every optimizer
arranges this.

A ``step`` that is not torch's may do anything: call its closure twice, or use a number of all gradients. It runs here,
and each of its operations on a remote parameter runs on the owner.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from backhaul._autograd.torch_engine.hooks import count_own_handle
from backhaul._remote_tensors import remote_parameter
from backhaul._remote_tensors.driven_modules import send_changes
from backhaul._remote_tensors.remote_parameter import RemoteParameter, hidden
from backhaul._remote_tensors.remote_tensor import RemoteTensor, fetch
from backhaul._rpc.move_progress import shown_move
from backhaul._runtime.compile_marks import graph_break
from backhaul._runtime.worker_patches import while_workers_run
from backhaul._types import WorkerInfo
from backhaul.optim.nested_state import map_leaves
from backhaul.optim.owner_share import OwnerShare, are_same
from backhaul.optim.owners import ask_all
from backhaul.optim.step_on_owner import Options
from backhaul.optim.whole_steps import is_whole


class RemoteSteps:
    """The steps of one optimizer that has parameters on other workers. One thread steps it at a time."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._shares: dict[WorkerInfo, OwnerShare] = {}
        self._numbers: dict[RemoteParameter, int] = {}
        self._unused = itertools.count()
        self._listed: list[list[Any]] = []  # the parameters of each group
        self._options: list[Options] = []
        self._has_plain_options = True
        self._attributes: dict[str, Any] = {}

    def note_options(self) -> None:
        """Keep options and attributes as they are now: owners step with these, and torch's own step may change them."""
        optimizer = self._optimizer()
        assert optimizer is not None
        self._attributes = {
            name: value
            for name, value in optimizer.__dict__.items()
            if name[0] == "_" and (value is None or isinstance(value, (bool, int, float)))
        }
        self._options, self._has_plain_options = [], True
        for group in optimizer.param_groups:
            options = dict(group)
            del options["params"]
            options.pop("param_names", None)
            for name, value in options.items():
                if type(value) not in _PLAIN:
                    self._has_plain_options &= type(value) is tuple and _PLAIN.issuperset(map(type, value))
                    options[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
            self._options.append(options)

    def forget(self) -> None:
        """Drop the shares of all owners. With the next step, they get parameters, options and state anew."""
        self._shares, self._numbers, self._listed = {}, {}, []

    def step(self) -> None:
        """Step on all owners at once."""
        optimizer = self._optimizer()
        assert optimizer is not None
        self._share_out(optimizer)
        shares = self._shares
        for worker in {share.worker for share in shares.values()}:
            send_changes(worker)
        failed: Exception | None = None
        new = {owner: share for owner, share in shares.items() if not share.is_ready(optimizer)}
        if new:
            try:
                ask_all(
                    {owner: functools.partial(share.set_up, optimizer, self._options) for owner, share in new.items()},
                    "the step",
                    {owner: share.is_set_up for owner, share in new.items()},
                )
            except Exception as error:
                failed = error  # the other owners step
        ready = {owner: share for owner, share in shares.items() if share.ready}
        try:
            ask_all(
                {
                    owner: functools.partial(
                        share.start, optimizer, self._options, self._attributes, self._has_plain_options
                    )
                    for owner, share in ready.items()
                },
                "the step",
                {owner: functools.partial(share.finish, optimizer) for owner, share in ready.items()},
            )
        except Exception as error:
            if failed is None:
                raise
            for note in (f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())):
                failed.add_note(note)
        if failed is not None:
            raise failed

    def _share_out(self, optimizer: Optimizer) -> None:
        """Give each owner its parameters, unless they are those of the last step."""
        listed = [group["params"] for group in optimizer.param_groups]
        if len(listed) == len(self._listed) and all(map(are_same, listed, self._listed)):
            return
        self._listed = [list(each) for each in listed]
        by_owner: dict[WorkerInfo, dict[int, list[RemoteParameter]]] = {}
        for number, group in enumerate(listed):
            for parameter in group:
                if isinstance(parameter, RemoteParameter):
                    owner = parameter._address.container.owner()
                    by_owner.setdefault(owner, {}).setdefault(number, []).append(parameter)
        if any(owner not in by_owner for owner in self._shares):  # they can free their shares
            self._shares = {owner: share for owner, share in self._shares.items() if owner in by_owner}
            self._numbers = {
                parameter: number
                for parameter, number in self._numbers.items()
                if parameter._address.container.owner() in by_owner
            }
        for owner, groups in by_owner.items():
            share = self._shares.get(owner)
            if share is None:
                share = self._shares[owner] = OwnerShare(owner.id)
            parameters = {self._number(each): each for group in groups.values() for each in group}
            share.take(groups, parameters)

    def _number(self, parameter: RemoteParameter) -> int:
        """The number by which owners know a parameter."""
        if parameter not in self._numbers:
            self._numbers[parameter] = next(self._unused)
        return self._numbers[parameter]


_PLAIN = frozenset((bool, int, float, str, type(None)))
"""The types of options that cannot change in place."""


# Hooks.

_steps: weakref.WeakKeyDictionary[Optimizer, RemoteSteps] = weakref.WeakKeyDictionary()

_shows_values: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers whose ``state_dict`` has copies of remote tensors."""


def _arrange(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Called before every step of every optimizer: let the owners of remote parameters step too."""
    if remote_parameter.any_made():
        _arrange_owners(optimizer)


@graph_break
def _arrange_owners(optimizer: Optimizer) -> None:
    if not any(RemoteParameter in map(type, group["params"]) for group in optimizer.param_groups):
        return
    if optimizer not in _shows_values:
        _shows_values.add(optimizer)
        count_own_handle()
        optimizer.register_state_dict_post_hook(_with_values)
    if not is_whole(optimizer):
        return
    if optimizer not in _steps:
        _steps[optimizer] = RemoteSteps(optimizer)
        count_own_handle()
        optimizer.register_step_pre_hook(_before)
        count_own_handle()
        optimizer.register_step_post_hook(_after)
    # Hooks of the user see gradients before the step, and new values after it.
    if len(optimizer._optimizer_step_pre_hooks) > 1:
        _move(optimizer._optimizer_step_pre_hooks, _before, last=True)
    if len(optimizer._optimizer_step_post_hooks) > 1:
        _move(optimizer._optimizer_step_post_hooks, _after, last=False)


def _move(hooks: Any, hook: Callable[..., Any], *, last: bool) -> None:
    key = next(key for key, value in hooks.items() if value is hook)
    hooks.move_to_end(key, last=last)


@graph_break
def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    if not is_whole(optimizer) or hidden.is_stepped(optimizer):
        return None  # torch calls the hooks of a step again if the step calls that of a base class
    _steps[optimizer].note_options()
    hidden.begin(sys._getframe(1), optimizer)
    shown = [hidden.show(each) if callable(each) else each for each in args[1:]]
    return (args[0], *shown), {
        name: hidden.show(value) if name == "closure" and value is not None else value for name, value in kwargs.items()
    }


@graph_break
def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if hidden.end(optimizer):
        _steps[optimizer].step()


@graph_break
def _with_values(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """``state_dict`` with copies in place of remote tensors, with one message to each owner."""
    remote = [leaf for leaf in tree_leaves(state_dict["state"]) if isinstance(leaf, RemoteTensor)]
    owners = list(dict.fromkeys(leaf.owner_name() for leaf in remote))
    with shown_move("copying optimizer state from", owners):
        copies = {id(leaf): copy for leaf, copy in zip(remote, fetch(remote), strict=True)}
    state = map_leaves(lambda _, value: copies.get(id(value), value), state_dict["state"])
    return {**state_dict, "state": state}


def forget_owners(optimizer: Optimizer) -> None:
    """Let the next step of an optimizer set up its owners anew: they have lost what they had."""
    if optimizer in _steps:
        _steps[optimizer].forget()


_handle: Any = None


def install() -> None:
    """Let torch call ``_arrange``. Does nothing if it does already."""
    global _handle
    if _handle is None:
        count_own_handle()
        _handle = register_optimizer_step_pre_hook(_arrange)


def uninstall() -> None:
    """Undo ``install``."""
    global _handle
    if _handle is not None:
        _handle.remove()
        _handle = None


while_workers_run(install, uninstall)
