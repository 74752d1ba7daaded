"""A cluster in a simulation: real workers in one process, in virtual time, and the faults that befall them.

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

from backhaul._rpc.cluster.departure import seal_of
from backhaul._rpc.cluster.membership_table import WorkerRecord
from backhaul._rpc.node import Node, join, shutdown_together, start_node
from backhaul._rpc.security.rate_limits import bounds_of
from backhaul._sim.endpoints import SimEndpoint
from backhaul._sim.network import NetworkConditions, SimNetwork
from backhaul._sim.runtime import SimRuntime
from backhaul._sim.scheduler import Scheduler, SimProcess, SimThread
from backhaul._types import Options

T = TypeVar("T")

_COUNTED = (
    "num_autograd_contexts",
    "num_current_backward_passes",
    "num_pending_calls",
    "num_owner_rrefs",
    "num_forks",
    "num_user_rrefs",
)


def _secret_of(incarnation: str) -> str:
    """What a worker tells when it leaves: the same in every process, so that a seed is one run."""
    return f"secret of {incarnation}"


class WorkerDiedError(RuntimeError):
    """A worker of the simulation was ended while it ran a program."""


class SimProgram(Generic[T]):
    """Something that runs on a worker, on a strand of its own."""

    def __init__(self, scheduler: Scheduler, runtime: SimRuntime, function: Callable[[], T]) -> None:
        self._scheduler = scheduler
        self.worker = runtime.home.name
        self._function: Callable[[], T] | None = function
        self._value: list[T] = []
        self.error: BaseException | None = None
        self.over = False  # by itself; else its worker died under it
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
        """Whether it does not run any more."""
        assert isinstance(self._thread, SimThread)
        return self._thread.sim_task.done

    def result(self) -> T:
        """Wait for it; return or raise what it did."""
        assert isinstance(self._thread, SimThread)
        self._scheduler.join(self._thread.sim_task, None)
        if self.error is not None:
            raise self.error
        if not self.over:
            raise WorkerDiedError(f"worker '{self.worker}' died while it ran a program")
        return self._value[0]


class SimCluster:
    """Workers of one simulation. A context manager: inside, the calling thread is a strand that belongs to no worker.

    The collector is off inside, since what it frees, and when, is not drawn from the seed; see ``collect``.

    Args:
        workers: How many there are from the start: ``worker0`` and so on.
        seed: Where all choices come from.
        options: For all of them.
        weather: How the network behaves.
        eagerness: See ``Scheduler``.
        keep_trace: Whether to keep the trace, and not only its hash.
    """

    def __init__(
        self,
        workers: int,
        *,
        seed: int,
        options: Options | None = None,
        conditions: NetworkConditions | None = None,
        eagerness: float = 0.1,
        keep_trace: bool = False,
    ) -> None:
        self.scheduler = Scheduler(seed, eagerness=eagerness, keep_trace=keep_trace)
        self.network = SimNetwork(self.scheduler, conditions)
        self.options = options or Options()
        self.nodes: dict[str, Node] = {}  # those that live
        self.history: list[tuple[float, str, bool]] = []  # when a worker went, or (true) was there again
        self._size = workers
        self._incarnations = itertools.count(1)
        self._collecting = False
        self._frozen = False  # by somebody else

    def __enter__(self) -> SimCluster:
        self._collecting = gc.isenabled()
        self._frozen = gc.get_freeze_count() > 0
        gc.disable()
        gc.collect()
        gc.freeze()  # so that collecting costs only what the simulation has made
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
        """What a worker has before it is one. A newcomer has no id yet."""
        home = self.scheduler.home(name)
        endpoint = self.network.endpoint(home)
        incarnation = f"{next(self._incarnations):016x}"
        record = WorkerRecord(
            number,
            name,
            incarnation,
            "simulation",
            endpoint.addresses,
            "simulation",
            self.options.max_frame_bytes,
            self.options.heartbeat_interval,
            trusting=self.options.trusted,
            bounds=bounds_of(self.options),
            seal=seal_of(_secret_of(incarnation)),
        )
        return record, endpoint, SimRuntime(self.scheduler, home, clock=self.scheduler.random.uniform(0.0, 1000.0))

    @staticmethod
    def runtime_of(node: Node) -> SimRuntime:
        """The runtime of a node of the simulation."""
        runtime = node.worker.runtime
        assert isinstance(runtime, SimRuntime)
        return runtime

    def home_of(self, name: str) -> SimProcess:
        """What the strands of a living worker belong to."""
        return self.runtime_of(self.nodes[name]).home

    def _note(self, text: str) -> None:
        self.scheduler.trace.note(f"{self.scheduler.now:.9f} {text}")

    # Programs and time.

    def run(self, name: str, function: Callable[[], T]) -> SimProgram[T]:
        """Run a function on a worker, which is current there."""
        node = self.nodes[name]

        def run() -> T:
            with node.worker:
                return function()

        return SimProgram(self.scheduler, self.runtime_of(node), run)

    def spawn(self, function: Callable[[], None], name: str) -> threading.Thread:
        """Run a function on a strand that belongs to no worker."""
        return self.scheduler.spawn(function, name=name, home=self.scheduler.outside)

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.scheduler.wait("time to pass", seconds)

    def collect(self) -> None:
        """Free what only the collector can free."""
        gc.collect()

    # Faults. For strands that belong to no worker.

    def crash(self, name: str, *, silent: bool = False) -> None:
        """End a worker at once, without a word if ``silent``."""
        self._note(f"crash of {name}{' in silence' if silent else ''}")
        node = self.nodes.pop(name)
        self.history.append((self.scheduler.now, name, False))
        home = self.runtime_of(node).home
        node.worker.abandon()
        self.network.crash(home, silent=silent)

    def start(self, name: str) -> Node:
        """Start a worker that is new, or one that has crashed, under its old name and as a new incarnation. It joins as
        any does. Raises ``RendezvousError`` if it may not, and ``WorkerDiedError`` if it crashes meanwhile.
        """
        self._note(f"start of {name}")
        self.network.returns(name)
        record, endpoint, runtime = self._prepare(name)
        members = [node.worker.endpoint.addresses[0] for node in self.nodes.values()]
        self.scheduler.random.shuffle(members)

        def become_member() -> Node:
            return join(endpoint, record, members, self.options, runtime=runtime)

        node = self.nodes[name] = SimProgram(self.scheduler, runtime, become_member).result()
        node.leaving.secret = _secret_of(record.incarnation)
        self.history.append((self.scheduler.now, name, True))
        return node

    def longest_absence(self, name: str, since: float) -> float:
        """For how long at most a worker was not there at a stretch, of the time from ``since`` on."""
        longest, gone = 0.0, None
        for when, who, there in [*self.history, (self.scheduler.now, name, True)]:
            if who == name:
                if gone is not None and there:
                    longest = max(longest, when - max(gone, since))
                gone = None if there else gone or when
        return longest

    def pause(self, name: str, seconds: float) -> None:
        """Let none of a worker's threads run for some time."""
        self._note(f"pause of {name}")
        home = self.home_of(name)
        self.scheduler.pause(home)
        self.scheduler.after(seconds, functools.partial(self.scheduler.resume, home))

    def cut(self, source: str, target: str, seconds: float) -> None:
        """Let nothing get from one worker to another for some time."""
        self._note(f"cut from {source} to {target}")
        self.network.cut(source, target)
        self.scheduler.after(seconds, functools.partial(self.network.heal, source, target))

    def drop(self, near: float, far: float) -> bool:
        """Break some channel; its ends learn of it after so many seconds. False if there is none."""
        channels = self.network.channels
        if not channels:
            return False
        channel = self.scheduler.random.choice(channels)
        self._note(f"drop of {hash(channel)} between {channel.home} and {channel.target}")
        self.network.drop(channel, near, far)
        return True

    def calm(self) -> None:
        """End all faults that can end."""
        self._note("calm")
        self.network.heal_all()
        self.network.conditions = NetworkConditions(patience=self.network.conditions.patience)
        for node in self.nodes.values():
            home = self.runtime_of(node).home
            if home.paused:
                self.scheduler.resume(home)

    # What is left.

    def leftovers(self) -> dict[tuple[str, str], int]:
        """What living workers hold on to, by worker and kind; nothing, once all work is done."""
        found: dict[tuple[str, str], int] = {}
        for name, node in self.nodes.items():
            for what in _COUNTED:
                found[name, what] = node.worker.counters[what]()
        return {key: count for key, count in found.items() if count}

    def shutdown(self, *, graceful: bool, timeout: float) -> list[str]:
        """Shut all workers down; what is left of them, for people."""
        nodes = list(self.nodes.values())
        self.nodes.clear()
        try:
            shutdown_together(nodes, graceful=graceful, timeout=timeout)
        finally:
            self.sleep(0.1)
        return [text for node in nodes for text in self._left_of(node)]

    def leave(self, name: str, *, timeout: float) -> list[str]:
        """Let a worker leave; what is left of it, for people. Not for one that still runs a program."""
        self._note(f"leave of {name}")
        node = self.nodes.pop(name)
        self.history.append((self.scheduler.now, name, False))
        end = functools.partial(node.shutdown, graceful=False, timeout=timeout, alone=True)
        SimProgram(self.scheduler, self.runtime_of(node), functools.partial(node.worker.run, end)).result()
        self.sleep(0.1)
        return self._left_of(node)

    def _left_of(self, node: Node) -> list[str]:
        left = [f"{sim_task.name} waits for {sim_task.where}" for sim_task in self.runtime_of(node).home.strands]
        end = node.worker.endpoint
        assert isinstance(end, SimEndpoint)
        left += [f"{end.home.name} has channel {hash(channel)} open" for channel in end.channels if channel.open]
        return left
