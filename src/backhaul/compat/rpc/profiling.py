"""Calls in profiles of torch's legacy profiler, by the reference's names, and what was done for them elsewhere.

While that profiler runs, a call's function runs under it at the callee too. The events are kept there under a ticket
and are asked for when the call is over; they join the caller's when its profile ends. The profiler itself knows nothing
of this, so it is watched where it begins and where it ends.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch
from torch.autograd import profiler_legacy
from torch.autograd.profiler_util import EventList, FunctionEvent
from torch.jit._builtins import _find_builtin

from backhaul._rpc.api import rpc_async
from backhaul.compat.rpc import agent
from backhaul.compat.rpc.futures import Future, follow
from backhaul.compat.rpc.info import WorkerInfo
from backhaul.compat.rpc.internal import RPCExecMode, _build_rpc_profiling_key

REMOTE = "#remote_op: "

Call = tuple[Callable[..., Any], tuple[Any, ...], Any]


class ProfiledEvent(msgspec.Struct, array_like=True, frozen=True):
    """What travels of an event."""

    name: str
    node: int
    thread: int
    start: float
    end: float
    shapes: Any
    memory: int
    is_async: bool


class Collector:
    """What one profile gets from elsewhere."""

    def __init__(self, profile: Any) -> None:
        self.settings = (bool(profile.record_shapes), bool(profile.profile_memory))
        self.began = time.perf_counter()
        self._events: list[FunctionEvent] = []

    def add(self, key: str, node: int, at: float, events: Iterable[ProfiledEvent]) -> None:
        """Events of a call that began at that time, in microseconds of this profile."""
        for event in events:
            made: Any = FunctionEvent(
                id=next(_numbers),
                name=f"{key}{REMOTE}{event.name}",
                trace_name=f"{key}{REMOTE}{event.name}",
                thread=event.thread,
                start_us=at + event.start,
                end_us=at + event.end,
                input_shapes=event.shapes,
                stack=[],
                cpu_memory_usage=event.memory,
                is_async=event.is_async,
                is_remote=True,
                node_id=event.node if event.node >= 0 else node,
                is_legacy=True,
            )
            self._events.append(made)

    def join(self, events: list[FunctionEvent]) -> list[FunctionEvent]:
        """All events of the profile, in order."""
        own = agent.current().get_worker_info().id if agent.is_set() else -1
        for event in events:
            if event.node_id < 0:
                event.node_id = own
        return sorted([*events, *self._events], key=lambda event: (event.time_range.start, -event.time_range.end))


_numbers = itertools.count(1 << 32)
_open = threading.local()
_kept: dict[int, list[ProfiledEvent]] = {}  # at the callee, by ticket


def _watch() -> None:
    """Be told when a legacy profile begins and ends."""
    module: Any = profiler_legacy
    start, parse = module.profile._start_trace, module._parse_legacy_records

    def begin(profile: Any) -> None:
        collector = Collector(profile)  # its clock starts first, so that what a call led to does not precede the call
        start(profile)
        _open.stack = [*getattr(_open, "stack", ()), collector]

    def end(records: Any) -> list[FunctionEvent]:
        *outer, collector = getattr(_open, "stack", None) or [None]
        _open.stack = outer
        events: list[FunctionEvent] = parse(records)
        return collector.join(events) if collector is not None else events

    module.profile._start_trace, module._parse_legacy_records = begin, end


_watch()


def is_on() -> bool:
    """Whether the legacy profiler records here; others know nothing of calls."""
    kinds = torch._C._profiler.ActiveProfilerType
    return (
        torch._C._autograd._profiler_enabled()
        and torch._C._autograd._profiler_type() == kinds.LEGACY
        and bool(getattr(_open, "stack", None))
    )


def name_of(function: Any) -> str:
    """What to call a function in a profile."""
    builtin: str | None = _find_builtin(function)
    if builtin is not None:
        return builtin
    if isinstance(function, torch.jit.ScriptFunction):
        return str(torch._jit_internal._qualified_name(function))
    return str(getattr(function, "__qualname__", type(function).__name__))


def record(
    mode: RPCExecMode, name: str, peer: WorkerInfo, call: Call | None, start: Callable[[Call | None], Any]
) -> Future[Any]:
    """Record a call: ``start`` makes it and returns its future; the future returned is done when all is recorded.

    Args:
        mode: How it is called.
        name: What is called.
        peer: Whom.
        call: Function, arguments and keyword arguments; None: do not look at what is done there.
        start: Takes the call to make in the place of ``call``.
    """
    collector: Collector = _open.stack[-1]
    key = _build_rpc_profiling_key(mode, name, agent.current().get_worker_info().name, peer.name)
    ticket = agent.current().worker.info.id << 48 | next(_numbers)
    over: Future[None] = Future()
    with torch.autograd.profiler.record_function(key) as region:
        at = (time.perf_counter() - collector.began) * 1e6
        if call is not None:
            function, args, kwargs = call
            call = run, (ticket, collector.settings, function, *args), kwargs
        made = start(call)

        def take_over(got: Any) -> None:
            try:
                collector.add(key, peer.id, at, got.value())
            finally:
                over.set_result(None)

        def fetch(_: Any) -> None:
            if call is None:
                over.set_result(None)
            else:
                rpc_async(peer, take, args=(ticket,)).add_done_callback(take_over)

        made.add_done_callback(fetch)
        recorded = region._call_end_callbacks_on_future(over)
    final: Future[Any] = Future()
    recorded.add_done_callback(lambda _: _copy(made, final))
    return final


def _copy(source: Any, target: Future[Any]) -> None:
    follow(source, target)


# What runs at the callee.


def run(ticket: int, settings: tuple[bool, bool], function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run a call under the profiler. Where the result is a future, wait for it: a profile ends on its own thread."""
    shapes, memory = settings
    profile: Any = profiler_legacy.profile(record_shapes=shapes, profile_memory=memory)
    try:
        with profile:
            result = function(*args, **kwargs)
            return result.wait() if isinstance(result, torch._C.Future) else result
    finally:
        _kept[ticket] = [_describe(event) for event in profile.function_events]


