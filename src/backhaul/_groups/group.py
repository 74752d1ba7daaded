"""Groups of workers, and what is done with all of their members at once."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast, overload

import torch

from backhaul._groups.group_calls import GroupCalls
from backhaul._groups.hosts import Hosts, by_host, halves
from backhaul._rpc.call_types import Named, Positional, Target
from backhaul._rpc.futures import Future
from backhaul._rpc.node import Node
from backhaul._rref.handle import RRef
from backhaul._rref.remote import remote
from backhaul._runtime.compile_marks import graph_break
from backhaul._types import WorkerInfo
from backhaul._wire.callables import label_of
from backhaul._worker.worker import current_worker
from backhaul.errors import UnknownWorkerError

T = TypeVar("T")

TREE_BYTES = 256 << 10
"""Arguments with more bytes of tensors go over the network once for each host, not once for each worker."""


class WorkerGroup(Sequence[WorkerInfo]):
    """Workers that are called together; see ``group``. It never changes: workers that join later are not in it.

    A message with large tensors for workers of several hosts goes over the network once for each host. It travels
    through a tree: the caller sends it to one worker each of two hosts at most, and these pass it on. Gradients come
    back through the same tree, and are summed on the way.

    Args:
        members: The workers, in the order of results.

    Example:
        >>> import backhaul as bh
        >>> with bh.cluster(["trainer", "w0", "w1"]):
        ...     everybody = bh.group("*")
        ...     everybody.others.names, everybody[1:].call(bh.get_worker_info)[0].name
        (['w0', 'w1'], 'w0')
    """

    def __init__(self, members: Iterable[WorkerInfo]) -> None:
        self._members = tuple(members)

    @overload
    def __getitem__(self, index: int) -> WorkerInfo: ...
    @overload
    def __getitem__(self, index: slice) -> WorkerGroup: ...
    def __getitem__(self, index: int | slice) -> WorkerInfo | WorkerGroup:
        return WorkerGroup(self._members[index]) if isinstance(index, slice) else self._members[index]

    def __len__(self) -> int:
        return len(self._members)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WorkerGroup) and self._members == other._members

    def __hash__(self) -> int:
        return hash(self._members)

    def __repr__(self) -> str:
        return f"<WorkerGroup of {', '.join(self.names)}>"

    @property
    def names(self) -> list[str]:
        """The names of the workers."""
        return [member.name for member in self]

    @property
    def others(self) -> WorkerGroup:
        """The group without the current worker."""
        here = current_worker().info.id
        return WorkerGroup(member for member in self if member.id != here)

    # One call on each.

    def call(
        self,
        func: Callable[..., T] | str,
        args: Positional = None,
        kwargs: Named | None = None,
        timeout: float | None = None,
    ) -> list[T]:
        """Call ``func(*args, **kwargs)`` on each worker at the same time. Return the results in order.

        The calls are part of the autograd graph, as with ``rpc_sync``: the gradients of the arguments are the sums over
        all workers. If a call fails, the others are cancelled, and its error is raised.

        Example:
            >>> import torch, backhaul as bh
            >>> weight = torch.ones(2, requires_grad=True)
            >>> with bh.cluster(3):
            ...     first, second = bh.group("worker[12]").call(torch.mul, args=(weight, 3))
            ...     (first + second).sum().backward()
            >>> weight.grad
            tensor([6., 6.])
        """
        return self.call_async(func, args, kwargs, timeout).wait()

    @graph_break
    def call_async(
        self,
        func: Callable[..., T] | str,
        args: Positional = None,
        kwargs: Named | None = None,
        timeout: float | None = None,
    ) -> GroupCalls[T]:
        """Like ``call``, but return at once: ``wait`` of what is returned gives the results in order, ``as_completed``
        gives each as it comes.

        Example:
            >>> import os, backhaul as bh
            >>> with bh.cluster(3):
            ...     calls = bh.group("*").call_async(os.getpid)
            ...     len({pid for _, pid in calls.as_completed()})  # one process here
            1
        """
        return self._spread(SharedCall(func, args, kwargs, timeout))

    def broadcast(self, value: T, timeout: float | None = None) -> list[RRef[T]]:
        """Copy a value to each worker. Return a reference to each copy, in order.

        Example:
            >>> import torch, backhaul as bh
            >>> with bh.cluster(3):
            ...     copies = bh.group("worker[12]").broadcast(torch.arange(3))
            ...     [copy.owner_name() for copy in copies], copies[0].to_here()
            (['worker1', 'worker2'], tensor([0, 1, 2]))
        """
        copies: GroupCalls[RRef[T]] = self._spread(SharedCall(_same, (value,), None, timeout, keep=True))
        return copies.wait()

    # Something else for each.

    def map(self, func: Callable[..., T] | str, values: Iterable[Any], timeout: float | None = None) -> list[T]:
        """Call ``func(value)`` for each value, on one worker after the other, at the same time. Return the results in
        the order of the values. There may be more values than workers: value ``i`` goes to worker ``i % len(group)``.

        Example:
            >>> import torch, backhaul as bh
            >>> batch = torch.arange(4.0)
            >>> with bh.cluster(3):
            ...     bh.group("worker[12]").map(torch.neg, batch.split(2))
            [tensor([-0., -1.]), tensor([-2., -3.])]
        """
        return self.map_async(func, values, timeout).wait()

    @graph_break
    def map_async(
        self, func: Callable[..., T] | str, values: Iterable[Any], timeout: float | None = None
    ) -> GroupCalls[T]:
        """Like ``map``, but return at once, as ``call_async`` does."""
        each = list(values)
        if each and not self:
            raise ValueError(f"the group has no workers, and there are {len(each)} values")
        client = current_worker().part(Node).client
        names, parts = list[str](), list[tuple[Future[Any], int]]()
        try:
            for number, value in enumerate(each):
                worker = self[number % len(self)]
                names.append(worker.name)
                parts.append((client.call_async(worker, func, (value,), None, timeout), number))
        except BaseException:
            _cancel(parts)
            raise
        return GroupCalls(parts, names, label_of(func))

    def scatter(self, values: Sequence[T] | torch.Tensor, timeout: float | None = None) -> list[RRef[T]]:
        """Send one value to each worker. Return a reference to each, in order.

        Args:
            values: As many as there are workers. Or a tensor, which is split along its first dimension.
            timeout: As for ``rpc_sync``.

        Example:
            >>> import torch, backhaul as bh
            >>> with bh.cluster(3):
            ...     group = bh.group("worker[12]")
            ...     halves = group.scatter(torch.arange(4))
            ...     group.gather(halves)
            [tensor([0, 1]), tensor([2, 3])]
        """
        parts: Sequence[Any] = torch.tensor_split(values, len(self)) if isinstance(values, torch.Tensor) else values
        if len(parts) != len(self):
            raise ValueError(f"a group of {len(self)} workers needs as many values, not {len(parts)}")
        started = [
            (_copy(worker, _same, [part], timeout), number)
            for number, (worker, part) in enumerate(zip(self, parts, strict=True))
        ]
        return GroupCalls[RRef[T]](started, self.names, "scatter").wait()

    @staticmethod
    def gather(references: Iterable[RRef[T]], timeout: float | None = None) -> list[T]:
        """Fetch the values of all references at the same time. Return them in order.

        Example:
            >>> import torch, backhaul as bh
            >>> with bh.cluster(3):
            ...     group = bh.group("worker[12]")
            ...     group.gather(group.broadcast(torch.ones(1)))
            [tensor([1.]), tensor([1.])]
        """
        each = list(references)
        asked = [(reference._ask(timeout), number) for number, reference in enumerate(each)]
        return GroupCalls[T](asked, [reference.owner_name() for reference in each], "gather").wait()

    # How calls start.

    def _spread(self, call: SharedCall) -> GroupCalls[Any]:
        """The same call on each, directly or through a tree of workers."""
        peers = current_worker().part(Node).peers
        hosts = [peers.find(member).record.host for member in self]
        own, others = by_host(enumerate(hosts), peers.own.record.host)
        # Workers that others do not trust may call what is exposed, by its name, and nothing that passes a call on.
        if not others or isinstance(call.func, str) or call.nbytes <= TREE_BYTES:
            own, others = list(range(len(self))), []
        return self._through(own, others, call)

    def _through(self, own: Sequence[int], others: Hosts, call: SharedCall) -> GroupCalls[Any]:
        client = current_worker().part(Node).client
        parts: list[tuple[Future[Any], int | Sequence[int]]] = []
        try:
            for part in halves(others):
                numbers = [number for host in part for number in host]
                if len(numbers) == 1:
                    parts.append((call.start(self[numbers[0]]), numbers[0]))
                    continue
                further = WorkerGroup(self[number] for number in numbers), [len(host) for host in part], call
                parts.append((client.call_async(self[numbers[0]], pass_on, further, None, call.timeout), numbers))
            parts += [(call.start(self[number]), number) for number in own]
        except BaseException:
            _cancel(parts)
            raise
        return GroupCalls(parts, self.names, call.label)


@dataclass(frozen=True)
class SharedCall:
    """A call that is the same for all members of a group.

    Attributes:
        func: What to call.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        timeout: As for ``rpc_sync``.
        keep: The results stay on the workers, and the caller gets references.
    """

    func: Callable[..., Any] | str
    args: Positional
    kwargs: Named | None
    timeout: float | None
    keep: bool = False

    @property
    def label(self) -> str:
        """What is called, for errors."""
        return "broadcast" if self.keep else label_of(self.func)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors among the arguments."""
        return _nbytes((self.args, self.kwargs))

    def start(self, worker: WorkerInfo) -> Future[Any]:
        """Start the call on one worker."""
        if not self.keep:
            client = current_worker().part(Node).client
            return client.call_async(worker, self.func, self.args, self.kwargs, self.timeout)
        return _copy(worker, cast("Callable[..., Any]", self.func), list(self.args or ()), self.timeout)


