"""What a driver knows of the gradients of a module on another worker, and the changes that it has not sent yet.

[Note: pending changes] ``optimizer.zero_grad()`` sets ``.grad`` of one parameter after the other. One message for each
would cost more than the step. So a change of ``.grad`` or ``requires_grad`` is kept here, and all changes go out
together before anything that could depend on them: the module's next forward (which carries them), a step, an
operation on remote tensors, and any backward pass of this worker. They are forgotten if no object here refers to the
module any more.

Any thread may send the changes of another, and the owner serves two messages in any order. So changes stay here until
a message that carries them has been answered. Whatever depends on them sends them again, and waits: it does not matter
which message arrives first, because the owner makes each change once, see ``changes_on_owner``.
"""

# Over the limit because what a driver knows, what it changes and what it sends must change under one lock.

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from backhaul._autograd.api import passes_ended
from backhaul._autograd.backward.engine import before_pass
from backhaul._remote_tensors.addresses import Address, Kind, Message, is_own_call
from backhaul._remote_tensors.changes_on_owner import Changes, change_all
from backhaul._remote_tensors.live_proxies import LiveProxies
from backhaul._remote_tensors.on_owner import Gradients, TensorForm, accumulate, describe_gradients, rebind
from backhaul._remote_tensors.pending_changes import PendingChanges
from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.futures import Future
from backhaul._rref.handle import RRef
from backhaul._rref.replaced_values import is_lost
from backhaul._worker.worker import Worker
from backhaul.errors import PeerLostError, UnknownWorkerError

_attaching = threading.Lock()  # guards the creation of a worker's DrivenModules

Asked = tuple[int, int]
"""When an owner is asked which gradients there are: how many passes of the driver have ended, and how often the driver
itself has changed the gradients of the module.
"""


