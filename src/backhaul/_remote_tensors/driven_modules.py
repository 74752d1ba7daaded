"""The modules on other workers whose parameters one worker uses: which of them have changes to send, sending these, and
asking the owners which gradients there are. What is known of one module, and its changes: ``module_gradients``.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from backhaul._autograd.backward.engine import before_pass
from backhaul._remote_tensors.addresses import Message, is_own_call
from backhaul._remote_tensors.changes_on_owner import Changes, change_all
from backhaul._remote_tensors.module_gradients import Asked, ModuleGradients
from backhaul._remote_tensors.on_owner import Gradients, describe_gradients
from backhaul._remote_tensors.pending_changes import PendingChanges
from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.futures import Future
from backhaul._rref.handle import RRef
from backhaul._rref.replaced_values import is_lost
from backhaul._worker.worker import Worker
from backhaul.errors import PeerLostError, UnknownWorkerError

_attaching = threading.Lock()  # guards the creation of a worker's DrivenModules

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
