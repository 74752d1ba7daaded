"""What graphs outside contexts leave on worker processes: nothing, also where workers are killed."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch

import backhaul as bh
from backhaul._autograd.forward import functions
from tools.fleet import Fleet
from tools.lifetimes import apply, measure, pass_on, run, table_sizes

pytestmark = pytest.mark.may_leak  # the fork server


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    functions.live.clear()  # other tests of this process may still hold what they received
    with Fleet(2) as made:
        yield made


def test_forwards_without_backward_and_steps(fleet: Fleet) -> None:
    lines: list[str] = []
    run(fleet, 200, 100, lines.append)
    assert len(lines) == 12
    with fleet.worker:
        for _, sizes in measure(fleet).values():
            passes = sizes.pop("passes")
            assert passes <= 1  # the last one of the driver
            assert set(sizes.values()) == {0}


def settle(fleet: Fleet, name: str, records: int) -> None:
    """Wait until a worker has so many records; a test that fails ends by its timeout."""
    while (table_sizes() if name == "driver" else bh.rpc_sync(name, table_sizes))["records"] != records:
        pass


def test_a_killed_worker_that_held_receiving_ends(fleet: Fleet) -> None:
    with fleet.worker:
        x = torch.ones(1000, requires_grad=True)
        kept = bh.rpc_sync("worker1", pass_on, args=(x, "worker2"))
        assert table_sizes()["records"] == 1
        assert bh.rpc_sync("worker2", table_sizes)["records"] == 1
        fleet.signal("worker1", signal.SIGKILL)
        settle(fleet, "driver", 0)
        settle(fleet, "worker2", 0)
        with pytest.raises(bh.PeerLostError) as caught:
            kept.sum().backward()
        assert caught.value.worker == "worker1"


def test_a_killed_driver_of_others(fleet: Fleet) -> None:
    with fleet.worker:
        kept = bh.rpc_sync("worker1", pass_on, args=(torch.ones(1000, requires_grad=True), "worker2"))
        fleet.signal("worker2", signal.SIGKILL)
        settle(fleet, "worker1", 1)  # the reply to the driver
        with pytest.raises(bh.PeerLostError):
            kept.sum().backward()
        y = bh.rpc_sync("worker1", apply, args=(torch.ones(1000, requires_grad=True),))
        y.sum().backward()
        del kept, y
        settle(fleet, "worker1", 0)
