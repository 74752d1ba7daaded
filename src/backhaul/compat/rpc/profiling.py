"""Adds calls to profiles of torch's legacy profiler, under the reference's names, with the events of the callee.

While that profiler runs on the caller, the function of a call also runs under it on the callee. The callee keeps the
events under a token. The caller fetches them when the call is done, and adds them to its own when its profile ends. The
profiler does not know about calls, so this module wraps the functions that begin and end a profile.
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

_profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled

Call = tuple[Callable[..., Any], tuple[Any, ...], Any]


class ProfiledEvent(msgspec.Struct, array_like=True, frozen=True):
    """The part of a profiler event that the callee sends."""

    name: str
    node: int
    thread: int
    start: float
    end: float
    shapes: Any
    memory: int
    is_async: bool


class RemoteEvents:
    """The events that one profile gets from other workers."""

    def __init__(self, profile: Any) -> None:
        self.settings = (bool(profile.record_shapes), bool(profile.profile_memory))
        self.began = time.perf_counter()
        self._events: list[FunctionEvent] = []

    def add(self, key: str, node: int, at: float, events: Iterable[ProfiledEvent]) -> None:
        """Add the events of a call that began at ``at``, in microseconds since this profile began."""
        for event in events:
            made: Any = FunctionEvent(
                id=next(_unique_numbers),
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

    def merge(self, events: list[FunctionEvent]) -> list[FunctionEvent]:
        """All events of the profile, ordered by time. ``events`` are those of this worker."""
        own = agent.current().get_worker_info().id if agent.is_set() else -1
        for event in events:
            if event.node_id < 0:
                event.node_id = own
        return sorted([*events, *self._events], key=lambda event: (event.time_range.start, -event.time_range.end))


_unique_numbers = itertools.count(1 << 32)
_open_profiles = threading.local()
_events_by_token: dict[int, list[ProfiledEvent]] = {}  # on the callee, until the caller fetches them


def _wrap_legacy_profiler() -> None:
    """Wrap the functions of torch that begin and end a legacy profile."""
    module: Any = profiler_legacy
    start, parse = module.profile._start_trace, module._parse_legacy_records

    def begin(profile: Any) -> None:
        remote = RemoteEvents(profile)  # its clock starts first, so that no remote event precedes its call
        start(profile)
        _open_profiles.stack = [*getattr(_open_profiles, "stack", ()), remote]

    def end(records: Any) -> list[FunctionEvent]:
        *outer, remote = getattr(_open_profiles, "stack", None) or [None]
        _open_profiles.stack = outer
        events: list[FunctionEvent] = parse(records)
        return remote.merge(events) if remote is not None else events

    module.profile._start_trace, module._parse_legacy_records = begin, end


_wrap_legacy_profiler()


def is_on() -> bool:
    """Whether the legacy profiler records on this thread. Other profilers do not record calls."""
    if not _profiler_enabled():
        return False
    types = torch._C._profiler.ActiveProfilerType
    return torch._C._autograd._profiler_type() == types.LEGACY and bool(getattr(_open_profiles, "stack", None))


def name_of(function: Any) -> str:
    """The name of a function in a profile."""
    builtin: str | None = _find_builtin(function)
    if builtin is not None:
        return builtin
    if isinstance(function, torch.jit.ScriptFunction):
        return str(torch._jit_internal._qualified_name(function))
    return str(getattr(function, "__qualname__", type(function).__name__))


def record(
    mode: RPCExecMode, name: str, peer: WorkerInfo, call: Call | None, start: Callable[[Call | None], Any]
) -> Future[Any]:
    """Record a call that ``start`` makes. The returned future is done when the callee's events are recorded, too.

    Args:
        mode: How the call is made.
        name: The name of the called function.
        peer: The callee.
        call: Function, arguments and keyword arguments. None: do not record the callee's events.
        start: Makes the call that it gets, instead of ``call``, and returns its future.
    """
    remote: RemoteEvents = _open_profiles.stack[-1]
    key = _build_rpc_profiling_key(mode, name, agent.current().get_worker_info().name, peer.name)
    token = agent.current().worker.info.id << 48 | next(_unique_numbers)
    all_recorded: Future[None] = Future()
    with torch.autograd.profiler.record_function(key) as region:
        at = (time.perf_counter() - remote.began) * 1e6
        if call is not None:
            function, args, kwargs = call
            call = run, (token, remote.settings, function, *args), kwargs
        result = start(call)

        def add_events(fetched: Any) -> None:
            try:
                remote.add(key, peer.id, at, fetched.value())
            finally:
                all_recorded.set_result(None)

        def fetch_events(_: Any) -> None:
            if call is None:
                all_recorded.set_result(None)
            else:
                rpc_async(peer, take_events, args=(token,)).add_done_callback(add_events)

        result.add_done_callback(fetch_events)
        recorded = region._call_end_callbacks_on_future(all_recorded)
    final: Future[Any] = Future()
    recorded.add_done_callback(lambda _: _copy(result, final))
    return final


def _copy(source: Any, target: Future[Any]) -> None:
    follow(source, target)


# On the callee.


def run(token: int, settings: tuple[bool, bool], function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run a call under the profiler.

    If the result is a future, wait for it, because a profile must end on the thread that began it.
    """
    shapes, memory = settings
    profile: Any = profiler_legacy.profile(record_shapes=shapes, profile_memory=memory)
    try:
        with profile:
            result = function(*args, **kwargs)
            return result.wait() if isinstance(result, torch._C.Future) else result
    finally:
        _events_by_token[token] = [_to_message(event) for event in profile.function_events]


def take_events(token: int) -> list[ProfiledEvent]:
    """Return the events of a call and forget them."""
    return _events_by_token.pop(token, [])


def _to_message(event: FunctionEvent) -> ProfiledEvent:
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


# Profiles of a whole process, which other workers open and close.

_process_profiles: list[_server_process_global_profile] = []


class _server_process_global_profile:
    """While entered, all calls that this process serves run under the profiler, on all threads."""

    def __init__(self, *, record_shapes: bool = False, profile_memory: bool = False) -> None:
        self.settings = (record_shapes, profile_memory)
        self.process_global_function_events: list[Any] = []
        self.function_events: Any = None

    def __enter__(self) -> None:
        _process_profiles.append(self)

    def __exit__(self, *_: object) -> None:
        _process_profiles.remove(self)
        all_events = [event for events in self.process_global_function_events for event in events]
        self.function_events = EventList(all_events, profile_memory=self.settings[1])
        self.function_events._build_tree()

    def key_averages(self, **options: Any) -> Any:
        """The averages of the events, by name."""
        return self.function_events.key_averages(**options)


def call_profiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, under the profiler if a profile of the whole process is open."""
    if not _process_profiles or is_on():
        return function(*args, **kwargs)
    open_now = list(_process_profiles)
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
