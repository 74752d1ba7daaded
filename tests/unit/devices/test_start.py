"""A worker knows its devices without starting CUDA, and starts CUDA only for tensors of devices."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import backhaul as bh
from backhaul._devices import seam
from backhaul._devices.cuda import device_query, driver, library, process
from backhaul._devices.device_context import DeviceContext
from backhaul._devices.stream_order import StreamOrder
from backhaul._rpc.node import Node
from tests.unit.devices.clocks import FakeCuda

IDENTITIES = "00112233-4455-6677-8899-aabbccddeeff", "ffeeddcc-bbaa-9988-7766-554433221100"
STARTING = (
    *("_lazy_init", "current_blas_handle", "current_device", "current_stream", "default_stream", "device_count"),
    *("get_device_properties", "init", "is_available", "set_device", "synchronize"),
)


@pytest.fixture
def unstarted(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Torch as if it were built with CUDA; whatever starts CUDA fails the test."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise AssertionError("CUDA was started")

    for name in STARTING:
        monkeypatch.setattr(torch.cuda, name, fail)
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(driver, "_raw_current", fail)
    monkeypatch.setattr(driver, "_has_context", fail)
    monkeypatch.setattr(device_query, "has_driver", lambda: True)
    monkeypatch.setattr(seam, "streams", seam.NO_STREAMS)
    monkeypatch.setattr(process, "require", lambda feature: None)  # a build without CUDA lacks its names
    driver._identities_by_query.cache_clear()
    yield monkeypatch
    driver._identities_by_query.cache_clear()


@pytest.fixture
def program(unstarted: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Make another program answer which devices there are."""

    def use(source: str) -> None:
        path = tmp_path / "query.py"
        path.write_text(source)
        unstarted.setattr(device_query, "__file__", str(path))

    return use


PRINTS = f"""
import os
found = {IDENTITIES!r}
for index in os.environ["CUDA_VISIBLE_DEVICES"].split(","):
    print(found[int(index)])
"""


def test_another_process_says_what_devices_there_are(
    program: Callable[[str], None], unstarted: pytest.MonkeyPatch
) -> None:
    program(PRINTS)
    for visible, expected in (("0,1", IDENTITIES), ("1,0", IDENTITIES[::-1]), ("1", IDENTITIES[1:])):
        unstarted.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert process.identities() == expected
    program("raise SystemExit(1)")
    assert process.identities() == IDENTITIES[1:]  # it is asked once
    unstarted.setenv("CUDA_VISIBLE_DEVICES", "")
    assert process.identities() == ()


def test_without_a_driver_nobody_is_asked(program: Callable[[str], None], unstarted: pytest.MonkeyPatch) -> None:
    program("raise SystemExit(1)")
    unstarted.setattr(device_query, "has_driver", lambda: False)
    assert process.identities() == ()


@pytest.mark.parametrize("source", ["raise SystemExit(1)", None])
def test_where_no_process_can_be_asked_torch_is(
    source: str | None, program: Callable[[str], None], unstarted: pytest.MonkeyPatch
) -> None:
    if source is None:
        unstarted.setattr(device_query.sys, "executable", "")
    else:
        program(source)
    unstarted.setattr(torch.cuda, "is_available", lambda: True)
    unstarted.setattr(torch.cuda, "device_count", lambda: 2)
    unstarted.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(uuid=IDENTITIES[index]))
    assert process.identities() == IDENTITIES


class FakeDriver:
    """Like NVIDIA's driver, for two devices."""

    code = 0

    def cuInit(self, flags: int) -> int:
        return self.code

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(IDENTITIES)
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = 10 + index
        return 0

    def cuDeviceGetUuid(self, found: Any, device: Any) -> int:
        found.raw = bytes.fromhex(IDENTITIES[device.value - 10].replace("-", ""))
        return 0


def test_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)
    assert device_query.identities_here() == IDENTITIES
    fake.code = 100  # there are none
    assert device_query.identities_here() == ()


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def test_workers_with_devices_do_not_start_cuda_for_other_tensors(
    program: Callable[[str], None], unstarted: pytest.MonkeyPatch
) -> None:
    program(PRINTS)
    unstarted.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    x = torch.ones(2, requires_grad=True)
    with bh.cluster(2) as workers:
        assert [worker.part(Node).peers.own.record.devices for worker in workers] == [IDENTITIES] * 2
        assert all(worker.devices is not seam.NO_DEVICES for worker in workers)
        with bh.context() as ctx:
            ctx.backward(bh.rpc_sync("worker1", scale, args=(x,)).sum())
            assert bh.get_gradients(ctx)[x].tolist() == [3.0, 3.0]
        assert bh.rpc_async("worker1", scale, args=(2,)).then(lambda done: done.value() + 1).wait() == 7
        assert bh.remote("worker1", scale, args=(torch.ones(1),)).to_here().tolist() == [3.0]
        assert bh.get_debug_info()["cuda_usable"]


def test_the_first_tensor_of_a_device_finds_out_whether_the_devices_are_others_now(
    unstarted: pytest.MonkeyPatch,
) -> None:
    started: list[int] = []
    unstarted.setattr(torch.cuda, "init", lambda: started.append(1))
    unstarted.setattr(torch.cuda, "is_initialized", lambda: bool(started))
    unstarted.setattr(device_query, "identities_here", lambda: IDENTITIES[:1])
    driver.verify(IDENTITIES[:1])
    assert started == [1]
    with pytest.raises(RuntimeError, match=r"CUDA_VISIBLE_DEVICES before bh.init"):
        driver.verify(IDENTITIES)
    member: Any = types.SimpleNamespace(incarnation="i", devices=IDENTITIES, maps={}, host="here")
    device_context = DeviceContext(member, Any, None, StreamOrder(FakeCuda()))  # type: ignore[arg-type]
    checks: list[int] = []
    device_context.verify = lambda: checks.append(1)
    device_context.check()
    device_context.check()
    assert checks == [1]
    device_context.close()


class FakeLibrary:
    """Says that CUDA has not been started, until the test starts it."""

    started = False

    def cuThreadExchangeStreamCaptureMode(self, mode: object) -> int:
        return 0 if self.started else 3

    def cuGetErrorString(self, code: int, text: object) -> int:
        return 0


def test_what_needs_the_driver_starts_it_and_what_does_not_waits(unstarted: pytest.MonkeyPatch) -> None:
    fake = FakeLibrary()
    made: Any = library.Library.__new__(library.Library)
    made._cuda, made._here, made._contexts, made._alone = fake, library._ThreadContext(), {}, True
    cuda: Any = driver.Driver.__new__(driver.Driver)
    cuda._library, cuda._count, cuda._used = made, 1, []
    stream_order = StreamOrder(cuda)
    for act in (stream_order.enter, stream_order.depart, stream_order.arrive, stream_order.mark):
        act()
    assert not stream_order._thread.relaxed
    unstarted.setattr(torch.cuda, "init", lambda: setattr(fake, "started", True))
    unstarted.setattr(torch.cuda, "is_initialized", lambda: fake.started)
    made.relax()
    assert fake.started
    unstarted.setattr(torch.cuda, "device_count", lambda: 1)
    unstarted.setattr(driver, "_has_context", lambda device: False)
    stream_order.enter()
    assert stream_order._thread.relaxed
