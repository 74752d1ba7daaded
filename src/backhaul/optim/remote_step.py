"""Steps of ``torch.optim`` optimizers over parameters of other workers.

torch's own ``step`` passes such parameters by, because it sees no gradients of them. Then each owner steps its
parameters: one message to each owner, all owners at once. A hook that torch calls before every step of every optimizer
arranges this.

A ``step`` that is not torch's may do anything: call its closure twice, or use a number of all gradients. It runs here,
and each of its operations on a remote parameter runs on the owner.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Container
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from backhaul._autograd.torch_engine.hooks import count_own_handle
from backhaul._remote_tensors import remote_parameter
from backhaul._remote_tensors.addresses import Address, Message
from backhaul._remote_tensors.module_gradients import Asked, send_changes
from backhaul._remote_tensors.on_owner import TensorForm
from backhaul._remote_tensors.remote_parameter import RemoteParameter, hidden
from backhaul._remote_tensors.remote_tensor import RemoteTensor, fetch
from backhaul._rpc.futures import Future
from backhaul._rref.handle import RRef
from backhaul._runtime.compile_marks import graph_break
from backhaul._runtime.worker_patches import while_workers_run
from backhaul._types import WorkerInfo
from backhaul.optim.nested_state import is_same, map_leaves, snapshot
from backhaul.optim.owners import ask_all
from backhaul.optim.step_on_owner import (
    Layout,
    Maker,
    Options,
    OwnedOptimizer,
    OwnerStep,
    Setup,
    Stepped,
    set_up_owned,
    step_owned,
)
from backhaul.optim.whole_steps import is_whole, torch_class

_SCALING = ("grad_scale", "found_inf")
"""What ``torch.amp.GradScaler`` gives to optimizers that unscale gradients themselves."""


class _OwnerShare:
    """What one owner steps for an optimizer.

    Attributes:
        optimizer: A reference to the optimizer there; None before the first step.
        groups: The groups with parameters there, by index, that it has.
        mirror: The state that it has, as the driver's optimizer shows it, by the number of the parameter.
        attributes: The attributes of the optimizer there that came from here.
    """

    def __init__(self) -> None:
        self.optimizer: RRef[OwnedOptimizer] | None = None
        self.groups: dict[int, list[RemoteParameter]] = {}
        self.mirror: dict[int, Any] = {}
        self.attributes: dict[str, Any] = {}


class RemoteSteps:
    """The steps of one optimizer that has parameters on other workers. One thread steps it at a time."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._shares: dict[WorkerInfo, _OwnerShare] = {}
        self._numbers: dict[RemoteParameter, int] = {}
        self._unused = itertools.count()
        self._options: list[Options] = []
        self.attributes: dict[str, Any] = {}

    def note_options(self) -> None:
        """Keep options and attributes as they are now: owners step with these, and torch's own step may change them."""
        optimizer = self._optimizer()
        assert optimizer is not None
        self.attributes = {
            name: value
            for name, value in optimizer.__dict__.items()
            if name.startswith("_") and isinstance(value, bool | int | float | None)
        }
        self._options = [
            {name: _copied(value) for name, value in group.items() if name not in ("params", "param_names")}
            for group in optimizer.param_groups
        ]

    def step(self) -> None:
        """Step on all owners at once."""
        optimizer = self._optimizer()
        assert optimizer is not None
        by_owner: dict[WorkerInfo, dict[int, list[RemoteParameter]]] = {}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if isinstance(parameter, RemoteParameter):
                    owner = parameter._address.container.owner()
                    by_owner.setdefault(owner, {}).setdefault(number, []).append(parameter)
        self._forget_all_except(by_owner)
        for worker in {each._gradients.worker for groups in by_owner.values() for each in _all(groups)}:
            send_changes(worker)
        steps = {owner: _OwnerStep(self, optimizer, owner, groups) for owner, groups in by_owner.items()}
        new = {owner: each for owner, each in steps.items() if each.needs_setup()}
        failed: Exception | None = None
        try:
            ask_all(
                {owner: each.set_up for owner, each in new.items()},
                "the step",
                {owner: each.is_set_up for owner, each in new.items()},
            )
        except Exception as error:
            failed = error  # the other owners step
        ready = {owner: each for owner, each in steps.items() if each.ready}
        try:
            ask_all(
                {owner: each.start for owner, each in ready.items()},
                "the step",
                {owner: each.finish for owner, each in ready.items()},
            )
        except Exception as error:
            if failed is None:
                raise
            for note in (f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())):
                failed.add_note(note)
        if failed is not None:
            raise failed

    def _forget_all_except(self, owners: Container[WorkerInfo]) -> None:
        """Forget owners none of whose parameters is left, so that they can free their share."""
        if all(owner in owners for owner in self._shares):
            return
        self._shares = {owner: share for owner, share in self._shares.items() if owner in owners}
        self._numbers = {
            parameter: number
            for parameter, number in self._numbers.items()
            if parameter._address.container.owner() in owners
        }

    def share(self, owner: WorkerInfo) -> _OwnerShare:
        """What an owner steps."""
        return self._shares.setdefault(owner, _OwnerShare())

    def options(self, group: int) -> Options:
        """The options of a group for the present step."""
        return self._options[group]

    def number(self, parameter: RemoteParameter) -> int:
        """The number by which owners know a parameter."""
        if parameter not in self._numbers:
            self._numbers[parameter] = next(self._unused)
        return self._numbers[parameter]


def _all(groups: dict[int, list[RemoteParameter]]) -> list[RemoteParameter]:
    return [parameter for group in groups.values() for parameter in group]


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


