"""``bh.profile``: opens a profile on a worker, collects the records of all workers, and shows them."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch.autograd.profiler_util import EventList

from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.node import Node
from backhaul._torch_support import require
from backhaul._worker.worker import Worker, current_worker
from backhaul.errors import BackhaulError
from backhaul.profiler import kineto
from backhaul.profiler.chrome import to_chrome
from backhaul.profiler.events import to_events
from backhaul.profiler.merge import Clock, CollectedShares, merge
from backhaul.profiler.model import Timeline
from backhaul.profiler.open_profiles import OpenProfiles, Settings, clock, collect, run_unprofiled
from backhaul.profiler.records import OpRecord, Share, decode
from backhaul.profiler.table import to_table

log = logging.getLogger("backhaul")

_ATTACHED = "_backhaul_profile"
_PINGS = 8  # round trips to compare a clock


class profile:
    """Profile this worker, and all workers that serve calls made inside the block, directly or through other workers.

    Each worker records with ``torch.profiler`` what it does for the calls and gradients of the profile, and how long
    each call spends in queues, on the wire and in serialization. When the profile ends, this worker collects all
    records.

    A profile records this worker as a whole, on all threads. On other workers it records only the work done for the
    profile. Several profiles may be open at once. A worker without a connection to this one joins when the first call
    goes there, which takes a moment; profile the second step rather than the first.

    Args:
        ops: Whether to record operations of torch. A profile without them costs less.
        record_shapes: Whether to record the shapes of the inputs of operations.
        profile_memory: Whether to record the memory that operations allocate.
        timeout: How many seconds each worker has to return its records.

    Raises:
        BackhaulError: The results were read while the profile was still open.

    Example:
        >>> import backhaul as bh, torch
        >>> with bh.cluster(2), bh.profile() as prof:
        ...     _ = bh.rpc_sync("worker1", torch.mm, args=(torch.ones(2, 2), torch.ones(2, 2)))
        >>> [call.name for call in prof.timeline.calls]
        ['rpc_sync#mm(worker0 -> worker1)']
        >>> "rpc_sync#mm(worker0 -> worker1)#remote_op: aten::mm" in [event.name for event in prof.events()]
        True
    """

    def __init__(
        self,
        *,
        ops: bool = True,
        record_shapes: bool = False,
        profile_memory: bool = False,
        timeout: float = 60.0,
    ) -> None:
        self._settings = Settings(ops, record_shapes, profile_memory)
        self._timeout = timeout
        self._timeline: Timeline | None = None
        self._session = 0
        self._worker: Worker | None = None
        self._thread = 0  # the profiled thread
        self._begin = 0
        self._clocks: dict[int, Clock] = {}

    def __enter__(self) -> profile:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        except Exception as problem:
            if error is None:
                raise
            # Raise the error that ended the block, because it matters more.
            log.warning("the profile could not be collected: %s", problem)

    def start(self) -> None:
        """Start the profile, as entering the ``with`` block does."""
        self._start(local_ops=True)

    def start_everywhere(self) -> None:
        """Start the profile on all workers. It records everything that they do, whoever asks for it.

        The critical path is that of the main thread of this process.
        """
        self._start(local_ops=True, everywhere=True)

    def _start(self, *, local_ops: bool, everywhere: bool = False) -> None:
        if self._session:
            raise BackhaulError("this profile was already used; create another one with bh.profile()")
        require("backhaul.profile")
        worker = self._worker = current_worker()
        self._session = secrets.randbits(62) | 1
        self._thread = threading.get_native_id()
        if everywhere:
            self._thread = threading.main_thread().native_id or self._thread
        profiles = worker.part(OpenProfiles)
        profiles.join(self._session, profiles.id, profiles.id, self._settings, local_ops=local_ops)
        try:
            if everywhere:
                profiles.invite_all(self._session)
            else:
                profiles.invite_connected(self._session)
        except BaseException:  # for example an interrupt
            profiles.leave(self._session)
            raise
        self._begin = time.time_ns()

    def stop(self) -> None:
        """End the profile and collect the records, as leaving the block does. The result names missing workers."""
        self._stop(None)

    def _stop(self, local: torch.profiler.profile | None) -> None:
        worker = self._worker
        if worker is None:
            raise BackhaulError("this profile was not started; call start() or use it in a `with` block")
        if self._timeline is not None:
            return
        end = time.time_ns()
        profiles, node = worker.part(OpenProfiles), worker.part(Node)
        missing = profiles.failures(self._session)
        own = profiles.leave(self._session)
        if own is None:
            raise BackhaulError(
                f"worker '{worker.name}' was shut down before its profile ended; end the profile before shutdown",
                worker=worker.name,
            )
        shares, clocks, more = run_unprofiled(_collect, node.client, self._session, own, self._timeout)
        if local is not None:
            _share_out(kineto.operations(local), own, shares)
        names = {peer.record.id: peer.info.name for peer in node.peers}
        self._timeline = merge(
            CollectedShares(profiles.id, self._thread, self._begin, end, shares, clocks, missing | more, names)
        )

    # Results.

    @property
    def timeline(self) -> Timeline:
        """All results, as plain records."""
        if self._timeline is None:
            raise BackhaulError("the profile is still open; read its results after the `with` block")
        return self._timeline

    def table(self) -> str:
        """Return a table by worker and by call: counts, times and bytes."""
        return to_table(self.timeline)

    def events(self) -> EventList:
        """Return all operations and calls as events of ``torch.profiler``. Remote events name their call."""
        return to_events(self.timeline)

    def key_averages(self, **options: Any) -> EventList:
        """Return averages of ``events`` by name, like ``torch.profiler.profile.key_averages``."""
        return self.events().key_averages(**options)  # type: ignore[no-any-return]

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write a trace for Perfetto or ``chrome://tracing``: a process per worker, one clock, arrows for messages."""
        with open(path, "wb") as file:
            file.write(to_chrome(self.timeline))

    def report(self, path: str | os.PathLike[str], *, title: str = "Backhaul profile") -> None:
        """Write an HTML report. It is one file and works offline."""
        from backhaul.profiler.report import render

        with open(path, "w", encoding="utf-8") as file:
            file.write(render(self.timeline, title=title))


