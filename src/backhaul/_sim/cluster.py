"""A simulated cluster: real workers in one process, in virtual time, and the faults that hit them.

>>> import backhaul as bh, torch
>>> with SimCluster(3, seed=1) as cluster:
...     program = cluster.run("worker0", lambda: bh.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)))
...     print(program.result())
tensor([2., 2.])
"""

from __future__ import annotations

import functools
import gc
import itertools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from backhaul._options import Options
from backhaul._rpc.cluster.departure import seal_of
from backhaul._rpc.cluster.membership_table import WorkerRecord
from backhaul._rpc.node import Node, join, shutdown_together, start_node
from backhaul._rpc.security.rate_limits import bounds_of
from backhaul._sim.endpoints import SimEndpoint
from backhaul._sim.network import NetworkConditions, SimNetwork
from backhaul._sim.runtime import SimRuntime
from backhaul._sim.scheduler import Scheduler
from backhaul._sim.tasks import SimProcess, SimThread

T = TypeVar("T")

_COUNTED = (
    "num_autograd_contexts",
    "num_current_backward_passes",
    "num_plain_records",
    "num_pending_calls",
    "num_owner_rrefs",
    "num_forks",
    "num_user_rrefs",
)


def _secret_of(incarnation: str) -> str:
    """The secret that a worker reveals when it leaves. It is a function of the incarnation, so that a seed repeats."""
    return f"secret of {incarnation}"


class WorkerDiedError(RuntimeError):
    """A simulated worker crashed while it ran a program."""


class SimProgram(Generic[T]):
    """A function that runs on a worker, on a task of its own.

    Attributes:
        over: Whether the function has returned or raised. False after the task has ended: the worker crashed.
    """

    def __init__(self, scheduler: Scheduler, runtime: SimRuntime, function: Callable[[], T]) -> None:
        self._scheduler = scheduler
        self.worker = runtime.process.name
        self._function: Callable[[], T] | None = function
        self._value: list[T] = []
        self.error: BaseException | None = None
        self.over = False
        self._thread = runtime.spawn(self._run, name=f"{self.worker}-program")

    def _run(self) -> None:
        function, self._function = self._function, None
        assert function is not None
        try:
            self._value.append(function())
        except Exception as error:
            self.error = error
        self.over = True

    @property
    def ended(self) -> bool:
        """Whether the task has ended."""
        assert isinstance(self._thread, SimThread)
        return self._thread.task.done

    def result(self) -> T:
        """Wait for the end; return or raise what the function did. Raises ``WorkerDiedError`` if the worker crashed."""
        assert isinstance(self._thread, SimThread)
        self._scheduler.join(self._thread.task, None)
        if self.error is not None:
            raise self.error
        if not self.over:
            raise WorkerDiedError(f"worker '{self.worker}' died while it ran a program")
        return self._value[0]


class WorkerHistory:
    """When workers went away and came back."""

    def __init__(self) -> None:
        self._changes: list[tuple[float, str, bool]] = []  # (time, name, whether the worker is there now)

    def add(self, when: float, name: str, *, present: bool) -> None:
        """A worker went away, or came back."""
        self._changes.append((when, name, present))

    def changed(self, name: str, first: float, last: float) -> bool:
        """Whether a worker went away or came back between two times."""
        return any(who == name and first <= when <= last for when, who, _ in self._changes)

    def longest_absence(self, name: str, since: float, now: float) -> float:
        """The longest time, from ``since`` to ``now``, for which a worker was away without interruption."""
        longest, gone_since = 0.0, None
        for when, who, present in [*self._changes, (now, name, True)]:
            if who == name:
                if gone_since is not None and present:
                    longest = max(longest, when - max(gone_since, since))
                gone_since = None if present else gone_since or when
        return longest