class _OwnerStep:
    """One step on one owner."""

    def __init__(
        self, steps: RemoteSteps, optimizer: Optimizer, owner: WorkerInfo, groups: dict[int, list[RemoteParameter]]
    ) -> None:
        self._share = steps.share(owner)
        self._optimizer = optimizer
        self._owner = owner.id
        self._groups = groups
        self._parameters = {steps.number(parameter): parameter for parameter in _all(groups)}
        self._options = [steps.options(number) for number in groups]
        self._attributes = steps.attributes
        self._modules = list(dict.fromkeys(parameter._gradients for parameter in self._parameters.values()))
        self._changed: dict[int, Any] = {}
        self.ready = False
        self._asked: list[Asked] = []

    def needs_setup(self) -> bool:
        """Whether parameters, groups or state have changed here since the last step."""
        self._changed = self._changed_state()
        self.ready = not self._changed and self._has_groups()
        return not self.ready

    def _has_groups(self) -> bool:
        groups = self._share.groups
        return list(groups) == list(self._groups) and all(
            len(old) == len(new) and all(a is b for a, b in zip(old, new, strict=True))
            for old, new in zip(groups.values(), self._groups.values(), strict=True)
        )

    def set_up(self) -> Future[RRef[OwnedOptimizer] | None]:
        """Send what has changed."""
        message, share = self._message(), self._share
        layout: Layout | None = None
        if not self._has_groups():
            numbers = {id(parameter): number for number, parameter in self._parameters.items()}
            layout = [
                [(numbers[id(each)], message.place(each._address)) for each in group] for group in self._groups.values()
            ]
        setup = Setup(layout, self._options, self._in_message(self._changed, message))
        if share.optimizer is None:
            kind = torch_class(type(self._optimizer))
            assert kind is not None
            which: int | Maker = Maker(kind, self._optimizer.defaults)
        else:
            which = message.number(share.optimizer)
        return message.send(self._modules[0].container, set_up_owned, which, setup, label=self._label())

    def is_set_up(self, made: RRef[OwnedOptimizer] | None) -> None:
        """The owner has taken it over."""
        self.ready = True
        share = self._share
        share.optimizer = share.optimizer or made
        share.groups = {number: list(group) for number, group in self._groups.items()}
        for number, state in self._changed.items():
            if state is None:
                share.mirror.pop(number, None)
            else:
                share.mirror[number] = snapshot(state)

    def start(self) -> Future[Stepped]:
        """Let the owner step."""
        message, share = self._message(), self._share
        assert share.optimizer is not None
        scaling = {name: self._optimizer.__dict__[name] for name in _SCALING if name in self._optimizer.__dict__}
        attributes = {
            name: value
            for name, value in self._attributes.items()
            if name not in share.attributes or share.attributes[name] != value
        }
        step = OwnerStep(self._options, attributes, scaling, len(self._modules))
        self._asked = [module.asked_now() for module in self._modules]
        via, which = self._modules[0].container, message.number(share.optimizer)
        return message.send(via, step_owned, which, step, label=self._label())

    def _message(self) -> Message:
        """A message that names the modules first, always in the same order."""
        message = Message(self._owner)
        for module in self._modules:
            message.number(module.container)
        return message

    def _label(self) -> str:
        return f"{type(self._optimizer).__name__}.step"

    def _changed_state(self) -> dict[int, Any]:
        """State that is not what the owner has: it was loaded or changed here. None: it was deleted."""
        changed: dict[int, Any] = {}
        for number, parameter in self._parameters.items():
            mirror = self._share.mirror.get(number)
            state = self._optimizer.state.get(parameter) or None
            if state is None and mirror is None:
                continue
            if state is None or mirror is None or not is_same(mirror, state):
                changed[number] = state
        return changed

    def _in_message(self, changed: dict[int, Any], message: Message) -> dict[int, Any]:
        """State with places of tensors that the owner has, and copies of tensors that another owner has."""
        elsewhere = [
            leaf
            for leaf in tree_leaves(list(changed.values()))
            if isinstance(leaf, RemoteTensor) and leaf._address.owner != self._owner
        ]
        copies = {id(leaf): copy for leaf, copy in zip(elsewhere, fetch(elsewhere), strict=True)}

        def send(value: Any) -> Any:
            if id(value) in copies:
                return copies[id(value)]
            return message.place(value._address) if isinstance(value, RemoteTensor) else value

        return {number: tree_map(send, state) for number, state in changed.items()}

    def finish(self, stepped: Stepped) -> None:
        """The owner has stepped."""
        described, gradients = stepped
        share = self._share
        share.attributes.update(self._attributes)
        for number, parameter in self._parameters.items():
            if number in described:
                state = self._shown(number, described[number])
                self._optimizer.state[parameter] = state
                share.mirror[number] = snapshot(state)
        for module, found, asked in zip(self._modules, gradients, self._asked, strict=True):
            module.learn(found, asked)

    def _shown(self, number: int, described: Any) -> Any:
        container = self._share.optimizer
        assert container is not None

        def show(path: tuple[Any, ...], value: Any) -> Any:
            return (
                RemoteTensor(Address(container, "state", (number, path)), value)
                if isinstance(value, TensorForm)
                else value
            )

        return map_leaves(show, described)


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
    if not any(isinstance(each, RemoteParameter) for group in optimizer.param_groups for each in group["params"]):
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
    _move(optimizer._optimizer_step_pre_hooks, _before, last=True)
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
    copies = {id(leaf): copy for leaf, copy in zip(remote, fetch(remote), strict=True)}
    state = map_leaves(lambda _, value: copies.get(id(value), value), state_dict["state"])
    return {**state_dict, "state": state}


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