# Over the limit because proxies reach all that concerns the gradients of a module through this one object.
class ModuleGradients:
    """The gradients of one module, as its driver knows them. Thread-safe.

    Attributes:
        container: A reference to the module.
        worker: The driver.
        used: Whether the driver has run the module with grad mode enabled, so that its passes may change gradients.
        pending: Its changes. The lock of ``DrivenModules`` guards them.
        live: The proxies of its tensors that are in use.
    """

    def __init__(self, container: RRef[Any], driven: DrivenModules) -> None:
        self.container = container
        self.worker: Worker = container._rrefs.worker
        self.used = False
        self.live = LiveProxies(container)
        self.pending = PendingChanges()
        self._driven = driven
        self._lock = self._driven.lock
        self._known: Gradients | None = None
        self._known_at: object = None  # what ``DrivenModules.now`` returned
        self._none_read: set[int] = set()  # where None was read since the owner was asked
        self._changed = 0  # how often the driver has changed the gradients

    # What is there.

    def form_of(self, index: int) -> TensorForm | None:
        """The form of a parameter's gradient; None if it has none. Asks the owner unless it knows; see
        [Note: what is known].
        """
        with self._lock:
            if index in self.pending.cleared:
                return None
            if (assigned := self.pending.assigned.get(index)) is not None:
                return TensorForm.of(assigned)
            known = None if self.is_stale() or index in self._none_read else self._known
        found = (known or self._driven.ask(self))[index]
        if found is None:
            self._none_read.add(index)
        return found

    def is_cleared(self, index: int) -> bool:
        """Whether the gradient is None as soon as the changes are made."""
        return index in self.pending.cleared

    def is_stale(self) -> bool:
        """Whether the owner must be asked again."""
        return self._known is None or self._known_at != self._driven.now(passes_ended(self.worker))

    def asked_now(self) -> Asked:
        """To be called before a message that asks is sent. ``learn`` takes the result."""
        return passes_ended(self.worker), self._changed

    def learn(self, found: Gradients, asked: Asked) -> None:
        """The owner has said which gradients there are. That counts unless the driver has changed them since."""
        ended, changed = asked
        with self._lock:
            if changed == self._changed:
                self._none_read = set()
                self._known, self._known_at = found, self._driven.now(ended)

    def forget(self) -> None:
        """The module runs: gradients may change."""
        with self._lock:
            self._changed += 1
            self._known = None

    # Changes.

    def clear(self, index: int) -> None:
        """Set a gradient to None."""
        self._keep_gradient(index)
        with self._lock:
            self.pending.zeroed.pop(index, None)
            self.pending.assigned.pop(index, None)
            self.pending.cleared[index] = None
            self._driven.note(self)

    def zero(self, index: int) -> None:
        """Set a gradient to zero."""
        with self._lock:
            if index not in self.pending.cleared:
                self.pending.zeroed[index] = None
                self._driven.note(self)

    def assign(self, index: int, gradient: torch.Tensor) -> None:
        """Set a gradient. Of a tensor that is here, the owner gets a copy as it is now."""
        self._keep_gradient(index)
        if not hasattr(gradient, "_address"):
            gradient = gradient.detach().clone()
        with self._lock:
            self.pending.zeroed.pop(index, None)
            self.pending.cleared.pop(index, None)
            self.pending.assigned[index] = gradient
            self._driven.note(self)

    def _keep_gradient(self, index: int) -> None:
        if self.live.is_kept("gradient", index):
            self.keep("gradient")

    def keep(self, *kinds: Kind) -> None:
        """Let the proxies in use stand for the tensors that are there now, whatever replaces them."""
        self.send_changes()
        self.live.keep(*kinds)

    def assign_data(self, gradient: torch.Tensor, value: torch.Tensor) -> None:
        """Set ``.data`` of a gradient: it stays the gradient, and other proxies of it keep the old memory."""
        address: Address = gradient._address  # type: ignore[attr-defined]
        self.assign(address.key, value)
        gradient._address = address  # type: ignore[attr-defined]
        self.live.set_gradient(address.key, gradient)

    def accumulate(self, address: Address, gradient: torch.Tensor) -> None:
        """Add to the gradient of a parameter."""
        self.send_changes()
        message = Message(address.owner)
        arguments = message.place(address), message.argument(gradient)
        message.send_and_wait(self.container, accumulate, *arguments, label="accumulate a gradient")
        self.used = True
        self.forget()

    def rebind(self, address: Address, value: torch.Tensor) -> TensorForm:
        """Set ``.data`` of a parameter or a buffer. Returns its form."""
        self.keep(address.kind)
        message = Message(address.owner)
        arguments = message.place(address), message.argument(value)
        form: TensorForm = message.send_and_wait(self.container, rebind, *arguments, label="set .data")
        return form

    def require_grad(self, index: int, wanted: bool) -> None:
        """Set whether a parameter requires grad."""
        with self._lock:
            self.pending.requires_grad[index] = wanted
            self._driven.note(self)

    def to_send(self) -> list[Changes]:
        """The changes that are not known to be made. The caller holds the lock of the modules, and sends them."""
        new = self.pending.take_new(self._driven.new_number())
        if new is not None:
            self._changed += 1
            known = self._known
            if known is not None:
                for index in new.cleared:
                    known[index] = None
                    self._none_read.add(index)
                for index, gradient in new.assigned.items():
                    known[index] = TensorForm.of(gradient)
        sent = self.pending.sent()
        self._leave_if_made()
        return sent

    def confirm(self, changes: Sequence[Changes]) -> None:
        """Changes were made. The caller holds the lock of the modules."""
        if changes:
            self.pending.confirm(changes[-1].number)
        self._leave_if_made()

    def _leave_if_made(self) -> None:
        if self.pending.is_empty():
            self._driven.changed.pop(self, None)

    def send_changes(self) -> None:
        """Send the changes of all modules of the driver."""
        self._driven.send_changes()

    def take_for_forward(self) -> list[Changes]:
        """The module is about to run: return the changes that the call carries. Call ``carried_by`` with its future."""
        if torch.is_grad_enabled():
            self.used = True
            self.forget()
        if self not in self._driven.changed:
            return []
        with self._lock:
            changes = self.to_send()
        if any(each.assigned for each in changes):
            self.send_changes()
            return []
        return changes

    def were_made(self, changes: Sequence[Changes]) -> None:
        """A call that has carried the changes was answered."""
        with self._lock:
            self.confirm(changes)

    def carried_by(self, forward: Future[Any], changes: Sequence[Changes]) -> None:
        """The changes go with this call."""
        with self._lock:
            self.pending.carried_by(forward, changes[-1].number)


