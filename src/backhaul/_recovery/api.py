"""``retry_step``: runs the actions of a ``StepLog``."""

from __future__ import annotations

import dataclasses
import logging
import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, TypeVarTuple, overload

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from backhaul._autograd.api import undoing_passes
from backhaul._autograd.torch_engine.hooks import count_own_handle
from backhaul._recovery.cluster_snapshot import ClusterSnapshot, StateKeeper, is_gone
from backhaul._recovery.local_snapshot import save_local
from backhaul._recovery.random_state import RandomState
from backhaul._recovery.step_log import StepAction, StepLog, StepOutcome
from backhaul._recovery.trained_state import TrainedState
from backhaul._remote_tensors.driven_modules import driven_modules
from backhaul._rpc.arguments import keywords, positional
from backhaul._rpc.node import Node
from backhaul._runtime.compile_marks import graph_break
from backhaul._worker.worker import Worker, current_worker
from backhaul.errors import BackwardTimeoutError, CallTimeoutError, PeerLostError
from backhaul.optim.optimizer import DistributedOptimizer

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

log = logging.getLogger("backhaul")

_ATTRIBUTE = "_kept_for_retry_step"

_LOSSES = (PeerLostError, CallTimeoutError, BackwardTimeoutError)


@dataclasses.dataclass(slots=True)
class RetriedCall:
    """A step with its arguments.

    Attributes:
        random: The random numbers of this worker when it was first made.
    """

    step: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    random: RandomState | None = None


