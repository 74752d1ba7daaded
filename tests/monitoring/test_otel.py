"""Spans and metrics for OpenTelemetry."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

import backhaul as bh
import backhaul.otel
from tests.monitoring.clusters import until

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """The spans of workers that start in the test."""
    pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, made = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(made))
    providers.append(provider)
    backhaul.otel.instrument(tracer_provider=provider)
    yield made
    backhaul.otel.uninstrument()
    providers.clear()


providers: list[TracerProvider] = []


def inner(x: torch.Tensor) -> torch.Tensor:
    with providers[0].get_tracer("user").start_as_current_span("mine"):
        return x * 2


def outer(x: torch.Tensor) -> torch.Tensor:
    return bh.rpc_sync("worker2", inner, args=(x,))


async def in_asyncio(x: torch.Tensor) -> torch.Tensor:
    return await bh.rpc_async("worker2", inner, args=(x,))


def fail() -> None:
    raise KeyError("no such thing")


def lineage(spans: InMemorySpanExporter) -> list[tuple[str, str, str]]:
    """Of each span but the passes: where it was made, its name, and the name of its parent."""
    found: tuple[ReadableSpan, ...] = spans.get_finished_spans()
    names = {span.context.span_id: f"{span.name} {span.kind.name}" for span in found}
    return sorted(
        (
            str((span.attributes or {}).get("backhaul.worker", "")),
            f"{span.name} {span.kind.name}",
            names[span.parent.span_id] if span.parent is not None else "",
        )
        for span in found
        if span.name != "backward"
    )


@pytest.mark.parametrize("function", [outer, in_asyncio])
@pytest.mark.parametrize("profiled", [False, True])
def test_calls_of_calls_are_one_trace(spans: InMemorySpanExporter, function: Any, profiled: bool) -> None:
    with bh.cluster(3), bh.profile(ops=False) if profiled else torch.enable_grad():
        bh.rpc_sync("worker1", function, args=(torch.ones(2, requires_grad=True),)).sum().backward()
    name = function.__name__
    own = ("backhaul.", "join", "collect", "clock")  # of the profile
    found = [each for each in lineage(spans) if not each[1].startswith(own)]
    assert found == sorted(
        [
            ("", "mine INTERNAL", "inner SERVER"),
            ("worker0", f"{name} CLIENT", ""),
            ("worker1", "inner CLIENT", f"{name} SERVER"),
            ("worker1", f"{name} SERVER", f"{name} CLIENT"),
            ("worker2", "inner SERVER", "inner CLIENT"),
        ]
    )
    (backward,) = [span for span in spans.get_finished_spans() if span.name == "backward"]
    assert backward.attributes is not None
    assert backward.attributes["backhaul.worker"] == "worker0"


def test_a_call_that_fails(spans: InMemorySpanExporter) -> None:
    with bh.cluster(2), pytest.raises(KeyError):
        bh.rpc_sync("worker1", fail)
    (client,) = [span for span in spans.get_finished_spans() if span.kind.name == "CLIENT"]
    assert client.status.status_code.name == "ERROR"
    assert client.attributes is not None
    assert client.attributes["error.type"] == "KeyError"
    assert client.attributes["backhaul.peer"] == "worker1"


def test_between_workers_that_do_not_trust_each_other(spans: InMemorySpanExporter) -> None:
    with bh.cluster(2, options=bh.Options(security=bh.Security(trusted=False))), pytest.raises(bh.BackhaulError):
        bh.rpc_sync("worker1", "nothing")
    assert [span.name for span in spans.get_finished_spans() if span.kind.name == "CLIENT"] == ["nothing"]


def served_calls(reader: InMemoryMetricReader) -> dict[str, int]:
    data = reader.get_metrics_data()
    assert data is not None
    (served,) = [
        each for each in data.resource_metrics[0].scope_metrics[0].metrics if each.name == "backhaul.calls.served"
    ]
    return {point.attributes["backhaul.worker"]: point.value for point in served.data.data_points}


def test_metrics() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader: InMemoryMetricReader = InMemoryMetricReader()
    backhaul.otel.instrument(meter_provider=MeterProvider([reader], shutdown_on_exit=False))
    try:
        with bh.cluster(2):
            for _ in range(3):
                bh.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1))
            assert until(lambda: served_calls(reader) == {"worker0": 0, "worker1": 3})  # a call counts after its reply
            data = reader.get_metrics_data()
    finally:
        backhaul.otel.uninstrument()
    assert data is not None
    metrics = {each.name: each for each in data.resource_metrics[0].scope_metrics[0].metrics}
    assert metrics["backhaul.memory"].unit == "By"


def test_without_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("opentelemetry", "backhaul.otel.spans"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "backhaul.otel.measurements", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ImportError, match=r"backhaul\[otel\]"):
        backhaul.otel.instrument()
    with bh.cluster(1) as (worker,):
        assert worker.observer is None
