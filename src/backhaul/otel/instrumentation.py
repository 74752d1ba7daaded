"""Turns OpenTelemetry on and off for the workers of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from backhaul._rpc.interceptors import extensions
from backhaul._rpc.node import Node

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

_installed: list[Callable[[Node], None]] = []


def instrument(*, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None) -> None:
    """Let the workers that this process starts from now on make spans and metrics. Does nothing if they do already.

    A call is a client span at its caller and a server span at the worker that serves it, in one trace over all workers
    that are instrumented; a backward pass is a span at its driver. Spans that user code makes in a handler are children
    of the call. Metrics are those of ``/metrics``, of the workers of this process.

    Args:
        tracer_provider: Makes the spans; the global one by default.
        meter_provider: Makes the metrics; the global one by default.

    Raises:
        ImportError: OpenTelemetry is not installed.

    Example:
        >>> import backhaul as bh, torch, backhaul.otel
        >>> from opentelemetry.sdk.trace import TracerProvider
        >>> from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        >>> from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        >>> provider, spans = TracerProvider(), InMemorySpanExporter()
        >>> provider.add_span_processor(SimpleSpanProcessor(spans))
        >>> backhaul.otel.instrument(tracer_provider=provider)
        >>> with bh.cluster(2):
        ...     _ = bh.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1))
        >>> sorted((span.name, span.kind.name) for span in spans.get_finished_spans())
        [('add', 'CLIENT'), ('add', 'SERVER')]
        >>> backhaul.otel.uninstrument()
    """
    if _installed:
        return
    try:
        from backhaul.otel.measurements import Measurements
        from backhaul.otel.spans import SpanObserver
    except ImportError as error:
        raise ImportError(
            "OpenTelemetry is not installed; install it with: pip install 'backhaul[otel]'", name="opentelemetry"
        ) from error
    measurements = Measurements(meter_provider)

    def extend(node: Node) -> None:
        SpanObserver(node, tracer_provider)
        measurements.add(node)

    _installed.append(extend)
    extensions.append(extend)


def uninstrument() -> None:
    """Undo ``instrument`` for workers that start from now on.

    Example:
        >>> import backhaul.otel
        >>> backhaul.otel.instrument()
        >>> backhaul.otel.uninstrument()
    """
    for extend in _installed:
        extensions.remove(extend)
    _installed.clear()
