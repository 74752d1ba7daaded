"""What a driver knows of the gradients of a module on another worker, and the changes that it has not sent yet.

[Note: pending changes] ``optimizer.zero_grad()`` sets ``.grad`` of one parameter after the other. One message for each
would cost more than the step. So a change of ``.grad`` or ``requires_grad`` is kept here, and all changes go out
together before anything that could depend on them: the module's next forward (which carries them), a step, an
operation on remote tensors, and any backward pass of this worker. They are forgotten if no object here refers to the
module any more.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from backhaul._autograd.api import passes_ended
from backhaul._autograd.backward.engine import before_pass
from backhaul._remote_tensors.addresses import Address, Message
from backhaul._remote_tensors.on_owner import Changes, Gradients, TensorForm, change_all, describe_gradients
from backhaul._rpc.futures import Future
from backhaul._rref.handle import RRef
from backhaul._worker.worker import Worker
from backhaul.errors import PeerLostError, UnknownWorkerError

_attaching = threading.Lock()  # guards the creation of a worker's DrivenModules


class ModuleGradients:
    """The gradients of one module, as its driver knows them. Thread-safe.

    Attributes:
        container: A reference to the module.
        worker: The driver.
        used: Whether the driver has run the module with grad mode enabled, so that its passes may change gradients.
    """

    def __init__(self, container: RRef[Any], driven: DrivenModules) -> None:
        self.container = container
        self.worker: Worker = container._rrefs.worker
        self.used = False
        self._driven = driven
        self._lock = self._driven.lock
        self._known: Gradients | None = None
        self._known_at = -1  # how many passes of the driver had ended when it asked
        self._cleared: dict[int, None] = {}
        self._zeroed: dict[int, None] = {}
        self._assigned: dict[int, torch.Tensor] = {}
        self._requires_grad: dict[int, bool] = {}
        self._on_its_way: Future[Any] | None = None  # the forward that carries the latest changes

    # What is there.

    def form_of(self, index: int) -> TensorForm | None:
        """The form of a parameter's gradient; None if it has none. Asks the owner if a pass may have changed it."""
        with self._lock:
            if index in self._cleared:
                return None
            if (assigned := self._assigned.get(index)) is not None:
                return TensorForm.of(assigned)
        if self.is_stale():
            self._driven.ask(self)
        known = self._known
        return None if known is None else known[index]

    def is_stale(self) -> bool:
        """Whether the owner must be asked again."""
        return self._known is None or self._known_at != passes_ended(self.worker)

    def learn(self, found: Gradients | None, at: int) -> None:
        """The owner has said which gradients there are. None: they may have changed since.

        Args:
            found: The forms.
            at: How many passes of the driver had ended when it asked.
        """
        self._known, self._known_at = found, at

    def forget(self) -> None:
        """The module runs: gradients may change."""
        self.learn(None, -1)

    # Changes.

    def clear(self, index: int) -> None:
        """Set a gradient to None."""
        with self._lock:
            self._zeroed.pop(index, None)
            self._assigned.pop(index, None)
            self._cleared[index] = None
            self._driven.changed.add(self)

    def zero(self, index: int) -> None:
        """Set a gradient to zero."""
        with self._lock:
            if index not in self._cleared:
                self._zeroed[index] = None
                self._driven.changed.add(self)

    def assign(self, index: int, gradient: torch.Tensor) -> None:
        """Set a gradient."""
        with self._lock:
            self._zeroed.pop(index, None)
            self._cleared.pop(index, None)
            self._assigned[index] = gradient
            self._driven.changed.add(self)

    def require_grad(self, index: int, wanted: bool) -> None:
        """Set whether a parameter requires grad."""
        with self._lock:
            self._requires_grad[index] = wanted
            self._driven.changed.add(self)

    def take(self) -> Changes | None:
        """The changes to send now, if there are any. They count as sent. The caller holds the lock of the modules."""
        if self not in self._driven.changed:
            return None
        self._driven.changed.discard(self)
        changes = Changes(tuple(self._cleared), tuple(self._zeroed), self._assigned, self._requires_grad)
        known = self._known
        if known is not None:
            for index in changes.cleared:
                known[index] = None
            for index, gradient in changes.assigned.items():
                known[index] = TensorForm.of(gradient)
        self._cleared, self._zeroed, self._assigned, self._requires_grad = {}, {}, {}, {}
        return changes

    def send_changes(self) -> None:
        """Send the changes of all modules of the driver."""
        self._driven.send_changes()

    def take_for_forward(self) -> Changes | None:
        """The module is about to run: return the changes that the call carries. Call ``carried_by`` with its future."""
        if torch.is_grad_enabled():
            self.used = True
            self.forget()
        if self not in self._driven.changed:
            return None
        if self._assigned:
            self.send_changes()
        with self._lock:
            return self.take()

    def carried_by(self, forward: Future[Any]) -> None:
        """The changes go with this call."""
        self._on_its_way = forward

    def await_forward(self) -> None:
        """Wait until changes that a forward carries have arrived."""
        forward, self._on_its_way = self._on_its_way, None
        if forward is not None and not forward.done():
            with contextlib.suppress(Exception):  # the caller of the forward gets it
                forward.wait()


