"""Steps of ``torch.optim`` optimizers over parameters of other workers.

torch's own step passes such parameters by, because it sees no gradients of them. Then each owner steps its parameters:
one message to each owner, all owners at once. A hook that torch calls before every step of every optimizer arranges
this.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from backhaul._autograd.torch_engine.hooks import count_own_handle
from backhaul._remote_tensors import remote_parameter
from backhaul._remote_tensors.addresses import Address, Message
from backhaul._remote_tensors.module_gradients import Asked, ModuleGradients, send_changes
from backhaul._remote_tensors.on_owner import Gradients, TensorForm
from backhaul._remote_tensors.remote_parameter import RemoteParameter, hidden
from backhaul._remote_tensors.remote_tensor import RemoteTensor, fetch
from backhaul._rpc.futures import Future
from backhaul._rref.handle import RRef
from backhaul._runtime.compile_marks import graph_break
from backhaul._runtime.worker_patches import while_workers_run
from backhaul._types import WorkerInfo
from backhaul.optim.owners import ask_all
from backhaul.optim.step_on_owner import (
    Layout,
    Maker,
    Options,
    OwnedOptimizer,
    OwnerStep,
    Stepped,
    map_leaves,
    step_owned,
)

_SCALING = ("grad_scale", "found_inf")
"""What ``torch.amp.GradScaler`` gives to optimizers that unscale gradients themselves."""

_NOT_SENT = frozenset(("defaults", "state", "param_groups", "step", "_zero_grad_profile_name", *_SCALING))


class _OwnerShare:
    """What one owner steps for an optimizer.

    Attributes:
        optimizer: A reference to the optimizer there; None before the first step.
        groups: The groups with parameters there, by index, when it stepped last.
        mirror: The state that the driver's optimizer shows, by the number of the parameter.
    """

    def __init__(self) -> None:
        self.optimizer: RRef[OwnedOptimizer] | None = None
        self.groups: dict[int, list[RemoteParameter]] = {}
        self.mirror: dict[int, Any] = {}


class RemoteSteps:
    """The steps of one optimizer that has parameters on other workers. One thread steps it at a time."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._shares: dict[WorkerInfo, _OwnerShare] = {}
        self._numbers: dict[RemoteParameter, int] = {}
        self._options: list[Options] = []

    def note_options(self) -> None:
        """Keep the options as they are now: owners step with these, and torch's own step may change them."""
        optimizer = self._optimizer()
        assert optimizer is not None
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
        for worker in {each._gradients.worker for groups in by_owner.values() for each in _all(groups)}:
            send_changes(worker)
        steps = {owner: _OwnerStep(self, optimizer, owner, groups) for owner, groups in by_owner.items()}
        ask_all(
            {owner: each.start for owner, each in steps.items()},
            "the step",
            {o: each.finish for o, each in steps.items()},
        )

    def share(self, owner: WorkerInfo) -> _OwnerShare:
        """What an owner steps."""
        return self._shares.setdefault(owner, _OwnerShare())

    def options(self, group: int) -> Options:
        """The options of a group for the present step."""
        return self._options[group]

    def number(self, parameter: RemoteParameter) -> int:
        """The number by which owners know a parameter."""
        return self._numbers.setdefault(parameter, len(self._numbers))


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
        self._groups = groups
        self._parameters = {steps.number(parameter): parameter for parameter in _all(groups)}
        self._options = [steps.options(number) for number in groups]
        self._message = Message(owner.id)
        self._named: list[ModuleGradients] = []
        self._asked: list[Asked] = []

    def start(self) -> Future[Stepped]:
        """Send the message."""
        share, message = self._share, self._message
        modules = dict.fromkeys(parameter._gradients for parameter in self._parameters.values())
        self._named = list(modules)
        for module in modules:
            message.number(module.container)
        count = len(modules)
        same = list(share.groups) == list(self._groups) and all(
            len(old) == len(new) and all(a is b for a, b in zip(old, new, strict=True))
            for old, new in zip(share.groups.values(), self._groups.values(), strict=True)
        )
        pushed = self._pushed_state()
        numbers = {id(parameter): number for number, parameter in self._parameters.items()}
        layout: Layout | None = None
        if not same:
            layout = [
                [(numbers[id(each)], message.place(each._address)) for each in group] for group in self._groups.values()
            ]
        scaling = {name: self._optimizer.__dict__[name] for name in _SCALING if name in self._optimizer.__dict__}
        step = OwnerStep(layout, self._options, pushed, scaling, count)
        which = self._maker() if share.optimizer is None else message.number(share.optimizer)
        self._asked = [module.asked_now() for module in modules]
        via = self._named[0].container
        return message.send(via, step_owned, which, step, label=f"{type(self._optimizer).__name__}.step")

    def _maker(self) -> Maker:
        attributes = {
            name: value
            for name, value in self._optimizer.__dict__.items()
            if name not in _NOT_SENT and not name.startswith("_optimizer_") and _can_travel(value)
        }
        return Maker(type(self._optimizer), self._optimizer.defaults, attributes)

    def _pushed_state(self) -> dict[int, Any]:
        """State that is not what the owner has: it was loaded or changed here."""
        changed: dict[int, Any] = {}
        for number, parameter in self._parameters.items():
            mirror = self._share.mirror.get(number)
            state = self._optimizer.state.get(parameter) or None
            if state is None and mirror is None:
                continue
            if state is None or mirror is None or not _is_same(mirror, state):
                changed[number] = state
        elsewhere = [
            leaf
            for leaf in tree_leaves(list(changed.values()))
            if isinstance(leaf, RemoteTensor) and leaf._address.owner != self._message.owner
        ]
        copies = {id(leaf): copy for leaf, copy in zip(elsewhere, fetch(elsewhere), strict=True)}

        def send(value: Any) -> Any:
            if id(value) in copies:
                return copies[id(value)]
            return self._message.place(value._address) if isinstance(value, RemoteTensor) else value

        return {number: tree_map(send, state) for number, state in changed.items()}

    def finish(self, stepped: Stepped) -> None:
        """The owner has stepped."""
        new, described, gradients = stepped
        share = self._share
        share.optimizer = share.optimizer or new
        share.groups = {number: list(group) for number, group in self._groups.items()}
        for number, parameter in self._parameters.items():
            if number in described:
                state = self._shown(number, described[number])
                self._optimizer.state[parameter] = state
                share.mirror[number] = _snapshot(state)
            elif not self._optimizer.state.get(parameter):
                share.mirror.pop(number, None)
        self._learn(gradients)

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

    def _learn(self, gradients: Sequence[Gradients]) -> None:
        for module, found, asked in zip(self._named, gradients, self._asked, strict=True):
            module.learn(found, asked)


