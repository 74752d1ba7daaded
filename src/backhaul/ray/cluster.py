"""Starts a cluster on Ray and ends it: the driver's side. The workers' side is in ``worker_actor``."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar, TypeVarTuple, overload

from torch.distributed import HashStore  # type: ignore[attr-defined]

from backhaul._launch.embedded import worker_names
from backhaul._options import Options
from backhaul._rpc.api import get_worker_info, init, on_membership, rpc_sync
from backhaul._rpc.arguments import keywords, positional
from backhaul._rpc.cluster.own_endpoint import secret_of
from backhaul._rpc.node import Node
from backhaul._worker.worker import Worker
from backhaul.errors import CallTimeoutError, PeerLostError, UnknownWorkerError, WorkerFailedError
from backhaul.ray.directory import actor_name, directory_class
from backhaul.ray.library import connected_ray
from backhaul.ray.membership import ClusterSettings, record_of
from backhaul.ray.placement import Resources, actor_options, make_group, resources_of
from backhaul.ray.shipped_functions import refuse_shipped_state
from backhaul.ray.worker_actor import BackhaulWorker, refuse_graphs

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_PROBE_SECONDS = 2.0  # for a worker to answer, before the driver asks Ray again whether the actor lives
_RETRY_SECONDS = 0.2  # before that, unless a worker joins


class RayCluster(contextlib.AbstractContextManager["RayCluster"]):
    """Workers that are Ray actors, and the driver; see ``start``. Used by one thread, except ``wait_for``.

    Attributes:
        name: The name of the cluster, for ``join``.
        namespace: The Ray namespace of the program that started it.
        driver: The worker of this process.
        actors: The Ray actor of each other worker, by the worker's name and in the order of their ids.

    Example:
        >>> import backhaul as bh
        >>> with bh.ray.start(2) as cluster:  # doctest: +SKIP
        ...     cluster.run(abs, args=(-1,), on=["worker2"])
        [1]
    """

    def __init__(self, ray: Any, name: str, driver: Worker, group: Any) -> None:
        self._ray = ray
        self._group = group  # None: it is not ours to remove
        self._directory: Any = None
        self.name = name
        self.namespace: str = ray.get_runtime_context().namespace
        self.driver = driver
        self.actors: dict[str, Any] = {}

    def __repr__(self) -> str:
        state = "ended" if self.driver.closed else "running"
        return f"<RayCluster '{self.name}' of {', '.join((self.driver.name, *self.actors))}; {state}>"

    # fmt: off
    @overload
    def run(self, function: Callable[..., T], args: list[Any], kwargs: Mapping[str, Any] | None = ..., *,
            on: Sequence[str] | None = ..., timeout: float | None = ...) -> list[T]: ...
    @overload
    def run(self, function: Callable[[*Ts], T], args: tuple[*Ts], kwargs: None = ..., *,
            on: Sequence[str] | None = ..., timeout: float | None = ...) -> list[T]: ...
    @overload
    def run(self, function: Callable[[], T], args: tuple[()] = ..., kwargs: None = ..., *,
            on: Sequence[str] | None = ..., timeout: float | None = ...) -> list[T]: ...
    @overload
    def run(self, function: Callable[..., T], args: tuple[Any, ...], kwargs: Mapping[str, Any], *,
            on: Sequence[str] | None = ..., timeout: float | None = ...) -> list[T]: ...
    @overload
    def run(self, function: Callable[..., T], *, kwargs: Mapping[str, Any],
            on: Sequence[str] | None = ..., timeout: float | None = ...) -> list[T]: ...
    # fmt: on
    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        on: Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on all workers but the driver, at the same time; return the results by id.

        Args:
            function: Runs in each worker, where ``get_worker_info()`` says which worker it runs in.
            args: Positional arguments for all workers, a tuple or a list.
            kwargs: Keyword arguments for all workers, a dict.
            on: The names of the workers that run the function; default: all but the driver.
            timeout: Seconds to wait for the results; None: no limit.

        Raises:
            Exception: What the function raised first, as Ray raises it: of its own type, with the remote traceback.
            SerializationError: The function goes by value and keeps state in globals.
            ray.exceptions.RayActorError: A worker was lost. Ray does not run the function again.
            ray.exceptions.GetTimeoutError: There were no results in time.
        """
        return list(self._ray.get(self.remote(function, args, kwargs, on=on), timeout=timeout))

    def remote(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        on: Sequence[str] | None = None,
    ) -> list[Any]:
        """Start what ``run`` does and return Ray's references to the results, for ``ray.get`` and ``ray.wait``.

        An actor runs one function after the other. It serves the calls of other workers at all times.
        """
        args, kwargs = positional(args), keywords(kwargs)
        names = self._names(on)
        refuse_shipped_state((function, *args, *kwargs.values()))
        refuse_graphs((args, dict(kwargs)), "an argument")
        return [self.actors[name].run.remote(function, args, kwargs) for name in names]

    def wait_for(self, name: str | None = None, timeout: float | None = None) -> None:
        """Wait until a worker can be called: after a ``PeerLostError``, until Ray has restarted it and it has joined.

        What the worker held is gone: modules, references, and its part of graphs. Put it there again.

        Args:
            name: The worker; default: all workers. One that runs a function of ``run`` ends it first.
            timeout: Seconds to wait; default ``options.rendezvous_timeout``.

        Raises:
            WorkerFailedError: Ray will not restart the worker: see ``max_restarts``.
            TimeoutError: The worker did not come back in time.
        """
        limit = self.driver.options.rendezvous_timeout if timeout is None else timeout
        deadline, joined = time.monotonic() + limit, threading.Event()
        names = self._names(None if name is None else [name])
        with self.driver, contextlib.ExitStack() as stack:
            stack.callback(on_membership(lambda event: joined.set() if event.kind == "joined" else None))
            while True:
                self._await_actors(names, deadline)
                try:
                    for each in names:
                        rpc_sync(each, get_worker_info, timeout=_PROBE_SECONDS)
                    return
                except (PeerLostError, CallTimeoutError) as error:  # an actor has died after it was ready
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"worker '{error.worker}' did not answer in {limit:g} s: {error}") from error
                joined.wait(_RETRY_SECONDS)
                joined.clear()

    def shutdown(self, *, graceful: bool = True, timeout: float | None = None) -> None:
        """End all workers, the driver too, and give Ray its resources back. Ray itself goes on.

        Args:
            graceful: Whether to wait until no call is under way anywhere.
            timeout: Seconds to wait at most; default ``options.shutdown_timeout``.

        Raises:
            ShutdownTimeoutError: Calls were still under way. The workers are ended nevertheless.
        """
        limit = self.driver.options.shutdown_timeout if timeout is None else timeout
        deadline, ends = time.monotonic() + limit, list[Any]()
        runs = self._ray.is_initialized()  # if not, the actors have ended with Ray, and a call would start it again
        try:
            if runs and graceful and not self.driver.closed:
                ends = [actor.end.remote(limit) for actor in self.actors.values()]
            self.driver.part(Node).shutdown(graceful=graceful, timeout=limit)
            if ends:
                self._ray.wait(ends, num_returns=len(ends), timeout=max(deadline - time.monotonic(), 0))
        finally:
            for actor in (*self.actors.values(), self._directory):
                if runs and actor is not None:
                    self._ray.kill(actor)
            self._directory, group, self._group = None, self._group, None
            if runs and group is not None:
                self._ray.util.remove_placement_group(group)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(graceful=kind is None)

    def _names(self, given: Sequence[str] | None) -> list[str]:
        """The given names, or those of all actors. Raises ``UnknownWorkerError``."""
        for name in given or ():
            if name not in self.actors:
                raise UnknownWorkerError(
                    f"no actor is called '{name}'; there are {', '.join(self.actors)}", worker=name
                )
        return list(self.actors if given is None else given)

    def _start_actors(
        self, names: Sequence[str], needs: Sequence[Resources], group: Any, settings: ClusterSettings, words: Any
    ) -> None:
        ray, strategies = self._ray, self._ray.util.scheduling_strategies
        here = strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        always: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
        directory = ray.remote(directory_class()).options(
            name=actor_name(self.name), scheduling_strategy=here, **always
        )
        self._directory = directory.remote(pickle.dumps(settings), self.driver.name, record_of(self.driver))
        kind = ray.remote(BackhaulWorker)
        for number, (name, need) in enumerate(zip(names, needs, strict=True)):
            bundle = -1 if self._group is None else number
            place = strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            options = {**actor_options(need), **words, "scheduling_strategy": place}
            self.actors[name] = kind.options(**options).remote(name, number + 1, self.name)

    def _await_actors(self, names: Sequence[str], deadline: float) -> None:
        """Wait until Ray has started these actors, again if need be. An actor that has started has joined."""
        refs = [self.actors[name].ready.options(max_task_retries=-1).remote() for name in names]
        left = max(deadline - time.monotonic(), 0.0)
        done = set(self._ray.wait(refs, num_returns=len(refs), timeout=left)[0])
        for name, ref in zip(names, refs, strict=True):
            try:
                if ref in done:
                    self._ray.get(ref)
            except self._ray.exceptions.RayError as error:
                raise WorkerFailedError(f"worker '{name}' does not run on Ray: {error}", worker=name) from error
        if late := [name for name, ref in zip(names, refs, strict=True) if ref not in done]:
            raise TimeoutError(
                f"Ray did not start {', '.join(late)} within rendezvous_timeout; `ray status` shows what it waits for"
            )