class _Kept:
    """What is kept of one state between calls. One of the objects of the state has it as an attribute, so that both end
    together, although the calls in the log refer to that object.
    """

    def __init__(self, worker: Worker, given: Sequence[Any]) -> None:
        self.log: StepLog[RetriedCall, ClusterSnapshot] = StepLog()
        self.keeper = StateKeeper(worker)
        self.worker = worker
        self.running = threading.Lock()  # held while a call is made; it guards all else
        self._given = [weakref.ref(each) for each in given]

    def is_of(self, worker: Worker, given: Sequence[Any]) -> bool:
        """Whether this is the state of the same worker, with the same objects."""
        known = [ref() for ref in self._given]
        return worker is self.worker and len(given) == len(known) and all(map(operator.is_, given, known))

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the object has no snapshot."""

    def __reduce__(self) -> Any:
        return _no_snapshot, ()


_latest: weakref.WeakKeyDictionary[nn.Module, weakref.ref[_Kept]] = weakref.WeakKeyDictionary()
"""The state that had a step last, by module on another worker. Snapshots of other states are out of date."""


def _no_snapshot() -> None:
    """What a copy of ``_Kept`` in a file is."""


def _kept_of(worker: Worker, given: Sequence[Any]) -> _Kept:
    for kind in (torch.optim.Optimizer, nn.Module):
        if (holder := next((each for each in given if isinstance(each, kind)), None)) is not None:
            found = vars(holder).get(_ATTRIBUTE)
            if found is None or not found.is_of(worker, given):
                found = vars(holder)[_ATTRIBUTE] = _Kept(worker, given)
            return found
    raise ValueError("`state` has no optimizer and no module; pass all that the step changes")


# fmt: off
@overload
def retry_step(step: Callable[..., T], state: Any, args: list[Any], kwargs: Mapping[str, Any] | None = ..., *,
               attempts: int = ..., wait: float = ..., restore: Callable[[], Any] | None = ...,
               snapshot_every: int = ...) -> T: ...
@overload
def retry_step(step: Callable[[*Ts], T], state: Any, args: tuple[*Ts], kwargs: None = ..., *,
               attempts: int = ..., wait: float = ..., restore: Callable[[], Any] | None = ...,
               snapshot_every: int = ...) -> T: ...
@overload
def retry_step(step: Callable[[], T], state: Any, args: tuple[()] = ..., kwargs: None = ..., *,
               attempts: int = ..., wait: float = ..., restore: Callable[[], Any] | None = ...,
               snapshot_every: int = ...) -> T: ...
@overload
def retry_step(step: Callable[..., T], state: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *,
               attempts: int = ..., wait: float = ..., restore: Callable[[], Any] | None = ...,
               snapshot_every: int = ...) -> T: ...
@overload
def retry_step(step: Callable[..., T], state: Any, *, kwargs: Mapping[str, Any],
               attempts: int = ..., wait: float = ..., restore: Callable[[], Any] | None = ...,
               snapshot_every: int = ...) -> T: ...
# fmt: on


@graph_break
def retry_step(
    step: Callable[..., Any],
    state: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    attempts: int = 3,
    wait: float = 30.0,
    restore: Callable[[], Any] | None = None,
    snapshot_every: int = 1,
) -> Any:
    """Make a training step, and make it again if it fails because a worker was lost.

    Once this returns, the state has been changed by this step exactly once, also if a worker was lost in the middle of
    the update. If it raises an exception, the state is that before the step.

    A worker that takes the place of a lost one (``init(name, join=...)``) gets the modules that were there, from a
    snapshot which this worker keeps. The other workers go back to that snapshot too. ``docs/recovery.md`` has all the
    rules.

    Args:
        step: The step: a function that computes a loss, its gradients and the update. It is run again as it is, so it
            must change nothing but ``state``.
        state: All that the step changes, one object or several: models with modules on other workers, references to
            modules, optimizers, schedulers, gradient scalers, anything with ``state_dict`` and ``load_state_dict``.
        args: Positional arguments of ``step``, such as the batch.
        kwargs: Keyword arguments of ``step``.
        attempts: How often the step is tried.
        wait: How many seconds to wait for a worker that takes the place of a lost one, each time.
        restore: A function without arguments that runs on such a worker, before it gets its modules.
        snapshot_every: Take a snapshot after that many steps. With more than 1, steps that have returned may be run
            again after a loss, with the arguments that they had.

    Returns:
        What ``step`` has returned.

    Raises:
        ValueError: ``state`` is not complete.
        PeerLostError: A worker was lost, and no worker took its place in time, or this was the last attempt.
        Exception: What ``step`` has raised for another reason. It is not tried again.

    Example:
        >>> import torch, backhaul as bh
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> def step(x):
        ...     loss = model(x).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     return loss.item()
        >>> with bh.cluster(2):
        ...     model = bh.nn.split(model, {"0": "worker1"})
        ...     optimizer = torch.optim.AdamW(model.parameters())
        ...     losses = [bh.retry_step(step, (model, optimizer), (torch.ones(2, 4),)) for _ in range(3)]
        >>> losses[2] < losses[0]
        True
    """
    if not callable(step):
        raise TypeError(f"step must be a function, not a {type(step).__name__}")
    for name, value in (("attempts", attempts), ("snapshot_every", snapshot_every)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
    if wait < 0:
        raise ValueError(f"wait must not be negative, got {wait!r}")
    if restore is not None and not callable(restore):
        raise TypeError(f"restore must be a function, not a {type(restore).__name__}")
    given = list(state) if isinstance(state, (tuple, list)) else [state]
    worker, objects = current_worker(), TrainedState(given)
    kept = _kept_of(worker, given)
    if not kept.running.acquire(blocking=False):
        raise RuntimeError("a step with the same state has not ended; make one step after the other")
    try:
        if not kept.log.torn and any(_latest.get(module, lambda: kept)() is not kept for module in objects.remote):
            kept.log = StepLog()
        call = RetriedCall(step, positional(args), keywords(kwargs))
        made = _Attempts(worker, kept, objects, restore, wait).run(call, attempts, snapshot_every)
    finally:
        if kept.log.snapshot is not None:
            _latest.update((module, weakref.ref(kept)) for module in objects.remote)
        kept.running.release()
    return made


class _Attempts:
    """Makes one call: does what the log says, until it says to return or to raise."""

    def __init__(
        self, worker: Worker, kept: _Kept, state: TrainedState, restore: Callable[[], Any] | None, wait: float
    ) -> None:
        self._worker = worker
        self._log, self._keeper = kept.log, kept.keeper
        self._state = state
        self._restore, self._wait = restore, wait
        self._members: dict[str, str] = {}
        self._result: Any = None
        self._error: Exception | None = None
        self._saved: ClusterSnapshot | None = None  # what the last action has saved
        self._changed = False  # by the program, since the last call

    def run(self, call: RetriedCall, attempts: int, every: int) -> Any:
        """Make the call."""
        action = self._log.begin(call, attempts=attempts, every=every)
        try:
            while action not in (StepAction.RETURN, StepAction.RAISE):
                action = self._log.next(self._do(action, call), self._saved)
        except BaseException:
            self._log.interrupt()
            self._keeper.forget_notes()  # they may be of a state that no snapshot has
            raise
        if action is StepAction.RAISE:
            self._raise(call)
        return self._result

    def _do(self, action: StepAction, call: RetriedCall) -> StepOutcome:
        self._members = self._list_members()
        driven = driven_modules(self._worker, self._worker.part(Node).client)
        undelivered = driven.undelivered
        try:
            outcome = self._try(action, call)
            if driven.undelivered != undelivered and action is not StepAction.RESTORE:
                raise PeerLostError("changes of gradients have not reached a worker, which may have others now")
            return outcome
        except Exception as error:
            lost = self._is_loss(error)
            if lost:
                text = str(error)  # a log record with the error itself would keep its frames
                log.warning("%s failed: %s", _NAMES[action], text)
            if action is StepAction.RESTORE and self._error is not None:
                self._error.add_note(f"the state could not be restored: {type(error).__name__}: {error}")
            else:
                self._error = error
            return StepOutcome.LOST if lost else StepOutcome.FAILED

    def _try(self, action: StepAction, call: RetriedCall) -> StepOutcome:
        if action is StepAction.RUN:
            self._run_current(call)
            return StepOutcome.DONE
        state, saved = self._state, self._log.snapshot
        if action is StepAction.SAVE:
            self._saved = self._keeper.save(state)
            self._changed = False
            return StepOutcome.DONE
        assert saved is not None
        if action is StepAction.CHECK:
            self._changed = not self._keeper.is_same(state, saved, with_local=bool(self._log.done))
            if not (self._changed or self._log.done):  # what is here is not compared, and may have changed
                self._log.renew(dataclasses.replace(saved, local=save_local(state)))
            return StepOutcome.CHANGED if self._changed else StepOutcome.DONE
        if self._changed:
            self._keeper.warn_of_undone()
            self._changed = False
        self._keeper.restore(state, saved, self._restore, self._wait)
        return StepOutcome.DONE

    def _run_current(self, call: RetriedCall) -> None:
        current = self._log.current
        if current.random is None:
            current.random = RandomState.now()
        else:
            current.random.put_back()
        with undoing_passes(self._worker), _only_steps_of(self._state.given):
            try:
                result = current.step(*current.args, **current.kwargs)
            finally:
                self._state = TrainedState(self._state.given)  # it may have other tensors now
        if current is call:
            self._result = result
            if not self._log.saves_next:
                self._keeper.note_end(self._state)

    def _raise(self, call: RetriedCall) -> None:
        error = self._error
        assert error is not None
        self._error = self._result = None
        if self._log.torn:
            error.add_note("the state will be restored by the next retry_step()")
        elif call.random is not None:
            call.random.put_back()
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame

    def _list_members(self) -> dict[str, str]:
        peers = self._worker.part(Node).peers
        return {peer.info.name: peer.record.incarnation for peer in peers if not peer.lost}

    def _is_loss(self, error: BaseException) -> bool:
        """Whether an error comes from the loss of a worker, or from one that did not answer in time."""
        if is_gone(error, _LOSSES):
            return True
        now = self._list_members()
        if not now.keys() >= set(self._state.workers):
            return True
        return any(now.get(name) != incarnation for name, incarnation in self._members.items())


_NAMES = {
    StepAction.CHECK: "the look at the state before a step",
    StepAction.SAVE: "a snapshot",
    StepAction.RESTORE: "a restore",
    StepAction.RUN: "a step",
}


@contextmanager
def _only_steps_of(given: Sequence[Any]) -> Iterator[None]:
    """In the block, a step of an optimizer that is not part of the state is an error: nothing would undo it."""
    thread, known = threading.get_ident(), {id(each) for each in given}
    for each in given:
        if isinstance(each, DistributedOptimizer):
            known |= each._optimizers_here()

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if threading.get_ident() == thread and id(optimizer) not in known:
            raise ValueError(
                f"the step uses an optimizer ({type(optimizer).__name__}) that is not in `state`; pass it to "
                "retry_step(): else nothing undoes its updates"
            )

    count_own_handle()
    handle = register_optimizer_step_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()
