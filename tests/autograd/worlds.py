"""One program in two worlds: over the workers of a cluster, and in one process with nothing but plain autograd.

A program is a function of its world. It calls functions on workers with ``world.call``, and what it calls gets the same
world, so that the very same text runs twice. In the plain world a call copies its arguments and results, as calls do.
Over workers it runs in a context, or outside contexts with torch's own functions.
"""

from __future__ import annotations

import abc
import collections
import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

import backhaul as bh
from backhaul._autograd.backward.engine import Engine

DEADLINE_SECONDS = 30.0  # a test fails if what it waits for takes longer

Program = Callable[["World"], None]
Leaves = Mapping[str, torch.Tensor]

_worlds: dict[int, World] = {}
_keys = itertools.count()


def _find(key: int) -> World:
    return _worlds[key]


class World(abc.ABC):
    """Where a program runs. Travels by reference, so it works between workers of one process only.

    All workers see all leaves; a program uses each on one of them, as if it lived there.
    """

    remote = True
    """Whether calls go to workers."""

    hang: Callable[[str, torch.Tensor], None]
    """What a program does with intermediate values, if it asks for it."""

    def __init__(self, leaves: Leaves) -> None:
        self.key = next(_keys)
        self.leaves = {name: like(leaf) for name, leaf in leaves.items()}
        self.events: dict[str, list[torch.Tensor | None]] = collections.defaultdict(list)
        self._lock = threading.Lock()  # guards events
        _worlds[self.key] = self

    def __reduce__(self) -> Any:
        return _find, (self.key,)

    def __getattr__(self, name: str) -> torch.Tensor:
        """Leaves by name."""
        try:
            return self.__dict__["leaves"][name]
        except KeyError:
            raise AttributeError(name) from None

    def saw(self, what: str, value: torch.Tensor | None = None) -> None:
        """Note that something happened, perhaps with a gradient."""
        with self._lock:
            self.events[what].append(None if value is None else value.detach().clone())

    @abc.abstractmethod
    def call(self, to: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``function(world, *args, **kwargs)`` on a worker."""

    @abc.abstractmethod
    def backward(self, roots: Any, **options: Any) -> None:
        """Run a pass."""

    @abc.abstractmethod
    def grad(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The gradient of a tensor on the worker that asks."""

    @abc.abstractmethod
    def collect(self) -> dict[str, torch.Tensor | None]:
        """The gradients of all leaves, on all workers."""


def like(leaf: torch.Tensor) -> torch.Tensor:
    """A copy of a leaf, with memory of its own."""
    made = leaf.detach().clone()
    return torch.nn.Parameter(made) if isinstance(leaf, torch.nn.Parameter) else made.requires_grad_(leaf.requires_grad)


def copied(value: Any) -> Any:
    """Copy values as a message does: one tensor in several places stays one tensor."""
    made: dict[torch.Tensor, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in made:
            made[tensor] = tensor.clone()
        return made[tensor]

    return tree_map_only(torch.Tensor, copy, value)


class Plain(World):
    """One process, plain autograd."""

    remote = False

    def call(self, to: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args, kwargs = copied((args, kwargs))
        return copied(function(self, *args, **kwargs))

    def backward(self, roots: Any, **options: Any) -> None:
        torch.autograd.backward(roots, **options)

    def grad(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return tensor.grad

    def collect(self) -> dict[str, torch.Tensor | None]:
        return {name: leaf.grad for name, leaf in self.leaves.items()}


class Distributed(World):
    """The workers of a cluster, and one context."""

    def __init__(
        self, leaves: Leaves, workers: Sequence[bh.Worker], context: bh.ContextHandle, options: Mapping[str, Any]
    ) -> None:
        super().__init__(leaves)
        self.workers = workers
        self.context = context
        self.options = {"timeout": DEADLINE_SECONDS, **options}

    def call(self, to: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return bh.rpc_sync(to, function, args=(self, *args), kwargs=kwargs)

    def backward(self, roots: Any, **options: Any) -> None:
        self.context.backward(roots, **{**self.options, **options})

    @property
    def into_grad(self) -> bool:
        return self.options.get("accumulate") == "grad"

    def grad(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return tensor.grad if self.into_grad else bh.get_gradients(self.context).get(tensor)

    def collect(self) -> dict[str, torch.Tensor | None]:
        if self.into_grad:
            assert not any(gradients_on(worker, self.context) for worker in self.workers)
            return {name: leaf.grad for name, leaf in self.leaves.items()}
        assert all(leaf.grad is None for leaf in self.leaves.values())
        found: dict[str, torch.Tensor | None] = dict.fromkeys(self.leaves)
        for worker in self.workers:
            held = gradients_on(worker, self.context)
            for name, leaf in self.leaves.items():
                if leaf in held:
                    before = found[name]
                    found[name] = held[leaf] if before is None else before + held[leaf]
        return found


class Outside(World):
    """The workers of a cluster, outside contexts: torch's own functions run over all of them."""

    def call(self, to: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return bh.rpc_sync(to, function, args=(self, *args), kwargs=kwargs)

    def backward(self, roots: Any, **options: Any) -> None:
        torch.autograd.backward(roots, **options)

    def grad(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return tensor.grad

    def collect(self) -> dict[str, torch.Tensor | None]:
        return {name: leaf.grad for name, leaf in self.leaves.items()}


def gradients_on(worker: bh.Worker, context: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients on a worker of this process; none if the context did not reach it."""
    with worker:
        try:
            return bh.get_gradients(context)
        except bh.errors.UnknownContextError:
            return {}


def compare(expected: World, found: World, *, rtol: float = 1e-9, atol: float = 1e-9) -> None:
    """Assert that two worlds have the same gradients and the same events."""
    wanted, got = expected.collect(), found.collect()
    for name, grad in wanted.items():
        same(got[name], grad, f"gradient of {name}", rtol=rtol, atol=atol)
    times = {what: len(seen) for what, seen in expected.events.items()}
    assert {what: len(seen) for what, seen in found.events.items()} == times
    for what, seen in expected.events.items():
        # Calls may run in any order, so events are compared sorted by size.
        pairs = zip(sorted(found.events[what], key=_size), sorted(seen, key=_size), strict=True)
        for value, wish in pairs:
            same(value, wish, what, rtol=rtol, atol=atol)


def same(found: torch.Tensor | None, wanted: torch.Tensor | None, what: str, *, rtol: float, atol: float) -> None:
    """Assert that two gradients are equal, or both missing."""
    if found is None or wanted is None:
        assert found is None, f"{what}: found {found}, expected none"
        assert wanted is None, f"{what}: found none, expected {wanted}"
        return
    assert found.layout == wanted.layout, what
    found, wanted = found.detach(), wanted.detach()
    if wanted.layout is torch.sparse_coo:
        found, wanted = found.to_dense(), wanted.to_dense()
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def _size(value: torch.Tensor | None) -> list[float]:
    return [] if value is None else torch.view_as_real(value.to_dense().to(torch.complex128)).flatten().tolist()


def check(
    program: Program, leaves: Leaves, *, workers: int = 3, rtol: float = 1e-9, atol: float = 1e-9, **options: Any
) -> None:
    """Run a program in both worlds and compare them. Afterwards no worker has the context any more."""
    plain = Plain(leaves)
    program(plain)
    with bh.cluster(workers) as made:
        with bh.context() as context:
            distributed = Distributed(leaves, made, context, options)
            program(distributed)
            compare(plain, distributed, rtol=rtol, atol=atol)
        expect_no_contexts(made)
    for world in (plain, distributed):
        del _worlds[world.key]


def check_outside(
    program: Program, leaves: Leaves, *, workers: int = 3, rtol: float = 1e-9, atol: float = 1e-9
) -> None:
    """As ``check``, outside contexts. Afterwards no worker keeps a record of what was sent."""
    plain = Plain(leaves)
    program(plain)
    with bh.cluster(workers, options=bh.Options(backward_timeout=DEADLINE_SECONDS)) as made:
        outside = Outside(leaves)
        program(outside)
        compare(plain, outside, rtol=rtol, atol=atol)
        for world in (plain, outside):
            for leaf in world.leaves.values():
                leaf.grad = None  # a recorded gradient refers to its leaf, so both would never be freed
            del _worlds[world.key]
        del world, leaf, outside
        expect_no_records(made)


# Processes.


class Collected(World):
    """What a program left on the workers of other processes."""

    def __init__(
        self, grads: dict[str, torch.Tensor | None], events: Mapping[str, Sequence[torch.Tensor | None]]
    ) -> None:
        super().__init__({})
        self._grads = grads
        self.events.update({what: list(seen) for what, seen in events.items()})

    def call(self, to: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    backward = grad = call  # type: ignore[assignment]

    def collect(self) -> dict[str, torch.Tensor | None]:
        return self._grads


Left = tuple[dict[str, torch.Tensor | None], dict[str, list[torch.Tensor | None]]]
"""The gradients and the events of a program."""


def check_processes(
    programs: Mapping[str, Program], leaves: Leaves, *, workers: int = 3, rtol: float = 1e-9, atol: float = 1e-9
) -> None:
    """As ``check_outside``, over processes: all programs, one after the other. They must be functions of modules."""
    values = {name: leaf.detach() for name, leaf in leaves.items()}
    options = bh.Options(backward_timeout=DEADLINE_SECONDS)
    found, *_ = bh.launch(
        _run_programs,
        workers,
        args=(dict(programs), values),
        options=options,
        timeout=3 * DEADLINE_SECONDS,
        start_method="forkserver",
    )
    for name, program in programs.items():
        plain = Plain(leaves)
        program(plain)
        try:
            compare(plain, Collected(*found[name]), rtol=rtol, atol=atol)
        except AssertionError as error:
            error.add_note(f"program {name}")
            raise
        for leaf in plain.leaves.values():
            leaf.grad = None


def _run_programs(programs: Mapping[str, Program], values: Leaves) -> dict[str, Left] | None:
    """On worker 0: run the programs. The other workers only serve."""
    torch.set_num_threads(1)
    if bh.get_worker_info().id != 0:
        return None
    others = [worker.id for worker in bh.get_worker_infos() if worker.id != 0]
    found = {}
    for number, (name, program) in enumerate(programs.items()):
        for to in (0, *others):
            bh.rpc_sync(to, _prepare_world, args=(number, values))
        program(_worlds[-1 - number])
        parts = [bh.rpc_sync(to, _leave_world, args=(number,)) for to in (0, *others)]
        grads, events = parts[0]
        for more, seen in parts[1:]:
            grads = {leaf: more[leaf] if grad is None else grad for leaf, grad in grads.items()}
            for what, entries in seen.items():
                events.setdefault(what, []).extend(entries)
        found[name] = grads, events
    expect_no_records([bh.get_worker_info(0), *map(bh.get_worker_info, others)])
    return found


def _prepare_world(number: int, values: Leaves) -> None:
    world = Outside({name: value.requires_grad_() for name, value in values.items()})
    del _worlds[world.key]
    world.key = -1 - number
    _worlds[world.key] = world


def _leave_world(number: int) -> Left:
    world = _worlds.pop(-1 - number)
    grads = {name: None if leaf.grad is None else leaf.grad.detach() for name, leaf in world.leaves.items()}
    for leaf in world.leaves.values():
        leaf.grad = None  # a recorded gradient refers to its leaf, so both would never be freed
    return grads, dict(world.events)


def expect_no_records(workers: Iterable[bh.Worker | bh.WorkerInfo]) -> None:
    """Wait until no worker keeps a record of a message outside contexts. Notices of dropped graphs are asynchronous."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    names = [worker.name for worker in workers]
    while found := {name: count for name in names if (count := records_on(name))}:
        assert time.monotonic() < deadline, f"expected no records, found {found}"
        for name in names:
            bh.rpc_sync(name, gc.collect)


def records_on(name: str) -> int:
    """How many records of messages outside contexts a worker has."""
    return bh.rpc_sync(name, bh.get_debug_info)["num_plain_records"]


def expect_no_contexts(workers: Iterable[bh.Worker]) -> None:
    """Wait until no worker has a context any more. Releases arrive asynchronously."""
    await_counts({worker.name: 0 for worker in workers})


def await_counts(wanted: Mapping[str, int]) -> None:
    """Wait until each worker has that many contexts."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while (found := {name: contexts_on(name) for name in wanted}) != wanted:
        assert time.monotonic() < deadline, f"expected so many contexts: {wanted}, found {found}"


def contexts_on(name: str) -> int:
    """How many contexts a worker has."""
    return bh.rpc_sync(name, bh.get_debug_info)["num_autograd_contexts"]


def engine_of(worker: bh.Worker) -> Engine:
    return worker.part(Engine)


def vector(*values: float, dtype: torch.dtype = torch.float64, grad: bool = True) -> torch.Tensor:
    """A leaf."""
    return torch.tensor(values, dtype=dtype, requires_grad=grad)