def start(
    workers: int | Sequence[str],
    *,
    resources: Resources | Sequence[Resources] | None = None,
    placement: Any = "SPREAD",
    driver: str = "driver",
    max_restarts: int = 3,
    name: str | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    options: Options | None = None,
) -> RayCluster:
    """Start workers as Ray actors, with this process as one more worker, the driver.

    Once this returns, every worker can be called by its name. Ray restarts an actor whose process dies, and the worker
    joins again under its name. What it held is gone then; see ``RayCluster.wait_for``.

    If the process is not connected to Ray, ``ray.init()`` connects it, or starts Ray on this machine. Workers on one
    host use Unix sockets and shared memory. If Ray has nodes on several hosts, the workers also listen on TCP, at the
    address of their node.

    Args:
        workers: The number of workers (``worker1``, ``worker2``, ...), or their names. The driver is not counted.
        resources: What Ray reserves for each worker, such as ``{"CPU": 1, "GPU": 1}``, or a list with one entry for
            each worker; one CPU by default.
        placement: ``"SPREAD"`` (over nodes, if possible), ``"PACK"``, ``"STRICT_SPREAD"`` or ``"STRICT_PACK"`` makes a
            placement group with a bundle for each worker. Or an existing placement group, as that of a trial of Ray
            Tune: Ray then runs each worker in a bundle that has room.
        driver: The name of the driver, whose id is 0.
        max_restarts: How often Ray restarts each worker; -1: without limit.
        name: The name of the cluster, for ``join``; by default one that is drawn.
        runtime_env: The Ray runtime environment of the workers.
        options: The options of all workers. ``rendezvous_timeout`` limits the start as a whole.

    Raises:
        ImportError: Ray is not installed.
        RendezvousError: Ray has no room for the workers.
        WorkerFailedError: A worker did not start.
        TimeoutError: Ray did not start all workers in time.

    Example:
        >>> import backhaul as bh
        >>> with bh.ray.start(2) as cluster:  # doctest: +SKIP
        ...     cluster.run(bh.get_worker_info)
        [WorkerInfo(name='worker1', id=1), WorkerInfo(name='worker2', id=2)]
    """
    ray = connected_ray()
    options = options or Options()
    names = [f"worker{number}" for number in range(1, workers + 1)] if isinstance(workers, int) else list(workers)
    worker_names([driver, *names])
    if not names:
        raise ValueError("a cluster on Ray has at least one worker beside the driver, got none")
    needs = resources_of(len(names), resources)
    deadline = time.monotonic() + options.rendezvous_timeout
    given = None if isinstance(placement, str) else placement
    made = make_group(ray, needs, placement, options.rendezvous_timeout) if given is None else None
    try:
        settings = _settings(ray, options)
        worker = init(
            driver,
            rank=0,
            world_size=1,
            store=HashStore(),
            options=settings.options_at(ray.util.get_node_ip_address()),
        )
    except BaseException:
        if made is not None:
            ray.util.remove_placement_group(made)
        raise
    cluster = RayCluster(ray, name or secrets.token_hex(4), worker, made)
    try:
        words = {"max_restarts": max_restarts, "runtime_env": None if runtime_env is None else dict(runtime_env)}
        cluster._start_actors(names, needs, given or made, settings, words)
        cluster._await_actors(names, deadline)
    except BaseException:
        cluster.shutdown(graceful=False, timeout=1.0)
        raise
    return cluster


def _settings(ray: Any, options: Options) -> ClusterSettings:
    """Called when the workers have their places: Ray may have added hosts for them."""
    secret = secret_of(options) or secrets.token_hex(32)
    hosts = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    security = dataclasses.replace(options.security, secret=secret)
    return ClusterSettings(dataclasses.replace(options, security=security), several_hosts=len(hosts) > 1)