def take(ticket: int) -> list[ProfiledEvent]:
    """The events of a call, once."""
    return _kept.pop(ticket, [])


def _describe(event: FunctionEvent) -> ProfiledEvent:
    span = event.time_range
    return ProfiledEvent(
        event.name,
        event.node_id,
        event.thread,
        span.start,
        span.end,
        event.input_shapes,
        event.cpu_memory_usage,
        event.is_async,
    )


# Profiles of a whole process, which others switch on and off.

_global: list[_server_process_global_profile] = []


class _server_process_global_profile:
    """While entered, all calls that this process serves run under the profiler, on whatever thread."""

    def __init__(self, *, record_shapes: bool = False, profile_memory: bool = False) -> None:
        self.settings = (record_shapes, profile_memory)
        self.process_global_function_events: list[Any] = []
        self.function_events: Any = None

    def __enter__(self) -> None:
        _global.append(self)

    def __exit__(self, *_: object) -> None:
        _global.remove(self)
        together = [event for events in self.process_global_function_events for event in events]
        self.function_events = EventList(together, profile_memory=self.settings[1])
        self.function_events._build_tree()

    def key_averages(self, **options: Any) -> Any:
        """Events by name."""
        return self.function_events.key_averages(**options)


def observed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function; where a profile of the whole process is open, under the profiler."""
    if not _global or is_on():
        return function(*args, **kwargs)
    open_now = list(_global)
    profile: Any = profiler_legacy.profile(
        record_shapes=any(each.settings[0] for each in open_now),
        profile_memory=any(each.settings[1] for each in open_now),
    )
    try:
        with profile:
            return function(*args, **kwargs)
    finally:
        for each in open_now:
            each.process_global_function_events.append(list(profile.function_events))