def _collect(
    client: CallClient, session: int, own: Share, timeout: float
) -> tuple[list[Share], dict[int, Clock], dict[int, str]]:
    """Collect the shares of all workers, following who invited whom; also their clocks, and which workers failed."""
    shares, clocks, missing = [own], {own.worker: Clock()}, dict[int, str]()
    left = list(own.joined)
    seen = {own.worker, *left}
    while left:
        calls = {worker: client.call_async(worker, collect, (session,), None, timeout) for worker in left}
        left = []
        for worker, call in calls.items():
            try:
                found = call.wait()
                if found is None:
                    continue  # it never joined, or has dropped the profile
                share = decode(found)
                here = client.peers.own.record.host == client.peers.find(worker).record.host
                ask = functools.partial(client.call, worker, clock, None, None, timeout)
                clocks[worker] = Clock() if here else compare_clocks(ask)
            except Exception as error:
                missing[worker] = f"{type(error).__name__}: {error}"
                continue
            shares.append(share)
            left += [each for each in share.joined if each not in seen]
            seen.update(share.joined)
    return shares, clocks, missing


def _share_out(ops: list[OpRecord], own: Share, shares: list[Share]) -> None:
    """Assign operations that another profiler recorded in this process to the workers on whose threads they ran."""
    neighbours = {t: share for share in shares if share.pid == own.pid and share is not own for t in share.threads}
    for op in ops:
        neighbours.get(op.thread, own).ops.append(op)


def compare_clocks(ask: Callable[[], int]) -> Clock:
    """Return how far the clock that ``ask`` reads is ahead of this one.

    It is measured by the fastest of several round trips: the other clock was read near the middle of it.
    """
    best: Clock | None = None
    for _ in range(_PINGS):
        before = time.time_ns()
        there = ask()
        after = time.time_ns()
        found = Clock(there - (before + after) // 2, (after - before + 1) // 2)
        best = found if best is None or found.error < best.error else best
    assert best is not None
    return best


def attach(prof: torch.profiler.profile) -> profile:
    """Add the work of other workers to a running ``torch.profiler.profile``.

    Call it inside the block of that profiler. When the profiler stops, its events include the work of other workers,
    named by call (``rpc_sync#fn(worker0 -> worker1)#remote_op: aten::mm``). The returned profile holds all results, for
    ``export``, ``report`` and ``table``. With a schedule, it covers the cycle that is being recorded; call ``attach``
    again in the next cycle.

    Workers of the same process (``bh.cluster``) cannot run a profiler of their own while this one runs. Their
    operations are recorded if this profiler records all threads, as in the example.

    Example:
        >>> import backhaul as bh, torch
        >>> every = torch.profiler._ExperimentalConfig(profile_all_threads=True)
        >>> with bh.cluster(2), torch.profiler.profile(experimental_config=every) as prof:
        ...     everywhere = bh.profiler.attach(prof)
        ...     _ = bh.rpc_sync("worker1", torch.mm, args=(torch.ones(2, 2), torch.ones(2, 2)))
        >>> [event.name for event in prof.events() if event.is_remote and event.name.endswith("aten::mm")]
        ['rpc_sync#mm(worker0 -> worker1)#remote_op: aten::mm']
    """
    require("backhaul.profile")
    core: Any = prof.profiler
    if core is None or not kineto.is_profiled():
        raise BackhaulError(
            "attach() needs a running profiler; call it inside the block of `with torch.profiler.profile()`"
        )
    if isinstance(getattr(core, _ATTACHED, None), profile):
        return getattr(core, _ATTACHED)  # type: ignore[no-any-return]
    attached = profile(record_shapes=prof.record_shapes, profile_memory=prof.profile_memory)
    attached._start(local_ops=False)
    leave = core.__exit__

    def stop(*args: Any) -> Any:
        done = leave(*args)
        with contextlib.suppress(AttributeError):
            del core.__exit__
        attached._stop(prof)
        core._ensure_function_events()
        shift = attached._begin - core.kineto_results.trace_start_ns()
        core._function_events.extend(event for event in to_events(attached.timeline, shift) if event.is_remote)
        return done

    core.__exit__ = stop
    setattr(core, _ATTACHED, attached)
    return attached