def pass_on(members: WorkerGroup, sizes: Sequence[int], call: SharedCall) -> list[Any]:
    """Runs on the first member: call the members of its host, and pass the call on to other hosts.

    Args:
        members: The members of some hosts, host by host.
        sizes: How many members each host has.
        call: The call.
    """
    numbers = iter(range(len(members)))
    own, *others = [[next(numbers) for _ in range(size)] for size in sizes]
    return members._through(own, others, call).wait()


def _cancel(parts: Iterable[tuple[Future[Any], Any]]) -> None:
    for future, _ in parts:
        future.cancel()


def _copy(worker: WorkerInfo, func: Callable[..., Any], args: list[Any], timeout: float | None) -> Future[Any]:
    """A reference to what ``func`` returns there, as soon as it has returned."""
    return remote(worker, func, args, timeout=timeout)._there()


def _same(value: T) -> T:
    return value


def _nbytes(value: Any) -> int:
    """Bytes of the tensors in tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_nbytes, value.values()))
    return sum(map(_nbytes, value)) if isinstance(value, (tuple, list)) else 0


@graph_break
def group(*workers: Target | Sequence[Target]) -> WorkerGroup:
    """Workers to call together.

    Args:
        workers: Names, ids or ``WorkerInfo`` of workers, or sequences of them. A name may be a pattern as for file
            names, such as ``"trainer*"``: it stands for all workers that match, by id, the current one among them. A
            worker that is named twice is in the group once.

    Raises:
        UnknownWorkerError: There is no such worker, or none that matches.

    Example:
        >>> import backhaul as bh
        >>> with bh.cluster(["trainer0", "trainer1", "server"]):
        ...     bh.group("trainer*"), bh.group("server", 0), len(bh.group("*").others)
        (<WorkerGroup of trainer0, trainer1>, <WorkerGroup of server, trainer0>, 2)
    """
    peers = current_worker().part(Node).peers
    found: dict[WorkerInfo, None] = {}
    for given in workers:
        several = isinstance(given, Sequence) and not isinstance(given, str)
        for one in cast("Sequence[Target]", given) if several else (cast("Target", given),):
            if not isinstance(one, str) or not any(mark in one for mark in "*?["):
                found[peers.find(one).info] = None
                continue
            members = sorted((peer.info for peer in peers if not peer.lost), key=lambda info: info.id)
            matching = [info for info in members if fnmatch.fnmatchcase(info.name, one)]
            if not matching:
                names = ", ".join(info.name for info in members)
                raise UnknownWorkerError(f"no worker matches '{one}'; there are: {names}", worker=one)
            found.update(dict.fromkeys(matching))
    return WorkerGroup(found)
