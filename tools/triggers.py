"""Kills or stops a worker at an exact point of a step. ``arm`` sets the trigger inside the worker that is to die.

A trigger is a frame that is received or sent (before, in the middle of, or after it), a place in the function that a
step runs, or a node of its backward pass. Triggers patch this process and stay in place until the process ends.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import torch

from backhaul._autograd.messages import AutogradKind
from backhaul._rpc.node import Node
from backhaul._rref import owner_calls
from backhaul._sim import random_steps
from backhaul._transport.sockets.channel import SocketChannel
from backhaul._wire.frame_reader import FrameReader
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Kind
from backhaul._worker.worker import current_worker
from backhaul.testing.oracle import State
from backhaul.testing.programs import Body
from tools.fleet import die

When = Literal["before", "middle", "after"]
Role = Literal["called", "driver"]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A point of a step at which a worker can die.

    Attributes:
        name: The name in reports.
        arm: Sets the trigger in the current process.
        role: The role that the worker must have in the step: it is called, or it drives.
        calls: Whether the worker must call other workers in the step.
    """

    name: str
    arm: Callable[[signal.Signals], None]
    role: Role = "called"
    calls: bool = False


# Received frames.


def _incoming(kind: int, text: bytes, how: signal.Signals) -> None:
    """Die when a frame has been read, before it is handled."""
    fed = FrameReader.fed

    def feed(self: FrameReader, count: int) -> list[Frame]:
        frames = fed(self, count)
        if any(frame.kind == kind and text in bytes(frame.body) for frame in frames):
            die(how)
        return frames

    FrameReader.fed = feed  # type: ignore[method-assign]


def _unread(text: bytes, part: float, how: signal.Signals) -> None:
    """Die when bytes that contain ``text`` have arrived, after ``part`` of them (0 to 1) was read."""
    read = SocketChannel._read

    def peek_and_read(self: SocketChannel) -> Any:
        sock = self._connection.sock
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        if poller.poll(0):
            seen = sock.recv(1 << 16, socket.MSG_PEEK)
            if text in seen:
                if part:
                    sock.recv(max(int(len(seen) * part), 1))
                die(how)
        return read(self)

    SocketChannel._read = peek_and_read  # type: ignore[method-assign]


# Sent frames.