# Over the limit because tests drive every fault and every program through this one object.
class SimCluster:
    """The workers of one simulation. A context manager; inside, the calling thread is a task that belongs to no worker.

    The garbage collector is off inside, because the seed does not determine what it frees and when; see ``collect``.

    Args:
        workers: How many workers there are at the start: ``worker0`` and so on.
        seed: Determines all random choices.
        options: The options of all workers.
        conditions: How the network behaves.
        yield_probability: See ``Scheduler``.
        keep_trace: Whether to keep the lines of the trace, and not only their hash.

    Attributes:
        nodes: The workers that live, by name.
        history: When workers went away and came back.
    """

    def __init__(
        self,
        workers: int,
        *,
        seed: int,
        options: Options | None = None,
        conditions: NetworkConditions | None = None,
        yield_probability: float = 0.1,
        keep_trace: bool = False,
    ) -> None:
        self.scheduler = Scheduler(seed, yield_probability=yield_probability, keep_trace=keep_trace)
        self.network = SimNetwork(self.scheduler, conditions)
        self.options = options or Options()
        self.nodes: dict[str, Node] = {}
        self.history = WorkerHistory()
        self._size = workers
        self._incarnations = itertools.count(1)
        self._collecting = False
        self._frozen = False  # by the caller

    def __enter__(self) -> SimCluster:
        self._collecting = gc.isenabled()
        self._frozen = gc.get_freeze_count() > 0
        gc.disable()
        gc.collect()
        gc.freeze()  # so that a collection visits only objects of the simulation
        self.scheduler.__enter__()
        made = [self._prepare(f"worker{number}", number) for number in range(self._size)]
        records = [record for record, _, _ in made]
        for record, endpoint, runtime in made:
            node = self.nodes[record.name] = start_node(record, records, endpoint, self.options, runtime=runtime)
            node.leaving.secret = _secret_of(record.incarnation)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.nodes.values():
            node.worker.abandon()
        self.scheduler.__exit__(kind, error, trace)
        self.nodes.clear()
        if not self._frozen:
            gc.unfreeze()
        if self._collecting:
            gc.enable()

    def _prepare(self, name: str, number: int = -1) -> tuple[WorkerRecord, SimEndpoint, SimRuntime]:
        """Create what a worker needs before it starts. A worker that joins has no id yet."""
        process = self.scheduler.new_process(name)
        endpoint = self.network.endpoint(process)
        incarnation = f"{next(self._incarnations):016x}"
        record = WorkerRecord(
            number,
            name,
            incarnation,
            "simulation",
            endpoint.addresses,
            "simulation",
            self.options.limits.frame_bytes,
            self.options.liveness.heartbeat_interval,
            trusting=self.options.security.trusted,
            bounds=bounds_of(self.options),
            seal=seal_of(_secret_of(incarnation)),
        )
        return record, endpoint, SimRuntime(self.scheduler, process, clock=self.scheduler.random.uniform(0.0, 1000.0))

    @staticmethod
    def runtime_of(node: Node) -> SimRuntime:
        """The runtime of a node of the simulation."""
        runtime = node.worker.runtime
        assert isinstance(runtime, SimRuntime)
        return runtime

    def process_of(self, name: str) -> SimProcess:
        """The simulated process of a living worker."""
        return self.runtime_of(self.nodes[name]).process

    def _note(self, text: str) -> None:
        self.scheduler.trace.note(f"{self.scheduler.now:.9f} {text}")

    # Programs and time.

    def run(self, name: str, function: Callable[[], T]) -> SimProgram[T]:
        """Run a function on a worker. The worker is the current one inside the function."""
        node = self.nodes[name]

        def run() -> T:
            with node.worker:
                return function()

        return SimProgram(self.scheduler, self.runtime_of(node), run)

    def spawn(self, function: Callable[[], None], name: str) -> threading.Thread:
        """Run a function on a task that belongs to no worker."""
        return self.scheduler.spawn(function, name=name, process=self.scheduler.outside)

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.scheduler.wait("time to pass", seconds)

    def collect(self) -> None:
        """Run the garbage collector."""
        gc.collect()

    # Faults. For tasks that belong to no worker.

    def crash(self, name: str, *, silent: bool = False) -> None:
        """Kill a worker. Its peers see its channels close; if ``silent``, they see nothing."""
        self._note(f"crash of {name}{' in silence' if silent else ''}")
        node = self.nodes.pop(name)
        self.history.add(self.scheduler.now, name, present=False)
        process = self.runtime_of(node).process
        node.worker.abandon()
        self.network.crash(process, silent=silent)

    def start(self, name: str) -> Node:
        """Start a new worker, or a new incarnation of a crashed one, and let it join.

        Raises:
            RendezvousError: The worker could not join.
            WorkerDiedError: The worker crashed while it joined.
        """
        self._note(f"start of {name}")
        self.network.partitions.reconnect(name)
        record, endpoint, runtime = self._prepare(name)
        members = [node.worker.endpoint.addresses[0] for node in self.nodes.values()]
        self.scheduler.random.shuffle(members)

        def become_member() -> Node:
            return join(endpoint, record, members, self.options, runtime=runtime)

        node = self.nodes[name] = SimProgram(self.scheduler, runtime, become_member).result()
        node.leaving.secret = _secret_of(record.incarnation)
        self.history.add(self.scheduler.now, name, present=True)
        return node

    def pause(self, name: str, seconds: float) -> None:
        """Stop all tasks of a worker for some time."""
        self._note(f"pause of {name}")
        process = self.process_of(name)
        self.scheduler.pause(process)
        self.scheduler.after(seconds, functools.partial(self.scheduler.resume, process))

    def cut(self, source: str, target: str, seconds: float) -> None:
        """Let nothing get from ``source`` to ``target`` for some time."""
        self._note(f"cut from {source} to {target}")
        self.network.partitions.cut(source, target)
        self.scheduler.after(seconds, functools.partial(self.network.partitions.heal, source, target))

    def drop(self, near: float, far: float) -> bool:
        """Break a random channel. Its ends learn of it after ``near`` and ``far`` seconds. False if there is none."""
        channels = self.network.channels
        if not channels:
            return False
        channel = self.scheduler.random.choice(channels)
        self._note(f"drop of {hash(channel)} between {channel.source} and {channel.target}")
        self.network.drop(channel, near, far)
        return True

    def end_faults(self) -> None:
        """End all faults that can end: partitions, bad network conditions and pauses."""
        self._note("end of faults")
        self.network.partitions.heal_all()
        self.network.conditions = NetworkConditions(silence_seconds=self.network.conditions.silence_seconds)
        for node in self.nodes.values():
            process = self.runtime_of(node).process
            if process.paused:
                self.scheduler.resume(process)

    # What is left.

    def leftovers(self) -> dict[tuple[str, str], int]:
        """What living workers still hold, by worker and kind. Empty once all work is done."""
        found: dict[tuple[str, str], int] = {}
        for name, node in self.nodes.items():
            for what in _COUNTED:
                found[name, what] = node.worker.counters[what]()
        return {key: count for key, count in found.items() if count}

    def shutdown(self, *, graceful: bool, timeout: float) -> list[str]:
        """Shut all workers down. Returns what is left of them, as text."""
        nodes = list(self.nodes.values())
        self.nodes.clear()
        try:
            shutdown_together(nodes, graceful=graceful, timeout=timeout)
        finally:
            self.sleep(0.1)
        return [text for node in nodes for text in self._left_of(node)]

    def leave(self, name: str, *, timeout: float) -> list[str]:
        """Let a worker leave. Returns what is left of it, as text. The worker must not run a program."""
        self._note(f"leave of {name}")
        node = self.nodes.pop(name)
        self.history.add(self.scheduler.now, name, present=False)
        end = functools.partial(node.shutdown, graceful=False, timeout=timeout, alone=True)
        SimProgram(self.scheduler, self.runtime_of(node), functools.partial(node.worker.run, end)).result()
        self.sleep(0.1)
        return self._left_of(node)

    def _left_of(self, node: Node) -> list[str]:
        left = [f"{task.name} waits for {task.where}" for task in self.runtime_of(node).process.tasks]
        end = node.worker.endpoint
        assert isinstance(end, SimEndpoint)
        left += [f"{end.process.name} has channel {hash(channel)} open" for channel in end.channels if channel.open]
        return left
