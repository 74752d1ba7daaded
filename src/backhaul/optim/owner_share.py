"""One owner's share of an optimizer of this worker: what it has, and what it has to be told before it steps."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from backhaul._remote_tensors.addresses import Address, Message, own_call
from backhaul._remote_tensors.module_gradients import Asked, ModuleGradients
from backhaul._remote_tensors.on_owner import Gradients, TensorForm
from backhaul._remote_tensors.remote_parameter import RemoteParameter
from backhaul._remote_tensors.remote_tensor import RemoteTensor, fetch
from backhaul._rref.handle import RRef
from backhaul._wire.callables import name_of
from backhaul._worker.worker import Worker
from backhaul.optim.nested_state import is_same, map_leaves, snapshot
from backhaul.optim.step_on_owner import (
    Layout,
    Maker,
    Options,
    OwnedOptimizer,
    Setup,
    Stepped,
    set_up_owned,
    step_owned,
)
from backhaul.optim.whole_steps import torch_class

_SCALING = ("grad_scale", "found_inf")
"""What ``torch.amp.GradScaler`` gives to optimizers that unscale gradients themselves."""

_STEP = name_of(step_owned) or ""


# Over the limit because a step is a short conversation: what was sent last, and what was answered.
class OwnerShare:
    """What one owner steps for an optimizer.

    Attributes:
        ready: Whether the owner has taken over the parameters and the state.
        worker: The driver.
    """

    worker: Worker

    def __init__(self, owner: int) -> None:
        self.ready = False
        self._owner = owner
        self._reference: RRef[OwnedOptimizer] | None = None  # to the optimizer there; None before the first step
        self._groups: dict[int, list[RemoteParameter]] = {}  # the groups with parameters there, by index
        self._laid_out = False  # whether the owner has these groups
        self._parameters: dict[int, RemoteParameter] = {}  # by number
        self._modules: list[ModuleGradients] = []
        self._mirror: dict[int, Any] = {}  # the state that it has, as it is shown here, by the number of the parameter
        self._changed: dict[int, Any] = {}  # state that it does not have
        self._options: list[Options] | None = None  # those that it has; None: nobody knows
        self._sent: list[Options] = []
        self._attributes: dict[str, Any] = {}  # those of the optimizer there that came from here
        self._new_attributes: dict[str, Any] = {}
        self._told: list[Gradients] = []  # the gradients that it has told of
        self._again = False  # whether it has to tell again all that it has told
        self._asked: list[Asked] = []

    def take(self, groups: dict[int, list[RemoteParameter]], parameters: dict[int, RemoteParameter]) -> None:
        """Set the parameters there, by group and by number."""
        self._laid_out = (
            self._laid_out
            and list(groups) == list(self._groups)
            and all(map(are_same, groups.values(), self._groups.values()))
        )
        self._groups, self._parameters = groups, parameters
        self._modules = list(dict.fromkeys(parameter._gradients for parameter in parameters.values()))
        self.worker = self._modules[0].worker

    def is_ready(self, optimizer: Optimizer) -> bool:
        """Whether parameters, groups and state are the same as after the last step."""
        self._changed = self._changed_state(optimizer)
        self.ready = self._laid_out and not self._changed
        return self.ready

    def set_up(self, optimizer: Optimizer, options: Sequence[Options], wait: bool) -> Any:
        """Send what has changed; see ``OwnerCall``."""
        message = Message(self._owner)
        for module in self._modules:  # first, so that places name them by these numbers
            message.number(module.container)
        layout: Layout | None = None
        if not self._laid_out:
            numbers = {id(parameter): number for number, parameter in self._parameters.items()}
            layout = [
                [(numbers[id(each)], message.place(each._address)) for each in group] for group in self._groups.values()
            ]
        self._sent = [options[number] for number in self._groups]
        setup = Setup(layout, self._sent, self._in_message(self._changed, message), len(self._modules))
        if self._reference is None:
            kind = torch_class(type(optimizer))
            assert kind is not None
            which: int | Maker = Maker(kind, optimizer.defaults)
        else:
            which = message.number(self._reference)
        send = message.send_and_wait if wait else message.send
        return send(self._modules[0].container, set_up_owned, which, setup, label=_label(optimizer))

    def is_set_up(self, made: RRef[OwnedOptimizer] | None) -> None:
        """The owner has taken it over."""
        self.ready = self._laid_out = True
        self._reference = self._reference or made
        self._options = self._sent
        self._told = []
        for number, state in self._changed.items():
            if state is None:
                self._mirror.pop(number, None)
            else:
                self._mirror[number] = snapshot(state)

    def start(
        self, optimizer: Optimizer, options: Sequence[Options], attributes: dict[str, Any], plain: bool, wait: bool
    ) -> Any:
        """Let the owner step; see ``OwnerCall``. ``plain``: options are equal only if they are the same."""
        reference, again = self._reference, self._again
        assert reference is not None
        self._sent = sent = [options[number] for number in self._groups]
        known, self._options, self._again = self._options, None, True  # until the owner has stepped
        new = None if plain and sent == known else sent
        own = self._attributes
        self._new_attributes = (
            {}
            if own == attributes
            else {name: value for name, value in attributes.items() if name not in own or own[name] != value}
        )
        self._asked = [module.asked_now() for module in self._modules]
        scaling = {name: optimizer.__dict__[name] for name in _SCALING if name in optimizer.__dict__}
        arguments = again, new, self._new_attributes or None, scaling or None
        with own_call():
            ask = reference._call_and_wait if wait else reference._call
            return ask(_STEP, arguments, None, None, label=_label(optimizer))

    def finish(self, optimizer: Optimizer, stepped: Stepped) -> None:
        """The owner has stepped."""
        described, gradients = stepped
        self._again, self._options = False, self._sent
        self._attributes.update(self._new_attributes)
        for number, found in (described or {}).items():
            parameter = self._parameters.get(number)
            if parameter is not None:
                state = self._shown(number, found)
                optimizer.state[parameter] = state
                self._mirror[number] = snapshot(state)
        if gradients is not None:
            self._told = gradients
        for module, each, asked in zip(self._modules, self._told, self._asked, strict=True):
            module.learn(list(each), asked)

    def _changed_state(self, optimizer: Optimizer) -> dict[int, Any]:
        """State that is not what the owner has: it was loaded or changed here. None: it was deleted."""
        changed: dict[int, Any] = {}
        if not (optimizer.state or self._mirror):
            return changed
        for number, parameter in self._parameters.items():
            mirror = self._mirror.get(number)
            state = optimizer.state.get(parameter) or None
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

    def _shown(self, number: int, described: Any) -> Any:
        container = self._reference
        assert container is not None

        def show(path: tuple[Any, ...], value: Any) -> Any:
            return (
                RemoteTensor(Address(container, "state", (number, path)), value)
                if isinstance(value, TensorForm)
                else value
            )

        return map_leaves(show, described)


def _label(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__name__}.step"


def are_same(now: Sequence[Any], then: Sequence[Any]) -> bool:
    """Whether two lists have the same objects."""
    return len(now) == len(then) and all(map(operator.is_, now, then))