def _outgoing(kind: int, when: When, how: signal.Signals) -> None:
    """Die at the first frame of a kind. For replies: the first after the worker has run a body of the step."""
    served = threading.Event()
    if kind == Kind.REPLY:
        _wrap_body(after=lambda _: served.set())
    else:
        served.set()

    def patch(name: str) -> None:
        send = getattr(SocketChannel, name)

        def sending(self: SocketChannel, frame: Frame, *, timeout: float | None = None) -> None:
            mine = frame.kind == kind and served.is_set()
            if mine and when == "before":
                die(how)
            if mine and when == "middle":
                data = b"".join(frame.parts())
                self._connection.sock.send(data[: len(data) // 2])
                die(how)
            send(self, frame, timeout=timeout)
            if mine:
                self.flush()
                die(how)

        setattr(SocketChannel, name, sending)

    patch("send")
    patch("send_soon")


# Functions of the step.


def _wrap_body(
    before: Callable[[list[torch.Tensor]], object] = lambda _: None,
    after: Callable[[list[torch.Tensor]], object] = lambda _: None,
) -> None:
    run_body: Callable[..., list[torch.Tensor]] = vars(random_steps)["run_body"]

    def run(body: Body, args: list[torch.Tensor], state: State, call: Any) -> list[torch.Tensor]:
        before(args)
        made = run_body(body, args, state, call)
        after(made)
        return made

    vars(random_steps)["run_body"] = run


def _in_body(when: When, how: signal.Signals) -> None:
    def act(_: object) -> None:
        die(how)

    if when == "before":
        _wrap_body(before=act)
    else:
        _wrap_body(after=act)


def _while_it_waits(how: signal.Signals) -> None:
    """Die while a call of this worker is under way."""
    call = random_steps._call

    def watch(pending: Any) -> None:
        until = time.monotonic() + 5.0
        while not pending and time.monotonic() < until:
            time.sleep(0)
        if pending:
            die(how)

    def calling(*args: Any) -> list[torch.Tensor]:
        pending = current_worker().part(Node).client.pending
        threading.Thread(target=watch, args=(pending,), daemon=True).start()
        return call(*args)

    random_steps._call = calling  # type: ignore[assignment]


def _in_backward(where: Literal["results", "parameters", "arguments"], how: signal.Signals) -> None:
    """Die when a gradient is computed. Gradients of results come first, then parameters, then arguments."""

    def hook(values: list[torch.Tensor]) -> None:
        for value in values:
            if value.requires_grad:
                value.register_hook(lambda _: die(how))

    if where == "results":
        _wrap_body(after=hook)
    elif where == "arguments":
        _wrap_body(before=hook)
    else:
        made = State.__init__

        def make(self: State, *args: Any) -> None:
            made(self, *args)
            hook(self.parameters)

        State.__init__ = make  # type: ignore[assignment, method-assign]


def _out(kind: int, when: When) -> Callable[[signal.Signals], None]:
    return functools.partial(_outgoing, kind, when)


def _in(kind: int, text: bytes = b"") -> Callable[[signal.Signals], None]:
    return functools.partial(_incoming, kind, text)


_STEPS = f"{random_steps.__name__}:".encode()
_SERVE = _STEPS + b"serve"

STAGES: tuple[Stage, ...] = (
    Stage("parameters are made", _in(Kind.REQUEST, _STEPS + b"prepare")),
    Stage("request not read", functools.partial(_unread, _SERVE, 0.0)),
    Stage("request half read", functools.partial(_unread, _SERVE, 0.5)),
    Stage("request read", _in(Kind.REQUEST, _SERVE)),
    Stage("handler begins", functools.partial(_in_body, "before")),
    Stage("handler waits for another", _while_it_waits, calls=True),
    Stage("handler sends a call: half", _out(Kind.REQUEST, "middle"), calls=True),
    Stage("handler ends", functools.partial(_in_body, "after")),
    Stage("reply: before", _out(Kind.REPLY, "before")),
    Stage("reply: half", _out(Kind.REPLY, "middle")),
    Stage("reply: after", _out(Kind.REPLY, "after")),
    Stage("value of a reference is asked for", _in(Kind.REQUEST, f"{owner_calls.__name__}:fetch".encode())),
    Stage("backward: gradients not read", functools.partial(_unread, b"BkHl\1" + bytes([AutogradKind.GRADIENT]), 0.0)),
    Stage("backward: gradients half read", functools.partial(_unread, b"BkHl\1" + bytes([AutogradKind.GRADIENT]), 0.5)),
    Stage("backward: gradients read", _in(AutogradKind.GRADIENT)),
    Stage("backward: first node", functools.partial(_in_backward, "results")),
    Stage("backward: a leaf", functools.partial(_in_backward, "parameters")),
    Stage("backward: last node", functools.partial(_in_backward, "arguments")),
    Stage("backward: gradients sent: before", _out(AutogradKind.GRADIENT, "before")),
    Stage("backward: gradients sent: half", _out(AutogradKind.GRADIENT, "middle")),
    Stage("backward: gradients sent: after", _out(AutogradKind.GRADIENT, "after")),
    Stage("backward: report: before", _out(AutogradKind.REPORT, "before")),
    Stage("backward: report: half", _out(AutogradKind.REPORT, "middle")),
    Stage("backward: report: after", _out(AutogradKind.REPORT, "after")),
    Stage("gradients are asked for", _in(Kind.REQUEST, _STEPS + b"collect")),
    Stage("release read", _in(AutogradKind.RELEASE)),
    Stage("driver waits for a call", _while_it_waits, role="driver"),
    Stage("driver: half a call", _out(Kind.REQUEST, "middle"), role="driver"),
    Stage("driver: first gradients: before", _out(AutogradKind.GRADIENT, "before"), role="driver"),
    Stage("driver: first gradients: half", _out(AutogradKind.GRADIENT, "middle"), role="driver"),
    Stage("driver: first gradients: after", _out(AutogradKind.GRADIENT, "after"), role="driver"),
    Stage("driver: report read", _in(AutogradKind.REPORT), role="driver"),
    Stage("driver: release: before", _out(AutogradKind.RELEASE, "before"), role="driver"),
    Stage("driver: release: half", _out(AutogradKind.RELEASE, "middle"), role="driver"),
    Stage("driver: release: after", _out(AutogradKind.RELEASE, "after"), role="driver"),
)
"""All stages, in the order in which a step reaches them."""

_by_name = {stage.name: stage for stage in STAGES}


def arm(name: str, how: signal.Signals = signal.SIGKILL) -> None:
    """Make this process die, or stop once, at a stage."""
    _by_name[name].arm(how)


def takes_part(body: Body, worker: int, here: int = 0) -> collections.Counter[str]:
    """How often a worker is called in a program, and how often it calls others."""
    found: collections.Counter[str] = collections.Counter()
    for step in body.steps:
        if step.body is not None:
            to = int(step.name)
            found["called"] += to == worker and here != worker
            found["calls"] += here == worker and to != worker
            found += takes_part(step.body, worker, to)
    return found
