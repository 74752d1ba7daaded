from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.devices.clocks import Threads


@pytest.fixture
def threads() -> Iterator[Threads]:
    made = Threads()
    yield made
    made.close()
