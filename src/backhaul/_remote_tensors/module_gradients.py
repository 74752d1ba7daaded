"""What a driver knows of the gradients of a module on another worker, and the changes that it has not sent yet.

[Note: pending changes] ``optimizer.zero_grad()`` sets ``.grad`` of one parameter after the other. One message for each
would cost more than the step. So a change of ``.grad`` or ``requires_grad`` is kept here, and all changes go out
together before anything that could depend on them: the module's next forward (which carries them), a step, an
operation on remote tensors, and any backward pass of this worker. They are forgotten if no object here refers to the
module any more.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from backhaul._autograd.api import passes_ended
from backhaul._autograd.backward.engine import before_pass
from backhaul._remote_tensors.addresses import Address, Kind, Message, is_own_call
from backhaul._remote_tensors.live_proxies import LiveProxies
from backhaul._remote_tensors.on_owner import (
    Changes,
    Gradients,
    TensorForm,
    accumulate,
    change_all,
    describe_gradients,
    rebind,
)
from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.futures import Future
from backhaul._rref.handle import RRef
from backhaul._worker.worker import Worker
from backhaul.errors import BackhaulError, PeerLostError, UnknownWorkerError

_attaching = threading.Lock()  # guards the creation of a worker's DrivenModules


class ModuleGradients:
    """The gradients of one module, as its driver knows them. Thread-safe.

    Attributes:
        container: A reference to the module.
        worker: The driver.
        used: Whether the driver has run the module with grad mode enabled, so that its passes may change gradients.
        live: The proxies of its tensors that are in use.
    """

    def __init__(self, container: RRef[Any], driven: DrivenModules) -> None:
        self.container = container
        self.worker: Worker = container._rrefs.worker
        self.used = False
        self.live = LiveProxies(container)
        self._driven = driven
        self._lock = self._driven.lock
        self._known: Gradients | None = None
        self._known_at: object = None  # what ``DrivenModules.now`` returned
        self._none_read: set[int] = set()  # where None was read since the owner was asked
        self._cleared: dict[int, None] = {}
        self._zeroed: dict[int, None] = {}
        self._assigned: dict[int, torch.Tensor] = {}
        self._requires_grad: dict[int, bool] = {}
        self._on_its_way: tuple[Future[Any], Changes] | None = None  # the forward that carries the latest changes

    # What is there.

    def form_of(self, index: int) -> TensorForm | None:
        """The form of a parameter's gradient; None if it has none. Asks the owner unless it knows; see
        [Note: what is known].
        """
        with self._lock:
            if index in self._cleared:
                return None
            if (assigned := self._assigned.get(index)) is not None:
                return TensorForm.of(assigned)
        if self.is_stale() or index in self._none_read:
            self._driven.ask(self)
        known = self._known
        found = None if known is None else known[index]
        if found is None:
            self._none_read.add(index)
        return found

    def is_cleared(self, index: int) -> bool:
        """Whether the gradient is None as soon as the changes are made."""
        return index in self._cleared

    def is_stale(self) -> bool:
        """Whether the owner must be asked again."""
        return self._known is None or self._known_at != self._driven.now(passes_ended(self.worker))

    def learn(self, found: Gradients | None, at: int) -> None:
        """The owner has said which gradients there are. None: they may have changed since.

        Args:
            found: The forms.
            at: How many passes of the driver had ended when it asked.
        """
        self._none_read = set()
        self._known, self._known_at = found, self._driven.now(at)

    def forget(self) -> None:
        """The module runs: gradients may change."""
        self._known = None

    # Changes.

    def clear(self, index: int) -> None:
        """Set a gradient to None."""
        self._keep_gradient(index)
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
        """Set a gradient. Of a tensor that is here, the owner gets a copy as it is now."""
        self._keep_gradient(index)
        if not hasattr(gradient, "_address"):
            gradient = gradient.detach().clone()
        with self._lock:
            self._zeroed.pop(index, None)
            self._cleared.pop(index, None)
            self._assigned[index] = gradient
            self._driven.changed.add(self)

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
        message.send(self.container, accumulate, *arguments, label="accumulate a gradient").wait()
        self.used = True
        self.forget()

    def rebind(self, address: Address, value: torch.Tensor) -> TensorForm:
        """Set ``.data`` of a parameter or a buffer. Returns its form."""
        self.keep(address.kind)
        message = Message(address.owner)
        arguments = message.place(address), message.argument(value)
        form: TensorForm = message.send(self.container, rebind, *arguments, label="set .data").wait()
        return form

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
                self._none_read.add(index)
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
        self.await_forward()
        if self._assigned:
            self.send_changes()
        with self._lock:
            return self.take()

    def carried_by(self, forward: Future[Any], changes: Changes) -> None:
        """The changes go with this call."""
        self._on_its_way = forward, changes

    def await_forward(self) -> None:
        """Wait until changes that a forward carries have arrived. If the call may not have run, make them again."""
        on_its_way, self._on_its_way = self._on_its_way, None
        if on_its_way is None:
            return
        forward, changes = on_its_way
        try:
            forward.wait()
        except BackhaulError:
            self.restore(changes)
        except Exception:  # the module has raised it; the caller of the forward gets it
            return

    def settle_forward(self) -> None:
        """A forward has returned: keep nothing of it if it has carried changes."""
        on_its_way = self._on_its_way
        if on_its_way is not None and on_its_way[0].done():
            self.await_forward()

    def restore(self, changes: Changes) -> None:
        """These changes were not made: keep them for the next message, below what was changed since."""
        with self._lock:
            for index in changes.cleared:
                if index not in self._assigned:
                    self._zeroed.pop(index, None)
                    self._cleared[index] = None
            for index in changes.zeroed:
                if index not in self._assigned and index not in self._cleared:
                    self._zeroed[index] = None
            self._requires_grad = {**changes.requires_grad, **self._requires_grad}
            self._driven.changed.add(self)


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
        changed: The modules with changes to send.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.changed: weakref.WeakSet[ModuleGradients] = weakref.WeakSet()
        self._calls = 0
        self._all: weakref.WeakValueDictionary[tuple[Any, int], ModuleGradients] = weakref.WeakValueDictionary()

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

    def before_call(self) -> None:
        """This worker is about to call a function of the program, which may use the same modules."""
        if not is_own_call():
            self._calls += 1
            if self.changed:
                self.send_changes(every_forward=False)

    def _list(self) -> list[ModuleGradients]:
        with self.lock:
            return list(self._all.values())

    def send_changes(self, *, every_forward: bool = True) -> None:
        """Send all changes, one message to each owner, and wait until they are made; see [Note: pending changes].

        Args:
            every_forward: Whether to wait also for forwards that carry changes of modules without others to send.
        """
        for module in self._list() if every_forward else list(self.changed):
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
            assigned = {index: message.argument(gradient) for index, gradient in each.assigned.items()}
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
