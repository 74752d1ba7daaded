"""Timestamps at the begin (>) and the end (<) of methods of Backhaul, in this process.

The one list of what is watched is ``WATCHED``. A name that is not there any more is left out, and ``missing`` says so.
What native code does counts for the method that calls it. A stamp costs about a microsecond.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

WAIT, FUNCTION, PROGRAM = "waits", "function of the call", "program"

# By station: a station is a step of the way of a message, and everything on it is own code, except where threads wait.
WATCHED: dict[str, list[str]] = {
    "request out": [
        "backhaul._rpc.calls.client:CallClient.call",
        "backhaul._rpc.calls.client:CallClient.call_async",
        "backhaul._rpc.calls.request_encoder:RequestEncoder.encode",
        "backhaul._rref.remote:remote",
        "backhaul.compat.rpc.api:rpc_sync",
        "backhaul.compat.rpc.api:rpc_async",
        "backhaul.compat.rpc.api:remote",
    ],
    "request in": ["backhaul._rpc.calls.server:CallServer._run", "backhaul._rpc.calls.server:CallServer._decode"],
    "reply out": ["backhaul._rpc.calls.server:CallServer._reply"],
    "reply in": [
        "backhaul._rpc.calls.pending_call:Pending.read",
        "backhaul._rpc.calls.pending_call:SyncCall.settle",
        "backhaul._rpc.futures:Future.wait",
    ],
    "send": [
        "backhaul._transport.sockets.channel:SocketChannel.send",
        "backhaul._transport.sockets.channel:SocketChannel.send_soon",
        "backhaul._transport.sockets.channel:SocketChannel.flush",
        "backhaul._transport.sockets.endpoint:SocketEndpoint.flush",
    ],
    "read": ["backhaul._transport.sockets.channel:SocketChannel._read"],
    "take in": [
        "backhaul._worker.frame_receiver:FrameReceiver.take_in",
        "backhaul._rpc.calls.server:CallServer._on_request",
    ],
    "hand over": [
        "backhaul._worker.thread_pool:ThreadPool.submit",
        "backhaul._transport.sockets.endpoint:SocketEndpoint.wake",
        "backhaul._transport.sockets.endpoint:SocketEndpoint.wake_soon",
    ],
    "pass": [
        "backhaul.compat.autograd:backward",
        "backhaul.compat.autograd:context.__enter__",
        "backhaul.compat.autograd:context.__exit__",
        "backhaul._autograd.backward.engine:Engine.backward",
        "backhaul._autograd.backward.pass_ledger:PassLedger.account",
    ],
    "gradients out": [
        "backhaul._autograd.backward.outbox:GradientOutbox.put",
        "backhaul._autograd.backward.outbox:GradientOutbox.ship",
    ],
    "gradients in": [
        "backhaul._autograd.backward.receiver:GradientReceiver._on_gradients",
        "backhaul._autograd.backward.receiver:GradientReceiver._take_gradients",
        "backhaul._autograd.backward.receiver:GradientReceiver.local_pass_of",
    ],
    "graph": [
        "backhaul._autograd.backward.ready_groups:ReadyGroups.arrive",
        "backhaul._autograd.backward.leaves:Leaves.compute",
        "backhaul._autograd.backward.local_pass:LocalPass._run_roots",
        "backhaul._autograd.backward.local_pass:LocalPass._run_simple",
    ],
    "release": [
        "backhaul._autograd.backward.context_release:ContextRelease.release",
        "backhaul._autograd.backward.context_release:ContextRelease._on_release",
    ],
    "optimizer": ["backhaul.optim.optimizer:DistributedOptimizer.step"],
    WAIT: [
        "backhaul._transport.sockets.channel:SocketChannel.receive",
        "backhaul._transport.sockets.channel:SocketChannel.spin_read",
        "backhaul._transport.sockets.endpoint:SocketEndpoint.poll",
        "backhaul._rpc.futures:Future._wait_until_done",
        "backhaul._transport.waiter:ChannelWaiter.wait",
        "backhaul._runtime.runtime:OneShotEvent.wait",
        "backhaul._runtime.interrupts:acquire",
        "backhaul._runtime.interrupts:poll",
    ],
}

_DECODES = "CallServer._decode"  # returns the function of the call first, which is watched, too
_MAY_FIND_NOTHING = "SocketChannel._read"  # not noted then: a thread that spins calls it all the time


class Stamp(NamedTuple):
    """When something happened: on the clock of the host, on that of the thread, and in which thread; nanoseconds."""

    when: int
    used: int
    what: str
    thread: int


station_of: dict[str, str] = {}
"""By the name of what is watched, without the module."""

missing: list[str] = []
_stamps: list[Stamp] = []


def mark(what: str) -> None:
    """Note that something happens now."""
    _stamps.append(Stamp(time.perf_counter_ns(), time.thread_time_ns(), what, threading.get_native_id()))


def take() -> list[Stamp]:
    """The stamps of this process since the last call."""
    found = list(_stamps)
    _stamps.clear()
    return found


def watch_all() -> None:
    """Watch everything that is there. The processes that are forked from this one do so, too."""
    for station, places in WATCHED.items():
        for place in places:
            if not _watch(station, place):
                missing.append(place)


def _watch(station: str, place: str) -> bool:
    module_name, _, path = place.partition(":")
    owner_path, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
        owner: Any = functools.reduce(getattr, filter(None, owner_path.split(".")), module)
        function = vars(owner)[name]
    except (ImportError, AttributeError, KeyError):
        return False
    station_of[path] = station
    static = isinstance(function, staticmethod)
    wrapped = _wrapped(function.__func__ if static else function, path)
    setattr(owner, name, staticmethod(wrapped) if static else wrapped)
    if owner is module:
        for other in _importers(function):  # modules that imported it by name
            setattr(other, name, wrapped)
    return True


def _importers(function: Any) -> Iterator[Any]:
    for name, module in list(sys.modules.items()):
        if name.startswith("backhaul") and vars(module).get(getattr(function, "__name__", "")) is function:
            yield module


def _wrapped(function: Callable[..., Any], label: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        mark(label + " >")
        length = len(_stamps)
        try:
            found = function(*args, **kwargs)
        except BaseException:
            mark(label + " <")
            raise
        if found is None and label == _MAY_FIND_NOTHING:
            _drop(length - 1, label)
            return found
        if label == _DECODES and isinstance(found, tuple) and callable(found[0]):
            found = (_watched_function(found[0]), *found[1:])
        mark(label + " <")
        return found

    return watched


def _drop(place: int, label: str) -> None:
    """Take a begin back, unless another thread has noted something in between."""
    if place < len(_stamps) and _stamps[place].what == label + " >":
        del _stamps[place]
    else:
        mark(label + " <")


def _watched_function(function: Callable[..., Any]) -> Callable[..., Any]:
    name = f"{getattr(function, '__name__', type(function).__name__)}()"
    station_of[name] = FUNCTION
    return _wrapped(function, name)