def _snapshot(state: Any) -> Any:
    """The same leaves in containers of their own."""
    return map_leaves(lambda _, value: value, state)


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, torch.Tensor):
        return one is other
    return bool(one == other)


def _can_travel(value: Any) -> bool:
    if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)):
        return False
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


# Hooks.

_steps: weakref.WeakKeyDictionary[Optimizer, RemoteSteps] = weakref.WeakKeyDictionary()


def _arrange(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Called before every step of every optimizer: let the owners of remote parameters step too."""
    if remote_parameter.any_made():
        _arrange_owners(optimizer)


@graph_break
def _arrange_owners(optimizer: Optimizer) -> None:
    if not any(isinstance(each, RemoteParameter) for group in optimizer.param_groups for each in group["params"]):
        return
    if _needs_closure(type(optimizer).step):
        return  # its operations run on the owners one by one
    if optimizer not in _steps:
        _steps[optimizer] = RemoteSteps(optimizer)
        count_own_handle()
        optimizer.register_step_pre_hook(_before)
        count_own_handle()
        optimizer.register_step_post_hook(_after)
        count_own_handle()
        optimizer.register_state_dict_post_hook(_with_values)
    # Hooks of the user see gradients before the step, and new values after it.
    _move(optimizer._optimizer_step_pre_hooks, _before, last=True)
    _move(optimizer._optimizer_step_post_hooks, _after, last=False)


def _move(hooks: Any, hook: Callable[..., Any], *, last: bool) -> None:
    key = next(key for key, value in hooks.items() if value is hook)
    hooks.move_to_end(key, last=last)


@functools.cache
def _needs_closure(step: Callable[..., Any]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


@graph_break
def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
    _steps[optimizer].note_options()
    hidden.begin(sys._getframe(1))
    shown = [hidden.show(each) if callable(each) else each for each in args[1:]]
    return (args[0], *shown), {
        name: hidden.show(value) if name == "closure" and value is not None else value for name, value in kwargs.items()
    }


@graph_break
def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    hidden.end()
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
