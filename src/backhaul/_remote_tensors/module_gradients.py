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

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from backhaul._autograd.api import passes_ended
from backhaul._remote_tensors.addresses import Address, Kind, Message
from backhaul._remote_tensors.changes_on_owner import Changes
from backhaul._remote_tensors.live_proxies import LiveProxies
from backhaul._remote_tensors.on_owner import Gradients, TensorForm, accumulate, rebind
from backhaul._remote_tensors.pending_changes import PendingChanges
from backhaul._rpc.futures import Future
from backhaul._rref.handle import RRef
from backhaul._worker.worker import Worker

if TYPE_CHECKING:
    from backhaul._remote_tensors.driven_modules import DrivenModules

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
