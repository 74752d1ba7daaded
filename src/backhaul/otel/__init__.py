"""OpenTelemetry: spans of calls and passes, and metrics of workers. Needs the extra ``otel``."""

from backhaul.otel.instrumentation import instrument, uninstrument

__all__ = ["instrument", "uninstrument"]
