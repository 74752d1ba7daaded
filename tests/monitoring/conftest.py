"""The browser of the tests of reports shows the dashboard too."""

from __future__ import annotations

from tests.profiler.conftest import browser  # noqa: F401
