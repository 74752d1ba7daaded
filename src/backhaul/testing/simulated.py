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

from backhaul.rpc.joining import introduce
from backhaul.rpc.node import Node, shutdown_together, start_node
from backhaul.rpc.roster import WorkerRecord
from backhaul.transport.sim import SimNetwork, Weather
from backhaul.transport.sim_ends import SimEndpoint
from backhaul.transport.sim_runtime import SimRuntime
from backhaul.transport.strands import Home, Scheduler, SimThread
from backhaul.types import Options

T = TypeVar("T")

_COUNTED = (
    "num_autograd_contexts",
    "num_current_backward_passes",
    "num_pending_calls",
    "num_owner_rrefs",
    "num_forks",
    "num_user_rrefs",
)


class Program(Generic[T]):
    """Something that runs on a worker, on a strand of its own."""

    def __init__(self, cluster: SimCluster, node: Node, function: Callable[[], T]) -> None:
        self._cluster = cluster
        self._node = node
        self._function: Callable[[], T] | None = function
        self._value: list[T] = []
        self.error: BaseException | None = None
        self.over = False  # by itself; else its worker died under it
        self._thread = cluster.runtime_of(node).spawn(self._run, name=f"{node.worker.name}-program")

    def _run(self) -> None:
        function, self._function = self._function, None
        assert function is not None
        try:
            with self._node.worker:
                self._value.append(function())
        except Exception as error:
            self.error = error
        self.over = True

    @property
    def ended(self) -> bool:
        """Whether it does not run any more."""
        assert isinstance(self._thread, SimThread)
        return self._thread.strand.done

    def result(self) -> T:
        """Wait for it; return or raise what it did."""
        assert isinstance(self._thread, SimThread)
        self._cluster.scheduler.join(self._thread.strand, None)
        if self.error is not None:
            raise self.error
        if not self.over:
            raise RuntimeError(f"worker '{self._node.worker.name}' died while it ran a program")
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
        weather: Weather | None = None,
        eagerness: float = 0.1,
        keep_trace: bool = False,
    ) -> None:
        self.scheduler = Scheduler(seed, eagerness=eagerness, keep_trace=keep_trace)
        self.network = SimNetwork(self.scheduler, weather)
        self.options = options or Options()
        self.nodes: dict[str, Node] = {}  # those that live
        self._size = workers
        self._epoch = 0
        self._ids: dict[str, int] = {}
        self._incarnations = itertools.count(1)
        self._records: dict[str, WorkerRecord] = {}
        self._collecting = False
        self._frozen = False  # by somebody else

    def __enter__(self) -> SimCluster:
        self._collecting = gc.isenabled()
        self._frozen = gc.get_freeze_count() > 0
        gc.disable()
        gc.collect()
        gc.freeze()  # so that collecting costs only what the simulation has made
        self.scheduler.__enter__()
        ends = [self._prepare(f"worker{number}") for number in range(self._size)]
        for record, endpoint, home in ends:
            self._start(record, endpoint, home)
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

    def _prepare(self, name: str) -> tuple[WorkerRecord, SimEndpoint, Home]:
        home = self.scheduler.home(name)
        endpoint = self.network.endpoint(home)
        number = self._ids.setdefault(name, len(self._ids))
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
            self._epoch,
        )
        self._records[name] = record
        return record, endpoint, home

    def _start(self, record: WorkerRecord, endpoint: SimEndpoint, home: Home) -> Node:
        clock = self.scheduler.random.uniform(0.0, 1000.0)
        runtime = SimRuntime(self.scheduler, home, clock=clock)
        node = start_node(
            record,
            self._records.values(),
            endpoint,
            self.options,
            runtime=runtime,
        )
        self.nodes[record.name] = node
        return node

    @staticmethod
    def runtime_of(node: Node) -> SimRuntime:
        """The runtime of a node of the simulation."""
        runtime = node.worker.runtime
        assert isinstance(runtime, SimRuntime)
        return runtime

    def home_of(self, name: str) -> Home:
        """What the strands of a living worker belong to."""
        return self.runtime_of(self.nodes[name]).home

    def _note(self, text: str) -> None:
        self.scheduler.trace.note(f"{self.scheduler.now:.9f} {text}")

    # Programs and time.

    def run(self, name: str, function: Callable[[], T]) -> Program[T]:
        """Run a function on a worker, which is current there."""
        return Program(self, self.nodes[name], function)

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
        home = self.runtime_of(node).home
        node.worker.abandon()
        self.network.crash(home, silent=silent)

    def start(self, name: str) -> Node:
        """Start a worker that is new, or one that has crashed, under its old name and as a new incarnation. It is
        given its place here, which is the leader's task; then it shows itself to all that it can reach.
        """
        self._note(f"start of {name}")
        self.network.returns(name)
        self._epoch += 1
        made = self._start(*self._prepare(name))
        self.run(name, functools.partial(introduce, made, self.options.connect_timeout)).result()
        return made

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
        self.network.weather = Weather(patience=self.network.weather.patience)
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
        homes = [self.runtime_of(node).home for node in nodes]
        ends = [node.worker.endpoint for node in nodes]
        try:
            shutdown_together(nodes, graceful=graceful, timeout=timeout)
        finally:
            self.sleep(0.1)
        left = [f"{strand.name} waits for {strand.where}" for home in homes for strand in home.strands]
        for end in ends:
            assert isinstance(end, SimEndpoint)
            left += [f"{end.home.name} has channel {hash(channel)} open" for channel in end.channels if channel.open]
        return left
