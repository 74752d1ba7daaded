"""Saves the state of all workers to the worker that trains, and restores it on workers that are there then.

[Note: where snapshots are] The worker that trains holds them, in its memory. If it is lost, the run is: nothing else
knows which step is under way. So a second place would cost as much, and help in no other case.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from backhaul._autograd.failure.member_calls import POLL_SECONDS, outside_contexts
from backhaul._recovery import owner_snapshot
from backhaul._recovery.local_snapshot import LocalSnapshot, local_mark, remote_leaves, restore_local, save_local
from backhaul._recovery.owner_snapshot import NO_NOTE, Installed, Note, OwnerSnapshot
from backhaul._recovery.random_state import PROCESS
from backhaul._recovery.trained_state import TrainedState
from backhaul._remote_tensors.addresses import own_call
from backhaul._remote_tensors.driven_modules import driven_modules, send_changes
from backhaul._remote_tensors.on_owner import Description
from backhaul._remote_tensors.remote_tensor import RemoteTensor, fetch
from backhaul._rpc.api import rpc_async
from backhaul._rpc.compression import as_it_is
from backhaul._rpc.futures import Future
from backhaul._rpc.node import Node
from backhaul._rref.replaced_values import exchange
from backhaul._worker import deadlines
from backhaul._worker.worker import Worker
from backhaul.errors import CallTimeoutError, PeerLostError, UnknownWorkerError
from backhaul.nn.module_transfer import unpack
from backhaul.optim.nested_state import map_leaves
from backhaul.optim.optimizer import same_value
from backhaul.optim.remote_step import forget_owners

T = TypeVar("T")

_GONE = (PeerLostError, UnknownWorkerError, CallTimeoutError)


def is_gone(error: BaseException | None, kinds: tuple[type[BaseException], ...] = _GONE) -> bool:
    """Whether a call has failed because a worker is not there, or not yet. The reason may be the cause of the error: a
    reply whose channel was lost cannot be decoded if it has a reference.
    """
    while error is not None:
        if isinstance(error, kinds):
            return True
        error = error.__cause__ or error.__context__
    return False


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """The state of all workers.

    Attributes:
        local: The state of this worker.
        owners: The state of each other worker, by name.
        values: The values of remote tensors in the state of optimizers, by the id of the tensor.
        leaves: These tensors, so that no other gets their ids.
        distributed: The state of each distributed optimizer, and the options of its groups at that time.
    """

    local: LocalSnapshot
    owners: dict[str, OwnerSnapshot]
    values: dict[int, torch.Tensor]
    leaves: list[RemoteTensor]
    distributed: list[tuple[Any, list[dict[str, Any]]]]


class StateKeeper:
    """Saves and restores one state. One thread uses it at a time.

    Args:
        worker: The worker that trains.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._local_mark: object = None
        self._loads: list[int] = []  # how often each distributed optimizer has loaded a state
        self._notes: dict[str, Note] = {}
        self._incarnations: dict[str, str] = {}

    def save(self, state: TrainedState) -> ClusterSnapshot:
        """Take a snapshot."""
        send_changes(self._worker)  # such as gradients that zero_grad has cleared
        with outside_contexts(), own_call(), torch.no_grad():
            calls = {
                name: rpc_async(name, owner_snapshot.save, (*state.references_to(name), PROCESS))
                for name in state.workers
            }
            leaves = _leaves_of(state)
            values = {id(leaf): value.clone() for leaf, value in zip(leaves, fetch(leaves), strict=True)}
            distributed = [_cloned(each.state_dict()) for each in state.distributed]
            found = {name: call.wait() for name, call in calls.items()}
            for snapshot, _, _ in found.values():
                unpack(snapshot.transfer)
        self._notes = {name: each[1] for name, each in found.items()}
        self._incarnations = {name: each[2] for name, each in found.items()}
        owners = {name: each[0] for name, each in found.items()}
        self._loads = _loads_of(state)
        local = save_local(state)
        return ClusterSnapshot(local, owners, values, leaves, list(zip(distributed, local.distributed, strict=True)))

    def note_end(self, state: TrainedState) -> None:
        """A call has ended that no ``save`` follows. What changes from now on is a change of the program."""
        send_changes(self._worker)
        calls = self._ask_all(state, owner_snapshot.note, lambda _: ())
        self._notes = {name: call.wait() for name, call in calls.items()}
        self._loads = _loads_of(state)
        self._local_mark = local_mark(state)

    def is_same(self, state: TrainedState, saved: ClusterSnapshot, *, with_local: bool) -> bool:
        """Whether the state is what it was after the last call. ``with_local``: also what is on this worker.

        Raises:
            BackhaulError: A worker is lost. The others may have changed, and a warning says so.
        """
        send_changes(self._worker)
        same = all(id(leaf) in saved.values for leaf in _leaves_of(state)) or with_local
        same = same and _loads_of(state) == self._loads
        if with_local:
            same = same and local_mark(state) == self._local_mark
        lost: Exception | None = None
        for call in self._ask_all(
            state, owner_snapshot.is_same, lambda name: (self._notes.get(name, NO_NOTE),)
        ).values():
            try:
                same = call.wait() and same
            except Exception as error:
                lost = lost or error
        if lost is not None:
            if not same:
                self.warn_of_undone()
            raise lost
        return same

    def forget_notes(self) -> None:
        """The state counts as changed."""
        self._notes = {}

    @staticmethod
    def warn_of_undone() -> None:
        """Say that a restore undoes more than a failed call."""
        warnings.warn(
            "a worker was lost after the program had changed the state outside retry_step(); these changes are undone: "
            "make them again, or make them inside a step",
            RuntimeWarning,
            stacklevel=5,
        )

    @staticmethod
    def _ask_all(
        state: TrainedState, function: Callable[..., T], more: Callable[[str], tuple[Any, ...]]
    ) -> dict[str, Future[T]]:
        """Call a function of ``owner_snapshot`` on all workers."""
        with outside_contexts(), own_call(), torch.no_grad():
            return {
                name: rpc_async(name, function, (*state.references_to(name), PROCESS, *more(name)))
                for name in state.workers
            }

    # Restoring.

    def restore(
        self, state: TrainedState, saved: ClusterSnapshot, restore: Callable[[], Any] | None, wait: float
    ) -> None:
        """Make the state that of the snapshot. This worker's part is restored even if an error is raised.

        Args:
            state: The state.
            saved: The snapshot.
            restore: What workers call that have taken the place of others, before all else.
            wait: How many seconds to wait for them.

        Raises:
            BackhaulError: A worker was not there in time.
            Exception: ``restore`` has raised it, or the snapshot cannot be restored.
        """
        restore_local(state, saved.local)
        deadline = self._worker.runtime.now() + wait
        while True:
            try:
                with outside_contexts(), own_call(), as_it_is(), torch.no_grad():
                    self._replace(state, saved, self._install(saved, restore, deadline))
                    for number, optimizer in enumerate(state.distributed):
                        optimizer._make_again(
                            _with_changes(*saved.distributed[number], saved.local.distributed[number])
                        )
                    self._loads = _loads_of(state)
                return
            except Exception as error:
                if not is_gone(error):
                    raise
                self._pause(deadline, error)

    def _install(
        self, saved: ClusterSnapshot, restore: Callable[[], Any] | None, deadline: float
    ) -> dict[str, Installed]:
        """Let all workers make the modules of the snapshot, each as soon as it is there."""
        made: dict[str, Installed] = {}
        while True:
            calls: dict[str, Future[Installed]] = {}
            failed: Exception | None = None
            for name, snapshot in saved.owners.items():
                if name not in made:
                    try:
                        given = snapshot, restore, self._incarnations[name], PROCESS
                        calls[name] = rpc_async(name, owner_snapshot.install, given)
                    except Exception as error:
                        if not is_gone(error):
                            raise
                        failed = error
            for name, call in calls.items():
                try:
                    made[name] = call.wait()
                except Exception as error:
                    if not is_gone(error):
                        raise
                    failed = error
            if failed is None:
                return made
            self._pause(deadline, failed)

    def _pause(self, deadline: float, error: Exception) -> None:
        """Wait a little for a worker to take the place of a lost one. Raises ``error`` if there is no time left."""
        runtime = self._worker.runtime
        left = deadline - runtime.now()
        if left <= 0:
            raise error
        with self._worker.blocking():
            deadlines.wait(runtime.one_shot(), min(POLL_SECONDS, left), "a step was not made again")

    def _replace(self, state: TrainedState, saved: ClusterSnapshot, made: Mapping[str, Installed]) -> None:
        """Let all references of the program refer to the new objects."""
        driven = driven_modules(self._worker, self._worker.part(Node).client)
        gradients = {id(each._gradients.container): each._gradients for each in state.remote if each._gradients}
        described: dict[int, Description] = {}
        for name, installed in made.items():
            modules, loose = state.references_to(name)
            for own, new in zip((*modules, *loose), installed.references, strict=True):
                if id(own) in gradients:
                    with driven.replacing(gradients[id(own)]):
                        exchange(own, new)
                else:
                    exchange(own, new)
            described.update((id(own), each) for own, each in zip(modules, installed.descriptions, strict=True))
            self._notes[name], self._incarnations[name] = installed.note, installed.incarnation
        for module in state.remote:
            module._describe_again(described[id(module.module_rref)])

        def value_of(_: Any, leaf: Any) -> Any:
            return saved.values[id(leaf)].clone() if isinstance(leaf, RemoteTensor) else leaf

        for optimizer in state.optimizers:
            forget_owners(optimizer)
            for parameter, value in list(optimizer.state.items()):
                optimizer.state[parameter] = map_leaves(value_of, value)


def _leaves_of(state: TrainedState) -> list[RemoteTensor]:
    return remote_leaves([list(optimizer.state.values()) for optimizer in state.optimizers])


def _loads_of(state: TrainedState) -> list[int]:
    return [optimizer._loads for optimizer in state.distributed]


def _with_changes(saved: Any, then: list[dict[str, Any]], now: list[dict[str, Any]]) -> Any:
    """The state of a distributed optimizer, with the options that the program has changed after it was saved."""
    groups = [
        {**group, **{name: value for name, value in new.items() if not same_value(old.get(name), value)}}
        for group, old, new in zip(saved["param_groups"], then, now, strict=True)
    ]
    return _cloned({**saved, "param_groups": groups})


def _cloned(value: Any) -> Any:
    return map_leaves(lambda _, leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, value)
