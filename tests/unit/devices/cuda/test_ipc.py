"""The parts of the CUDA backend that need no device: views of memory that torch does not own."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import Any

import pytest
import torch

from backhaul._devices import seam
from backhaul._devices.cuda import driver, library, process
from backhaul._devices.cuda.ipc import view_at
from backhaul._devices.stream_order import StreamOrder
from backhaul._wire.device_link import Form
from tests.unit.devices.clocks import FakeCuda


def test_a_view_has_a_storage_of_its_own_whose_end_is_noticed() -> None:
    memory = torch.arange(100, dtype=torch.uint8).untyped_storage()
    tensor, owner = view_at(memory.data_ptr() + 10, 20, memory.device, Form(torch.uint8, (20,), (1,)))
    gone: list[int] = []
    lease = weakref.ref(owner, lambda _: gone.append(1))
    del owner
    assert tensor.tolist() == list(range(10, 30))
    assert (tensor.untyped_storage().nbytes(), tensor.storage_offset()) == (20, 0)
    part = torch.empty(0, dtype=torch.int16).set_(tensor.untyped_storage(), 1, (3,), (2,))
    tensor[2] = 0
    assert part[0] == 13 << 8
    gc.collect()
    del tensor
    gc.collect()
    assert not gone
    (part.float().requires_grad_() * 2).sum().backward()
    box = [part]
    del part
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    gc.collect()
    assert gone == [1]
    assert lease() is None
    assert memory[12] == 0, "it was another's memory, and is there still"


def test_without_cuda_there_is_nothing() -> None:
    if torch.cuda.is_available():
        return
    assert not driver.available()
    assert driver.identities() == process.identities() == ()
    assert seam.streams is seam.NO_STREAMS


def test_a_forked_child_has_no_streams_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seam, "streams", StreamOrder(FakeCuda()))
    child = os.fork()
    if not child:
        os._exit(seam.streams is not seam.NO_STREAMS)
    assert os.waitpid(child, 0)[1] == 0
    assert seam.streams is not seam.NO_STREAMS


class FakeLibrary:
    """Knows which context is current. That of a device is its number plus 100."""

    current = 0

    def cuCtxSetCurrent(self, context: int) -> int:
        self.current = context
        return 0

    def cuCtxPushCurrent_v2(self, context: int) -> int:
        self.before, self.current = self.current, context
        return 0

    def cuCtxPopCurrent_v2(self, _: object) -> int:
        self.current = self.before
        return 0


@pytest.mark.parametrize("devices", [[0, 0], [1, 0, 1, 0]])
def test_what_is_done_on_a_device_is_done_in_its_context(devices: list[int]) -> None:
    made: Any = library.Library.__new__(library.Library)
    made._cuda, made._here, made._contexts = FakeLibrary(), library._ThreadContext(), {0: 100, 1: 101}
    made._here.relaxed = True
    made._alone = len(set(devices)) == 1
    seen: list[int] = []
    for device in devices:
        made._on(device, lambda: seen.append(made._cuda.current))
    assert seen == [100 + device for device in devices]