class DrivenModules:
    """Attached to a worker: the modules on other workers whose parameters it uses. Thread-safe.

    Attributes:
        lock: Guards ``changed`` and the changes of all modules.
        changed: The modules with changes to send.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.changed: weakref.WeakSet[ModuleGradients] = weakref.WeakSet()
        self._all: weakref.WeakValueDictionary[tuple[Any, int], ModuleGradients] = weakref.WeakValueDictionary()

    def find(self, container: RRef[Any]) -> ModuleGradients:
        """The gradients of a module, one object however many references to the module there are."""
        key = container._identity, container._id
        with self.lock:
            found = self._all.get(key)
            if found is None:
                found = self._all[key] = ModuleGradients(container, self)
            return found

    def _list(self) -> list[ModuleGradients]:
        with self.lock:
            return list(self._all.values())

    def send_changes(self) -> None:
        """Send all changes, one message to each owner, and wait until they are made; see [Note: pending changes]."""
        for module in self._list():
            if module._on_its_way is not None:
                module.await_forward()
        if not self.changed:
            return
        with self.lock:
            changes = {module: module.take() for module in list(self.changed)}
        messages: dict[int, tuple[Message, dict[int, Changes], RRef[Any]]] = {}
        for module, each in changes.items():
            if each is None:
                continue
            owner = module.container.owner().id
            message, made, _ = messages.setdefault(owner, (Message(owner), {}, module.container))
            assigned = {index: _sendable(message, gradient) for index, gradient in each.assigned.items()}
            number = message.number(module.container)
            made[number] = Changes(each.cleared, each.zeroed, assigned, each.requires_grad)
        errors: list[Exception] = []
        futures: list[Future[None]] = []
        for message, made, via in messages.values():
            with _collecting(errors):
                futures.append(message.send(via, change_all, made, label="change parameters"))
        for future in futures:
            with _collecting(errors):
                future.wait()
        if errors:
            raise errors[0]

    def ask(self, module: ModuleGradients) -> None:
        """Ask the owners of ``module``, and of all other modules that may have changed, which gradients there are."""
        stale = [each for each in self._list() if each is module or (each.used and each.is_stale())]
        at = passes_ended(module.worker)
        by_owner: dict[int, list[ModuleGradients]] = {}
        for each in stale:
            by_owner.setdefault(each.container.owner().id, []).append(each)
        calls = []
        for owner, modules in by_owner.items():
            message = Message(owner)
            try:
                for each in modules:
                    message.number(each.container)
                calls.append((modules, message.send(module.container, describe_gradients, label="list gradients")))
            except Exception:
                if module in modules:
                    raise
        for modules, call in calls:
            try:
                found = call.wait()
            except Exception:
                if module in modules:
                    raise
                continue
            for each, gradients in zip(modules, found, strict=True):
                each.learn(gradients, at)


@contextlib.contextmanager
def _collecting(errors: list[Exception]) -> Iterator[None]:
    """Keep the error of the block. A lost owner has nothing to change: what needs its tensors raises an error."""
    try:
        yield
    except (PeerLostError, UnknownWorkerError):
        return
    except Exception as error:
        errors.append(error)


def _sendable(message: Message, tensor: torch.Tensor) -> Any:
    """A tensor as an argument of a message: its place, if it is on the receiver."""
    address: Address | None = getattr(tensor, "_address", None)
    if address is None:
        return tensor.detach()
    if address.owner == message.owner:
        return message.place(address)
    return tensor.to_here()  # type: ignore[attr-defined]


def driven_modules(worker: Worker) -> DrivenModules:
    """The modules whose parameters a worker uses."""
    with _attaching:
        found: DrivenModules | None = worker.parts.get(DrivenModules)
        if found is None:
            found = DrivenModules()
            worker.attach(found)
        return found


def gradients_at(container: RRef[Any]) -> ModuleGradients:
    """What the worker that holds a reference to a module knows of the module's gradients."""
    return driven_modules(container._rrefs.worker).find(container)


def send_changes(worker: Worker) -> None:
    """As ``DrivenModules.send_changes``, for the modules of a worker."""
    found: DrivenModules | None = worker.parts.get(DrivenModules)
    if found is not None:
        found.send_changes()


before_pass.append(send_changes)
