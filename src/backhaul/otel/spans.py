"""Spans of calls and passes. An observer of the worker makes them; a note on each request carries the caller's span."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import torch
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from backhaul._rpc.cluster.peers import Peer
from backhaul._rpc.node import Node
from backhaul._runtime.observer import ArrivedCall, CallTrace, Sessions
from backhaul._runtime.observer_pair import IdleObserver
from backhaul._wire.codec import Encoded

_KEY = "otel"
_PARENT = "traceparent"  # the W3C header of that name
_OWN = "backhaul."  # the beginning of the names of Backhaul's own modules
_propagator = TraceContextTextMapPropagator()

_starting: contextvars.ContextVar[Span | None] = contextvars.ContextVar("backhaul_otel_starting", default=None)
"""The span of the call whose request this thread is making."""

_caller: contextvars.ContextVar[Context | None] = contextvars.ContextVar("backhaul_otel_caller", default=None)
"""The caller's span, of the request that is being decoded."""


class _ClientSpan:
    """Implements ``CallTrace``."""

    __slots__ = ("_span",)

    def __init__(self, span: Span) -> None:
        self._span = span

    def encoded(self) -> bytes:
        return b""

    def sent(self, nbytes: int) -> None:
        self._span.set_attribute("rpc.request.size", nbytes)

    def received(self, nbytes: int) -> None:
        self._span.set_attribute("rpc.response.size", nbytes)

    def opened(self) -> None:
        pass

    def done(self, error: BaseException | None) -> None:
        if error is not None:
            self._span.set_attribute("error.type", type(error).__name__)
            self._span.set_status(Status(StatusCode.ERROR, str(error)))
        self._span.end()


class _ServerSpan:
    """Implements ``ServeTrace``."""

    __slots__ = ("_attributes", "_call", "_span", "_tracer")

    def __init__(self, tracer: Tracer, call: ArrivedCall, attributes: dict[str, str]) -> None:
        self._tracer, self._call, self._attributes = tracer, call, attributes
        self._span: Span | None = None

    def decoded(self, label: str) -> None:
        module = getattr(self._call.function, "__module__", None) or ""
        name = f"{_OWN}{label}" if module.startswith(_OWN) else label
        attributes = {**self._attributes, "rpc.method": name}
        self._span = self._tracer.start_span(name, _caller.get(), SpanKind.SERVER, attributes)
        otel_context.attach(trace.set_span_in_context(self._span))  # for this call alone: it has its own context

    def ran(self) -> None:
        pass

    def resumed(self) -> None:
        pass

    def replied(self, nbytes: int) -> None:
        if self._span is not None:
            self._span.set_attribute("rpc.response.size", nbytes)
            self._span.end()


class SpanObserver(IdleObserver):
    """Implements ``Observer`` and ``Interceptor`` for one worker. Thread-safe."""

    key = _KEY

    def __init__(self, node: Node, provider: TracerProvider | None) -> None:
        self._node = node
        self._tracer = trace.get_tracer("backhaul", tracer_provider=provider)
        self._attributes = {"rpc.system": "backhaul", "backhaul.worker": node.worker.name}
        node.client.interceptors.add(self, from_untrusted=True)
        node.worker.observe(self)

    # What the worker does.

    def call(self, mode: str, label: str, callee: int) -> CallTrace | None:
        if mode == "internal":
            _starting.set(None)  # of a call that failed before it was sent
            return None
        peer = self._node.peers.with_id(callee)
        to = "" if peer is None else peer.info.name
        attributes = {**self._attributes, "rpc.method": label, "backhaul.peer": to, "backhaul.call": mode}
        span = self._tracer.start_span(label, None, SpanKind.CLIENT, attributes)
        _starting.set(span)
        return _ClientSpan(span)

    def arrived(self, call: ArrivedCall) -> int:
        call.trace = _ServerSpan(self._tracer, call, self._attributes)
        return self.now()

    @contextlib.contextmanager
    def drive(self, sessions: Sessions, context: int, number: int) -> Iterator[None]:
        with self._tracer.start_as_current_span("backward", attributes={**self._attributes, "backhaul.pass": number}):
            yield

    # The caller's span travels with the request.

    def request_out(self, peer: Peer, encoded: Encoded) -> tuple[bytes | None, Any]:
        span = _starting.get()
        if span is None:
            return None, None
        _starting.set(None)
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, trace.set_span_in_context(span))
        return carrier.get(_PARENT, "").encode() or None, None

    def request_in(self, peer: Peer, note: bytes | None, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        if note is not None:
            _caller.set(_propagator.extract({_PARENT: note.decode("ascii", "replace")}, Context()))
        return tensors, None

    def reply_out(self, peer: Peer, kept: Any, encoded: Encoded) -> bytes | None:
        return None

    def reply_in(self, peer: Peer, kept: Any, note: bytes | None, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return tensors

    def discard(self, peer: Peer, note: bytes) -> None:
        pass

    def failed(self, peer: Peer, note: bytes) -> None:
        pass
