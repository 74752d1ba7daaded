"""On a machine with devices that the process does not use, passes take the short way of workers without devices."""

from __future__ import annotations

import pytest

from backhaul._autograd.backward import simple_runs
from backhaul._autograd.context import Context
from backhaul._autograd.ids import ContextId
from backhaul._autograd.messages import PassSpec
from backhaul._devices import seam
from backhaul._devices.stream_order import StreamOrder
from backhaul._native import core
from tests.unit.devices.clocks import FakeCuda

SPEC = PassSpec(ContextId(3), 0, 1)


@pytest.mark.skipif(core is None, reason="only the native core has a short way")
@pytest.mark.parametrize("devices", [0, 1])
def test_the_short_way_is_open_while_no_device_is_in_use(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``FakeCuda(0)``: there are devices, but CUDA has not been started."""
    monkeypatch.setattr(seam, "streams", StreamOrder(FakeCuda(devices)))
    assert simple_runs.suits(SPEC, Context(ContextId(3))) == (devices == 0)
    assert bool(seam.streams.in_use()) == (devices > 0)


def test_without_devices_none_is_in_use() -> None:
    assert not seam.NO_STREAMS.in_use()
    assert not seam.NO_LINK.takes_host