_ChangeMessage = tuple[Message, dict[int, list[Changes]], RRef[Any]]
"""A message to one owner, the changes by module, and a reference to something there."""

_asked_here: contextvars.ContextVar[object] = contextvars.ContextVar("asked_here", default=None)
"""What tells this thread or handler from others, once it has asked an owner."""


class DrivenModules:
    """Attached to a worker: the modules on other workers whose parameters it uses. Thread-safe.

    [Note: what is known] Other workers can compute gradients too, and the owner itself. So what an owner has said of
    its gradients holds only in the thread or handler that has asked, until a pass of this worker ends or it makes a
    call that could be the cause of gradients, and None holds for one look. Within one loop over all parameters, as in
    ``clip_grad_norm_``, the owner is asked once.

    Attributes:
        lock: Guards ``changed`` and the changes of all modules.
        changed: The modules with changes that are not known to be made.
        new_number: Returns the number of the next changes. The caller holds the lock.
        undelivered: How many messages with changes were given up, because their owner was lost.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.undelivered = 0
        self._has_new = False  # whether a module may have changes that were not sent yet
        self.changed: weakref.WeakKeyDictionary[ModuleGradients, None] = weakref.WeakKeyDictionary()  # in order
        self.new_number = itertools.count().__next__
        self._calls = 0
        self._all: weakref.WeakValueDictionary[tuple[Any, int], ModuleGradients] = weakref.WeakValueDictionary()
        self._sending = threading.local()  # its ``here`` is True on a thread that sends changes

    def find(self, container: RRef[Any]) -> ModuleGradients:
        """The gradients of a module, one object however many references to the module there are."""
        key = container._identity, container._id
        with self.lock:
            found = self._all.get(key)
            if found is None:
                found = self._all[key] = ModuleGradients(container, self)
            return found

    def now(self, passes: int) -> object:
        """Differs whenever gradients may have changed. ``passes``: how many passes of this worker have ended."""
        mark = _asked_here.get()
        if mark is None:
            _asked_here.set(mark := object())
        return passes, self._calls, mark

    def note(self, module: ModuleGradients) -> None:
        """A module has a change that was not sent yet. The caller holds the lock."""
        self.changed[module] = None
        self._has_new = True

    def before_call(self) -> None:
        """This worker is about to call a function of the program, which may use the same modules."""
        if not is_own_call():
            self._calls += 1
            if self._has_new:
                self._send_new()

    def _send_new(self) -> None:
        with self.lock:
            self._has_new = any(module.pending.has_new() for module in self.changed)
        if self._has_new:
            self.send_changes()

    @contextlib.contextmanager
    def replacing(self, module: ModuleGradients) -> Iterator[None]:
        """In the block, the container of ``module`` comes to refer to another module. What is known is forgotten, and
        changes that were not made are dropped.
        """
        container = module.container
        with self.lock:
            self._all.pop((container._identity, container._id), None)
            self.changed.pop(module, None)
            module.pending = PendingChanges()
        yield
        module.forget()
        with self.lock:
            self._all[container._identity, container._id] = module

    def _list(self) -> list[ModuleGradients]:
        with self.lock:
            return list(self._all.values())

    def send_changes(self) -> None:
        """Send all changes, one message to each owner, and wait until they are made; see [Note: pending changes]."""
        if not self.changed or getattr(self._sending, "here", False):
            return  # the thread fetches a gradient that it is about to send
        with self.lock:
            changes = {module: sent for module in list(self.changed) if (sent := module.to_send())}
            for module in [module for module in changes if is_lost(module.container)]:
                module.confirm(changes.pop(module))  # a message that names it could not be sent
        if not changes:
            return
        errors: list[Exception] = []
        self._sending.here = True
        try:
            messages = self._messages(changes, errors)
        finally:
            self._sending.here = False
        if left := self._send(messages, errors):  # perhaps only a channel is lost, and another can be opened
            self.undelivered += len(self._send(left, errors))
        with self.lock:
            for module, each in changes.items():
                module.confirm(each)
        if errors:
            raise errors[0]

    @staticmethod
    def _send(messages: Sequence[_ChangeMessage], errors: list[Exception]) -> list[_ChangeMessage]:
        """Send messages, and wait until they are answered. Returns those to owners that could not be reached."""
        lost: list[_ChangeMessage] = []
        futures: list[tuple[_ChangeMessage, Future[None]]] = []
        for place, each in enumerate(messages):
            message, made, via = each
            with _collecting(errors, lost, each):
                call = via, change_all, via._rrefs.worker.incarnation, made
                if place + 1 < len(messages):
                    futures.append((each, message.send(*call, label="change parameters")))
                else:
                    message.send_and_wait(*call, label="change parameters")
        for each, future in futures:
            with _collecting(errors, lost, each):
                future.wait()
        return lost

    @staticmethod
    def _messages(changes: dict[ModuleGradients, list[Changes]], errors: list[Exception]) -> list[_ChangeMessage]:
        """For each owner the message, what it says, and a reference to something there."""
        messages: dict[int, _ChangeMessage] = {}
        for module, sent in changes.items():
            owner = module.container.owner().id
            message, made, _ = messages.setdefault(owner, (Message(owner), {}, module.container))
            with _noting(errors):
                made[message.number(module.container)] = [
                    Changes(
                        each.number,
                        each.cleared,
                        each.zeroed,
                        {index: message.argument(gradient) for index, gradient in each.assigned.items()},
                        each.requires_grad,
                    )
                    for each in sent
                ]
        return list(messages.values())

    def ask(self, module: ModuleGradients) -> Gradients:
        """Ask the owners of ``module``, and of all other modules that may have changed, which gradients there are.
        Returns those of ``module``. Another thread may learn something else meanwhile.
        """
        stale = [
            each
            for each in self._list()
            if each is module or (each.used and each.is_stale() and not is_lost(each.container))
        ]
        with self.lock:
            on_their_way = [each for each in stale if each.pending.sent()]
        if on_their_way:
            self.send_changes()
        by_owner: dict[int, list[tuple[ModuleGradients, Asked]]] = {}
        for each in stale:
            by_owner.setdefault(each.container.owner().id, []).append((each, each.asked_now()))
        calls = []
        for owner, modules in by_owner.items():
            message = Message(owner)
            asks_module = any(each is module for each, _ in modules)
            try:
                for each, _ in modules:
                    message.number(each.container)
                call = modules[0][0].container, describe_gradients
                wait = (
                    functools.partial(message.send_and_wait, *call, label="list gradients")
                    if len(by_owner) == 1
                    else message.send(*call, label="list gradients").wait
                )
                calls.append((modules, asks_module, wait))
            except Exception:
                if asks_module:
                    raise
        answer: Gradients | None = None
        for modules, asks_module, wait in calls:
            try:
                found = wait()
            except Exception:
                if asks_module:
                    raise
                continue
            for (each, asked), gradients in zip(modules, found, strict=True):
                each.learn(gradients, asked)
                if each is module:
                    answer = gradients
        assert answer is not None
        return answer


@contextlib.contextmanager
def _noting(errors: list[Exception]) -> Iterator[None]:
    """Keep the error of the block."""
    try:
        yield
    except Exception as error:
        errors.append(error)


@contextlib.contextmanager
def _collecting(errors: list[Exception], lost: list[_ChangeMessage], message: _ChangeMessage) -> Iterator[None]:
    """Keep the error of the block. If the owner is lost, keep the message: what needs its tensors raises an error."""
    try:
        yield
    except (PeerLostError, UnknownWorkerError):
        lost.append(message)
    except Exception as error:
        errors.append(error)


def driven_modules(worker: Worker, client: CallClient) -> DrivenModules:
    """The modules whose parameters a worker uses. ``client`` makes the calls of that worker."""
    with _attaching:
        found: DrivenModules | None = worker.parts.get(DrivenModules)
        if found is None:
            found = DrivenModules()
            worker.attach(found)
            client.before_call = found.before_call
        return found


def gradients_at(container: RRef[Any]) -> ModuleGradients:
    """What the worker that holds a reference to a module knows of the module's gradients."""
    return driven_modules(container._rrefs.worker, container._rrefs.client).find(container)


def send_changes(worker: Worker) -> None:
    """As ``DrivenModules.send_changes``, for the modules of a worker."""
    found: DrivenModules | None = worker.parts.get(DrivenModules)
    if found is not None:
        found.send_changes()


before_pass.append(send_changes)
