"""The metrics of the workers of this process, as OpenTelemetry's observable instruments."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

from backhaul._monitoring.metrics import WORKER_METRICS, WorkerMetric
from backhaul._monitoring.status import WorkerStatus
from backhaul._monitoring.status_server import StatusServer
from backhaul._rpc.node import Node

_FRESH_SECONDS = 0.5  # all instruments of one collection use one status
_UNITS = {"_bytes": "By", "_seconds": "s"}


class Measurements:
    """The instruments. They are made once, and observe the workers that were added and still run. Thread-safe."""

    def __init__(self, provider: MeterProvider | None) -> None:
        self._nodes: weakref.WeakSet[Node] = weakref.WeakSet()
        self._statuses: tuple[float, list[WorkerStatus]] = (float("-inf"), [])
        meter = metrics.get_meter("backhaul", meter_provider=provider)
        for metric in WORKER_METRICS:
            name, unit = name_and_unit(metric.name)
            make = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
            make(name, callbacks=[self._callback(metric)], unit=unit, description=metric.help)

    def add(self, node: Node) -> None:
        """Observe a worker until it is closed."""
        self._nodes.add(node)

    def _callback(self, metric: WorkerMetric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            return [
                Observation(metric.of(status), {"backhaul.worker": status.name, "host.name": status.machine})
                for status in self._current()
            ]

        return observe

    def _current(self) -> list[WorkerStatus]:
        at, found = self._statuses
        now = time.monotonic()
        if now - at >= _FRESH_SECONDS:
            nodes = sorted((node for node in self._nodes if not node.worker.closed), key=lambda node: node.worker.name)
            found = [node.worker.part(StatusServer).status() for node in nodes]
            self._statuses = now, found
        return found


def name_and_unit(name: str) -> tuple[str, str]:
    """The name of a metric of Prometheus by the conventions of OpenTelemetry, and its unit.

    >>> name_and_unit("backhaul_memory_bytes"), name_and_unit("backhaul_calls_served_total")
    (('backhaul.memory', 'By'), ('backhaul.calls.served', '1'))
    """
    name = name.removesuffix("_total")
    suffix = next((suffix for suffix in _UNITS if name.endswith(suffix)), "")
    return name.removesuffix(suffix).replace("_", "."), _UNITS.get(suffix, "1")
