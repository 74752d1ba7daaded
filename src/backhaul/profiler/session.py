"""``bh.profile``: opens a profile on a worker, collects what all workers wrote down, and shows it."""

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
from backhaul.profiler.merge import Clock, Raw, merge
from backhaul.profiler.model import Timeline
from backhaul.profiler.recorder import ProfileRecorder, Settings, clock, collect, unseen
from backhaul.profiler.records import OpRecord, Share, decode
from backhaul.profiler.table import to_table

log = logging.getLogger("backhaul")

_ATTACHED = "_backhaul_profile"
_PINGS = 8  # round trips by which a clock is compared


class profile:
    """Profile this worker and, for every call made inside, the workers that serve it, however far away.

    Forward and backward: what a worker does for a call or for gradients of the profile is recorded there by
    ``torch.profiler``, together with what the call spent in queues, on the wire and in serialisation. At the end
    all of it comes here.

    A profile sees this worker as a whole, on all threads, but elsewhere only what is done for it. Several may be open
    at once. Workers without a connection to this one join when the first call goes there, which takes a moment;
    profile the second step rather than the first.

    Args:
        ops: Whether to record operations of torch; without them a profile costs less.
        record_shapes: Keep the shapes of their inputs.
        profile_memory: Keep what memory they take.
        timeout: Seconds that each worker has to hand over its share.

    Raises:
        BackhaulError: It is asked for results while it is open.

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
        self._home = 0
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
            log.warning("the profile is lost: %s", problem)  # what ended the block says more

    def start(self) -> None:
        """Begin; the same as to enter it."""
        self._start(local_ops=True)

    def _start(self, *, local_ops: bool) -> None:
        if self._session:
            raise BackhaulError("this profile has been used; make another one")
        require("backhaul.profile")
        worker = self._worker = current_worker()
        self._session = secrets.randbits(62) | 1
        self._home = threading.get_native_id()
        recorder = worker.part(ProfileRecorder)
        recorder.join(self._session, recorder.id, recorder.id, self._settings, local_ops=local_ops)
        try:
            recorder.invite_connected(self._session)
        except BaseException:  # an interrupt, say
            recorder.leave(self._session)
            raise
        self._begin = recorder.now()

    def stop(self) -> None:
        """End, and collect; the same as to leave it. What cannot be had is named in the result."""
        self._stop(None)

    def _stop(self, local: torch.profiler.profile | None) -> None:
        worker = self._worker
        if worker is None:
            raise BackhaulError("this profile was not started")
        if self._timeline is not None:
            return
        end = ProfileRecorder.now()
        recorder, node = worker.part(ProfileRecorder), worker.part(Node)
        missing = recorder.failures(self._session)
        own = recorder.leave(self._session)
        if own is None:
            raise BackhaulError(f"worker '{worker.name}' was shut down while it was profiled", worker=worker.name)
        shares, clocks, more = unseen(_collect, node.client, self._session, own, self._timeout)
        if local is not None:
            _share_out(kineto.operations(local), own, shares)
        names = {peer.record.id: peer.info.name for peer in node.peers}
        raw = Raw(recorder.id, self._home, self._begin, end, shares, clocks, missing | more, names)
        self._timeline = merge(raw)

    # What it found.

    @property
    def timeline(self) -> Timeline:
        """Everything, as plain records."""
        if self._timeline is None:
            raise BackhaulError("the profile is not over: its results are there after the `with` block")
        return self._timeline

    def table(self) -> str:
        """Per worker and per call: how often, and where the time and the bytes went."""
        return to_table(self.timeline)

    def events(self) -> EventList:
        """All operations and calls as events of ``torch.profiler``; what was done elsewhere is named by call."""
        return to_events(self.timeline)

    def key_averages(self, **options: Any) -> EventList:
        """``events`` by name, as ``torch.profiler.profile.key_averages``."""
        return self.events().key_averages(**options)  # type: ignore[no-any-return]

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write a trace for Perfetto or ``chrome://tracing``: a process per worker, one clock, arrows for messages."""
        with open(path, "wb") as file:
            file.write(to_chrome(self.timeline))

    def report(self, path: str | os.PathLike[str], *, title: str = "Backhaul profile") -> None:
        """Write a page that shows all of it and needs nothing but a browser."""
        from backhaul.profiler.report import render

        with open(path, "w", encoding="utf-8") as file:
            file.write(render(self.timeline, title=title))


def _collect(
    client: CallClient, session: int, own: Share, timeout: float
) -> tuple[list[Share], dict[int, Clock], dict[int, str]]:
    """The shares of all workers that joined, found from one to the next, their clocks, and who did not answer."""
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
                    continue  # it never joined, or has given the profile up
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
    """Operations that somebody else recorded in this process go to the workers on whose threads they ran."""
    neighbours = {t: share for share in shares if share.pid == own.pid and share is not own for t in share.threads}
    for op in ops:
        neighbours.get(op.thread, own).ops.append(op)


def compare_clocks(ask: Callable[[], int]) -> Clock:
    """How far the clock that ``ask`` reads is ahead of this one, by the round trip that took the least time: the other
    clock was read somewhere in the middle of it.
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
    """Let a running ``torch.profiler.profile`` see what other workers do for this one.

    To be called inside of it. When it stops, what was done elsewhere joins its events, named by call
    (``rpc_sync#fn(worker0 -> worker1)#remote_op: aten::mm``). The profile returned has all of it, for ``export``,
    ``report`` and ``table``. Under a schedule this sees the cycle that is being recorded; attach again in the next.

    Workers of the same process (``bh.cluster``) cannot have a profiler of their own while this one runs. Their
    operations are seen if it records all threads, as below.

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
        raise BackhaulError("attach() is for a profiler that is running: call it inside of `with torch.profiler...`")
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
