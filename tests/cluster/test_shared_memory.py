"""Large tensors between processes go through shared memory: right values, nothing kept too long, nothing lost too
soon.
"""

from __future__ import annotations

import functools
import gc
import os
import pathlib
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch.distributed import FileStore

import backhaul as bh
from backhaul._transport.shm.host_memory import THRESHOLD
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._transport.sockets.socket_writer import SocketWriter
from backhaul._wire.frames import GAP

from .processes import DIED, run_processes
from .remote_functions import PATIENCE, identity

KIB, MIB = 1 << 10, 1 << 20
OFF = bh.Options(shm_bytes=0)


def launch(function: Callable[..., Any], workers: int, *args: Any, **options: Any) -> list[Any]:
    return bh.launch(function, workers, args=args, timeout=PATIENCE, start_method="forkserver", **options)


def content(size: int, seed: int = 0) -> torch.Tensor:
    """``size`` bytes of floats that depend on ``seed``."""
    return torch.arange(size // 4, dtype=torch.float32).sub_(1000.0 * (seed + 1))


def await_free(worker: str | None = None) -> None:
    """Wait until no slot of a worker is lent: a reply is sent before the handler's own references go."""
    until(lambda: counters(worker)["shm_lent"] == 0)


def until(fulfilled: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not fulfilled():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def counters(worker: str | None = None) -> dict[str, int]:
    return bh.get_debug_info() if worker is None else bh.rpc_sync(worker, bh.get_debug_info)


def warm(size: int, to: str = "worker1") -> None:
    """Send often enough for slots of that size, in both directions."""
    for _ in range(4):
        bh.rpc_sync(to, identity, args=(content(size),))


def memory_files() -> list[str]:
    """Descriptors of memory that this process has open."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return [link for link in links if "memfd:backhaul" in link]


def mapped() -> int:
    """How many bytes of segments this process has mapped."""
    total = 0
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        if "memfd:backhaul" in line:
            first, last = line.split()[0].split("-")
            total += int(last, 16) - int(first, 16)
    return total


_kept: dict[Any, Any] = {}


def keep(key: Any, value: Any) -> None:
    _kept[key] = value


def total_of_kept() -> float:
    return float(sum(value.double().sum() for value in _kept.values()))


def drop_in_disorder() -> None:
    """Drop everything that was kept, in random order, on new threads."""
    keys = list(_kept)
    random.Random(1).shuffle(keys)
    threads = [threading.Thread(target=lambda part=keys[n::4]: [_kept.pop(key) for key in part]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def zero(value: torch.Tensor) -> torch.Tensor:
    return value.zero_()


# Values.


def exchange(used: bool) -> None:
    if bh.get_worker_info().id:
        return
    for size in (4, THRESHOLD - 4, THRESHOLD, THRESHOLD + 4, 100 * KIB, MIB, MIB + 4, 5 * MIB, 33 * MIB):
        for seed in range(4 if size < 8 * MIB else 3):
            value = content(size, seed)
            came = bh.rpc_sync("worker1", identity, args=(value,))
            assert torch.equal(came, value), (size, seed)
    assert bool(counters()["shm_bytes"]) == bool(counters("worker1")["shm_bytes"]) == used
    for seed in range(4):
        array, loose = content(MIB, seed).numpy(), bytearray(content(MIB, seed).numpy().tobytes())
        values = [
            content(THRESHOLD, seed),
            array,
            content(2 * MIB, seed),
            loose,
            content(16, seed),
            torch.ones(300, 300).t(),
        ]
        came = bh.rpc_sync("worker1", identity, args=(values,))
        for one, other in zip(came, values, strict=True):
            same = torch.equal(one, other) if isinstance(one, torch.Tensor) else numpy.array_equal(one, other)
            assert same, (seed, type(one))
    value = content(MIB)
    came = bh.rpc_sync("worker1", zero, args=(value,))
    assert torch.equal(value, content(MIB))
    assert not came.any()
    came += 1  # writable, and not seen by anyone else
    again = bh.rpc_sync("worker1", identity, args=(value,))
    assert torch.equal(again, value)
    assert came.eq(1).all()
    assert again.data_ptr() % 64 == 0
    assert torch.equal(pickle.loads(pickle.dumps(again)), value)
    again.requires_grad_()
    (gradient,) = torch.autograd.grad((again * value).sum(), again)
    assert torch.equal(gradient, value)
    del came, again, values, one, other
    await_free()
    await_free("worker1")


@pytest.mark.parametrize("options", [None, OFF, bh.Options(transport="tcp")], ids=["on", "off", "tcp"])
def test_values_of_all_sizes_come_back_equal(options: bh.Options | None) -> None:
    launch(exchange, 2, options is None, options=options)


def keep_many() -> None:
    if bh.get_worker_info().id:
        return
    warm(100 * KIB)
    sent = [content(100 * KIB, seed) for seed in range(200)]
    for seed, value in enumerate(sent):
        bh.rpc_sync("worker1", keep, args=(seed, value))
    for value in sent:
        value.zero_()
    assert counters()["shm_lent"] > 100
    expected = float(sum(content(100 * KIB, seed).double().sum() for seed in range(200)))
    assert bh.rpc_sync("worker1", total_of_kept) == expected
    bh.rpc_sync("worker1", drop_in_disorder)
    await_free()
    made = counters()["shm_bytes"]
    for seed in range(200):  # the same memory again
        bh.rpc_sync("worker1", keep, args=(seed, content(100 * KIB, seed)))
    assert counters()["shm_bytes"] <= made + 8 * MIB
    assert bh.rpc_sync("worker1", total_of_kept) == expected


def test_slots_come_back_however_late_and_in_any_order() -> None:
    launch(keep_many, 2)


def fill_up() -> None:
    if bh.get_worker_info().id:
        return
    for seed in range(30):
        bh.rpc_sync("worker1", keep, args=(seed, content(MIB, seed)))
    assert 0 < counters()["shm_bytes"] <= 10 * MIB
    assert 0 < counters()["shm_lent"] < 10
    assert bh.rpc_sync("worker1", total_of_kept) == float(sum(content(MIB, seed).double().sum() for seed in range(30)))


def test_beyond_the_ceiling_tensors_go_through_the_socket() -> None:
    launch(fill_up, 2, options=bh.Options(shm_bytes=10 * MIB))


def echo_for_long() -> tuple[int, int, int]:
    """How much more memory 60 echoes took than the 10 before them, here and there, and the shared memory."""
    if bh.get_worker_info().id:
        return 0, 0, 0
    value = content(16 * MIB)
    for _ in range(10):
        bh.rpc_sync("worker1", identity, args=(value,))
    before = private_memory(), bh.rpc_sync("worker1", private_memory)
    for _ in range(60):
        bh.rpc_sync("worker1", identity, args=(value,))
    after = private_memory(), bh.rpc_sync("worker1", private_memory)
    shared = counters()["shm_bytes"] + counters("worker1")["shm_bytes"]
    return after[0] - before[0], after[1] - before[1], shared


def private_memory() -> int:
    gc.collect()
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * KIB


def test_memory_stays_flat() -> None:
    here, there, shared = launch(echo_for_long, 2)[0]
    assert here < 24 * MIB
    assert there < 24 * MIB
    assert shared <= 8 * 17 * MIB


def test_memory_that_is_not_used_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if nobody sends anything any more."""
    monkeypatch.setattr("backhaul._transport.sockets.shared_memory_link._TRIM_SECONDS", 0.01)
    monkeypatch.setattr("backhaul._transport.shm.slots._UNUSED_SECONDS", 0.05)
    with bh.cluster(2, endpoints=functools.partial(SocketEndpoint, secret=b"the tests' own")) as workers:
        warm(32 * MIB)
        held = bh.rpc_sync("worker1", identity, args=(content(32 * MIB),))
        until(lambda: workers[0].endpoint.shm_bytes == 0)
        del held
        until(lambda: workers[1].endpoint.shm_bytes == 0)
        until(lambda: mapped() == 0)
        warm(32 * MIB)  # memory can be had again


# Gradients.


def scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight


def through(name: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return bh.rpc_sync(name, scale, args=(x.sin(), weight))


def train() -> None:
    if bh.get_worker_info().id:
        return
    for _ in range(4):
        x, weight = content(MIB, 1).requires_grad_(), content(MIB, 2).requires_grad_()
        with bh.context() as context:
            loss = bh.rpc_sync("worker1", through, args=("worker2", x, weight)).pow(2).sum()
            bh.backward(context, [loss])
            found = bh.get_gradients(context)
        expected = torch.autograd.grad((x.sin() * weight).pow(2).sum(), [x, weight])
        assert torch.equal(found[x], expected[0])
        assert torch.equal(found[weight], expected[1])
        del found, loss
    for name in ("worker0", "worker1", "worker2"):
        assert counters(name)["shm_bytes"] > 0
        gc.collect()
        await_free(name)


def test_gradients_through_three_workers_are_those_of_plain_autograd() -> None:
    launch(train, 3)


# Ends.


def join(rank: int, path: str, options: bh.Options | None = None) -> FileStore:
    store = FileStore(path, 2)
    bh.init(f"worker{rank}", rank=rank, world_size=2, store=store, options=options)
    return store


def talk_to_one_without(rank: int, path: str, without: int) -> None:
    join(rank, path, OFF if rank == without else None)
    for seed in range(4):
        value = content(MIB, seed)
        assert torch.equal(bh.rpc_sync(1 - rank, identity, args=(value,)), value)
    until(lambda: counters()["shm_bytes"] == 0)
    assert memory_files() == []
    bh.shutdown(timeout=PATIENCE)


@pytest.mark.parametrize("without", [0, 1])
def test_one_end_alone_may_be_without_shared_memory(tmp_path: pathlib.Path, without: int) -> None:
    assert run_processes(talk_to_one_without, 2, str(tmp_path / "store"), without) == [None, None]


def talk_to(name: str) -> None:
    """Send until the worker is gone."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        bh.rpc_sync(name, identity, args=(content(MIB),))


def end_with_tensors(rank: int, path: str, how: str) -> str:
    """Worker 1 has tensors of worker 0, which ends; then so does the channel. Nothing but the tensors stays."""
    store = join(rank, path)
    if rank == 0:
        warm(MIB)
        for seed in range(5):
            bh.rpc_sync("worker1", keep, args=(seed, content(MIB, seed)))
        assert counters()["shm_lent"] >= 3
        store.set("sent", "")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    store.get("sent")
    if how == "killed":
        with pytest.raises(bh.BackhaulError):
            talk_to("worker0")
        until(lambda: counters()["shm_bytes"] == 0)  # the channel is lost when its reader has noticed
    bh.shutdown(timeout=PATIENCE, graceful=how != "killed")
    assert memory_files() == []
    if rank == 1:
        assert mapped() > 3 * MIB
        assert all(torch.equal(_kept[seed], content(MIB, seed)) for seed in range(5))
        _kept[0].zero_()
        _kept.clear()
    gc.collect()
    assert mapped() == 0
    return "nothing left"


@pytest.mark.parametrize("how", ["killed", "in good order"])
def test_tensors_outlive_the_process_they_came_from(tmp_path: pathlib.Path, how: str) -> None:
    found = run_processes(end_with_tensors, 2, str(tmp_path / "store"), how)
    assert found == [DIED if how == "killed" else "nothing left", "nothing left"]


def lose_the_receiver(rank: int, path: str) -> str:
    """Worker 1 is killed while it has slots of worker 0 and more are being sent."""
    store = join(rank, path)
    if rank == 1:
        store.get("go")
        os.kill(os.getpid(), signal.SIGKILL)
    warm(MIB)
    for seed in range(5):
        bh.rpc_sync("worker1", keep, args=(seed, content(MIB, seed)))
    assert counters()["shm_lent"] >= 3
    store.set("go", "")
    with pytest.raises(bh.BackhaulError):
        talk_to("worker1")
    until(lambda: counters()["shm_bytes"] == counters()["shm_lent"] == 0)
    assert memory_files() == []
    gc.collect()
    assert mapped() == 0
    bh.shutdown(graceful=False)
    return "nothing left"


def test_a_receiver_that_is_killed_leaves_nothing_behind(tmp_path: pathlib.Path) -> None:
    assert run_processes(lose_the_receiver, 2, str(tmp_path / "store")) == ["nothing left", DIED]


def test_large_tensors_that_go_inline_leave_gaps_for_small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever builds the frames of calls and replies: there is a gap after each MiB, see ``frames`` [Note: pieces]."""
    frames: list[list[Any]] = []
    write = SocketWriter.write

    def record(self: SocketWriter, parts: list[Any], timeout: float | None) -> None:
        if sum(map(len, parts)) > MIB:
            frames.append(parts)
        write(self, parts, timeout)

    monkeypatch.setattr(SocketWriter, "write", record)
    with bh.cluster(2, endpoints=lambda: SocketEndpoint(secret=b"s", shm_bytes=0)):
        for value in (content(4 * MIB), [content(MIB, seed) for seed in range(4)], {"weights": content(4 * MIB)}):
            bh.rpc_sync("worker1", identity, args=(value,))
            bh.rpc_async("worker1", identity, args=(value,)).wait()
    assert len(frames) == 3 * 2 * 2
    for parts in frames:
        assert sum(part is GAP for part in parts) == 3
        assert all(len(part) <= MIB for part in parts[1:])
