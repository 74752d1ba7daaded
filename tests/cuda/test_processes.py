"""Two processes on one device. Skipped without a device."""

from __future__ import annotations

import functools
import os
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

import backhaul as bh
from tests.cluster.processes import DIED, run_processes

from . import fresh, programs, races

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MAPS = bh.Options(devices=bh.Devices(maps={"worker0": {0: 0}, "worker1": {0: 0}}))
OPTIONS = {"no map": bh.Options(), "maps": MAPS, "staged": bh.Options(devices=bh.Devices(slot_bytes=0))}
WAITS = {"staged": {"nothing_waits"}}  # the host waits for staged memory
SOON = 20.0  # seconds


def run_all() -> dict[str, str] | None:
    """The traceback of each program; empty: it passed."""
    if bh.get_worker_info().id:
        return None
    said = {}
    for name, program in programs.by_name().items():
        try:
            program()
            torch.cuda.synchronize()
            said[name] = ""
        except BaseException:
            said[name] = traceback.format_exc()
    return said


@functools.cache
def outcomes(way: str) -> dict[str, str]:
    found: dict[str, str] = bh.launch(run_all, 2, options=OPTIONS[way])[0]
    return found


@pytest.mark.parametrize("way", OPTIONS)
@pytest.mark.parametrize("name", list(programs.by_name()))
def test_two_processes(name: str, way: str) -> None:
    said = outcomes(way)[name]
    if name not in WAITS.get(way, ()):
        assert not said, said


def test_cuda_starts_with_the_first_tensor_of_a_device() -> None:
    found, _ = bh.launch(fresh.begin_without_a_device, 2)
    assert found == {
        "before": [False, False],
        "child": 0,
        "back": ("cuda:0", -float(programs.WIDE)),
        "after": [True, True],
    }


def arrive(x: torch.Tensor) -> tuple[str, torch.Tensor]:
    return str(x.device), x * 3


def where() -> list[str] | None:
    """Where a tensor arrives, its result, and the gradients of a leaf and of what was computed from one."""
    if bh.get_worker_info().id:
        return None
    x = torch.ones(programs.WIDE, device="cuda", requires_grad=True)
    w = torch.ones(programs.WIDE, device="cuda", requires_grad=True)
    with bh.context() as ctx:
        there, y = programs.far(arrive, x)
        _, z = programs.far(arrive, w * 2)
        ctx.backward((y + z).sum())
        assert torch.equal(ctx.grads[x].cpu(), torch.full((programs.WIDE,), 3.0))
        assert torch.equal(ctx.grads[w].cpu(), torch.full((programs.WIDE,), 6.0))
        return [there, str(y.device), str(ctx.grads[x].device), str(ctx.grads[w].device)]


@pytest.mark.parametrize(
    ("devices", "there", "back"),
    [
        ({}, "cuda:0", "cuda:0"),
        ({"maps": {"worker1": {0: 0}}}, "cuda:0", "cuda:0"),
        ({"maps": {"worker1": {0: 0}}, "placement": "mapped"}, "cuda:0", "cuda:0"),
        ({"maps": {"worker1": {0: "cpu"}}}, "cpu", "cuda:0"),
        ({"maps": {"worker1": "cpu"}}, "cpu", "cpu"),
        ({"placement": "cpu"}, "cpu", "cpu"),
    ],
    ids=str,
)
def test_where_tensors_arrive(devices: dict[str, Any], there: str, back: str) -> None:
    found = bh.launch(where, 2, options=bh.Options(devices=bh.Devices(**devices)))[0]
    assert found == [there, back, "cuda:0", "cuda:0"]


@pytest.mark.parametrize(
    "program",
    [
        programs.passes,
        programs.kinds,
        programs.optimizers,
        programs.hooks,
        programs.callbacks,
        programs.own_streams,
        programs.several_streams,
        programs.errors,
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_one_process(program: Callable[[], None]) -> None:
    with bh.cluster(2):
        program()


def test_races() -> None:
    rounds = int(os.environ.get("BACKHAUL_RACES", "100"))
    differences = bh.launch(races.run, 3, args=(rounds, 1))[0]
    assert not differences, differences


def break_the_device() -> torch.Tensor:
    return torch.zeros(2, device="cuda")[torch.tensor([7], device="cuda")].sum()


def after_a_device_has_failed() -> list[str] | None:
    if bh.get_worker_info().id:
        return None
    x = torch.ones(4, device="cuda")
    assert torch.equal(bh.rpc_sync("worker1", torch.neg, args=(x,)), -x)
    said = []
    for _ in range(2):
        try:
            print(bh.rpc_sync("worker1", break_the_device).item())
        except RuntimeError as error:
            said.append("\n".join([str(error), *getattr(error, "__notes__", ())]))
    assert bh.rpc_sync("worker1", torch.neg, args=(torch.ones(2),)).tolist() == [-1, -1], "without CUDA it is there"
    said.append(str(bh.rpc_sync("worker1", bh.get_debug_info)["cuda_usable"]))
    return said


def test_a_device_that_fails_is_said_to_have() -> None:
    said = bh.launch(after_a_device_has_failed, 2)[0]
    assert said[-1] == "False"
    assert "restart that worker" in "".join(said), said


def slowly_and_die(x: torch.Tensor) -> torch.Tensor:
    for _ in range(20):
        torch.cuda._sleep(100_000_000)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    return x.neg()


def outlive(rank: int, folder: str, size: int) -> Any:
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    bh.init(f"worker{rank}", rank=rank, world_size=2, store=torch.distributed.FileStore(f"{folder}/store", 2))
    if rank:
        time.sleep(SOON)
        return None
    x = torch.ones(size, device="cuda")
    for _ in range(4):
        assert torch.equal(bh.rpc_sync("worker1", torch.neg, args=(x,)) + 1, 1 - x)
    y = bh.rpc_sync("worker1", slowly_and_die, args=(x,))
    begun = time.monotonic()
    z = y + 1
    torch.cuda.synchronize()
    assert len(z) == size
    waited = time.monotonic() - begun
    with pytest.raises(bh.PeerLostError):
        bh.rpc_sync("worker1", torch.neg, args=(x,))
    del y, z
    torch.cuda.synchronize()
    bh.shutdown(graceful=False)
    return waited


@pytest.mark.parametrize("size", [16, 1 << 20])
def test_who_waits_for_a_worker_that_was_killed_goes_on(size: int, tmp_path: Any) -> None:
    waited, other = run_processes(outlive, 2, str(tmp_path), size)
    assert other == DIED
    assert waited < SOON


def slowly_doubled(x: torch.Tensor) -> torch.Tensor:
    torch.cuda._sleep(500_000_000)
    return x * 2


def keep_what_came(rank: int, folder: str, size: int) -> Any:
    bh.init(f"worker{rank}", rank=rank, world_size=2, store=torch.distributed.FileStore(f"{folder}/store", 2))
    if rank:
        bh.shutdown()
        return None
    x = torch.full((size,), 3.0, device="cuda")
    for _ in range(4):
        bh.rpc_sync("worker1", torch.neg, args=(x,))
    y = bh.rpc_sync("worker1", slowly_doubled, args=(x,))
    bh.shutdown()
    time.sleep(1.0)  # the other process has ended
    return y.cpu().unique().tolist()


@pytest.mark.parametrize("size", [16, 1 << 20])
def test_what_came_is_there_after_the_sender_has_gone(size: int, tmp_path: Any) -> None:
    assert run_processes(keep_what_came, 2, str(tmp_path), size)[0] == [6.0]
