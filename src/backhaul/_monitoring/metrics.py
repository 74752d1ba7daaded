"""The status of a cluster as metrics in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from backhaul._monitoring.cluster_view import ClusterStatus, WorkerView
from backhaul._monitoring.status import WorkerStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class WorkerMetric(NamedTuple):
    """A number that each worker has."""

    name: str
    kind: str  # "counter" or "gauge"
    help: str
    of: Callable[[WorkerStatus], float]


WORKER_METRICS = (
    WorkerMetric("backhaul_uptime_seconds", "gauge", "Seconds since the worker started.", lambda s: s.uptime),
    WorkerMetric("backhaul_calls_served_total", "counter", "Calls that the worker has served.", lambda s: s.served),
    WorkerMetric("backhaul_calls_made_total", "counter", "Calls that the worker has made.", lambda s: s.called),
    WorkerMetric("backhaul_calls_serving", "gauge", "Calls that the worker serves now.", lambda s: s.num_serving),
    WorkerMetric("backhaul_calls_pending", "gauge", "Calls that the worker waits for.", lambda s: s.num_calling),
    WorkerMetric(
        "backhaul_calls_cancelled_total",
        "counter",
        "Calls that the worker made and cancelled.",
        lambda s: s.counters.get("num_calls_cancelled", 0),
    ),
    WorkerMetric(
        "backhaul_calls_dropped_total",
        "counter",
        "Calls that had no caller any more when their turn came.",
        lambda s: s.counters.get("num_calls_dropped", 0),
    ),
    WorkerMetric(
        "backhaul_calls_retried_total",
        "counter",
        "Calls that were made again after the loss of a worker.",
        lambda s: s.counters.get("num_retries", 0),
    ),
    WorkerMetric("backhaul_tasks_waiting", "gauge", "Tasks that wait for a thread.", lambda s: s.tasks),
    WorkerMetric("backhaul_memory_bytes", "gauge", "Memory of the process of the worker.", lambda s: s.memory),
    WorkerMetric(
        "backhaul_shared_memory_bytes",
        "gauge",
        "Shared memory that the worker has made for what it sends.",
        lambda s: s.counters.get("shm_bytes", 0),
    ),
    WorkerMetric("backhaul_values_owned", "gauge", "Values that references point to.", lambda s: s.references.owned),
    WorkerMetric(
        "backhaul_values_bytes", "gauge", "Memory of the tensors in these.", lambda s: s.references.owned_bytes
    ),
    WorkerMetric(
        "backhaul_references_held", "gauge", "References to values of other workers.", lambda s: s.references.held
    ),
    WorkerMetric("backhaul_contexts_open", "gauge", "Autograd contexts that are open.", lambda s: s.graphs.contexts),
    WorkerMetric(
        "backhaul_messages_awaiting_gradients",
        "gauge",
        "Messages that were sent and wait for their gradients.",
        lambda s: s.graphs.messages,
    ),
    WorkerMetric(
        "backhaul_gradient_bytes", "gauge", "Gradients that contexts hold.", lambda s: s.graphs.gradient_bytes
    ),
    WorkerMetric(
        "backhaul_passes_running", "gauge", "Backward passes that the worker drives now.", lambda s: s.graphs.passes
    ),
    WorkerMetric(
        "backhaul_passes_total",
        "counter",
        "Backward passes that the worker has driven.",
        lambda s: s.graphs.passes_ended,
    ),
)


def to_prometheus(status: ClusterStatus) -> str:
    """All metrics. Workers that do not answer have ``backhaul_worker_up`` alone."""
    lines = [
        "# HELP backhaul_worker_up Whether the worker answers and no other worker suspects it.",
        "# TYPE backhaul_worker_up gauge",
        *(_line("backhaul_worker_up", _labels(worker), float(worker.state == "up")) for worker in status.workers),
    ]
    answering = [(worker, worker.status) for worker in status.workers if worker.status and worker.state != "lost"]
    for metric in WORKER_METRICS:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
        lines += [_line(metric.name, _labels(worker), metric.of(found)) for worker, found in answering]
    lines += _doubts(status)
    lines += _channels(status)
    lines += _functions(answering)
    return "\n".join(lines) + "\n"


def _doubts(status: ClusterStatus) -> Iterator[str]:
    for state in ("suspected", "lost"):
        name = f"backhaul_peers_{state}"
        yield f"# HELP {name} Other workers that the worker takes for {state}."
        yield f"# TYPE {name} gauge"
        for worker in status.workers:
            if worker.status is not None and worker.state != "lost":
                count = sum(doubt.by == worker.name and doubt.state == state for doubt in status.doubts)
                yield _line(name, _labels(worker), count)


def _channels(status: ClusterStatus) -> Iterator[str]:
    yield "# HELP backhaul_channel_sent_bytes_total Bytes that the worker has sent to another one over open channels."
    yield "# TYPE backhaul_channel_sent_bytes_total counter"
    for channel in status.channels:
        labels = {"worker": channel.source, "peer": channel.target}
        yield _line("backhaul_channel_sent_bytes_total", labels, channel.total)
    yield "# HELP backhaul_channel_waiting_bytes Bytes that wait because the other worker reads too slowly."
    yield "# TYPE backhaul_channel_waiting_bytes gauge"
    for channel in status.channels:
        labels = {"worker": channel.source, "peer": channel.target}
        yield _line("backhaul_channel_waiting_bytes", labels, channel.waiting)


def _functions(answering: Iterable[tuple[WorkerView, WorkerStatus]]) -> Iterator[str]:
    answering = list(answering)
    for name, what, of in (
        ("backhaul_function_calls_total", "Calls of the function served while a monitor watched.", "calls"),
        ("backhaul_function_seconds_total", "Seconds that these calls ran.", "seconds"),
        ("backhaul_function_queue_seconds_total", "Seconds that they waited for a thread.", "waited"),
    ):
        yield f"# HELP {name} {what}"
        yield f"# TYPE {name} counter"
        for worker, found in answering:
            for function in found.functions:
                yield _line(name, {"worker": worker.name, "function": function.name}, getattr(function, of))


def _labels(worker: WorkerView) -> dict[str, str]:
    return {"worker": worker.name, "host": worker.host}


def _line(name: str, labels: dict[str, str], value: float) -> str:
    shown = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
    return f"{name}{{{shown}}} {value:.17g}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
