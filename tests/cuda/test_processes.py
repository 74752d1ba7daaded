"""Two processes on one device, with kernels that take long where a wait could be missing. Skipped without a device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch

import backhaul as bh
from backhaul.rpc.node import Node
from backhaul.worker import current_worker

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LONG = 50_000_000  # cycles, tens of milliseconds
weight: torch.Tensor | None = None


def slowly(x: torch.Tensor) -> torch.Tensor:
    """Double ``x``, late; and spoil what it was computed from, later."""
    torch.cuda._sleep(LONG)
    y = x * 2
    torch.cuda._sleep(LONG)
    x.fill_(-1)
    return y


async def slowly_in_asyncio(x: torch.Tensor) -> torch.Tensor:
    await asyncio.sleep(0)
    return slowly(x)


def scale(x: torch.Tensor) -> torch.Tensor:
    global weight
    if weight is None:
        weight = torch.full((4096,), 3.0, device="cuda", requires_grad=True)
    torch.cuda._sleep(LONG)
    return x * weight


def forget_weight() -> None:
    global weight
    weight = None


def change_weight() -> None:
    assert weight is not None
    torch.cuda._sleep(LONG)
    with torch.no_grad():
        weight.mul_(2)


def weight_grad(context: int) -> torch.Tensor:
    assert weight is not None
    return bh.get_gradients(context)[weight]


def run_out_of_memory() -> torch.Tensor:
    return torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


def slots_used() -> int:
    peers = current_worker().part(Node).peers
    return sum(shared.lender.bytes_lent for peer in peers if peer.link for _, shared in peer.link.shared())


def slots_lent() -> int:
    peers = current_worker().part(Node).peers
    return sum(shared.lender.lent for peer in peers if peer.link for _, shared in peer.link.shared())


def calls() -> None:
    for size in (16, 4096, 1 << 20):
        for number in range(6):
            x = torch.zeros(size, device="cuda")
            torch.cuda._sleep(LONG)
            x += number
            for function in (slowly, slowly_in_asyncio):
                future = bh.rpc_async("worker1", function, args=(x,))
                y = bh.rpc_sync("worker1", function, args=(x,))
                assert y.device == x.device
                assert torch.equal(y, x * 2)
                assert torch.equal(future.wait(), x * 2)
            x.fill_(-5)
    assert slots_used() > 0
    assert bh.rpc_sync("worker1", slots_used) > 0
    del x, y, future
    assert bh.rpc_sync("worker1", slots_lent) == 0


def passes() -> None:
    bh.rpc_sync("worker1", forget_weight)
    for number in range(6):
        x = torch.full((4096,), 1.0 + number, device="cuda", requires_grad=True)
        with bh.context() as context:
            y = bh.rpc_sync("worker1", scale, args=(x,))
            y.register_hook(lambda grad: (torch.cuda._sleep(LONG), grad * 2)[1])
            torch.cuda._sleep(LONG)
            bh.backward(context, [y.sum()])
            scaled = float(2**number) * 3
            assert torch.equal(bh.get_gradients(context)[x], torch.full_like(x, 2 * scaled))
            assert torch.equal(bh.rpc_sync("worker1", weight_grad, args=(context,)), 2 * x.detach())
        bh.rpc_sync("worker1", change_weight)


def kinds() -> None:
    matrix = torch.randn(64, 64, device="cuda")
    for _ in range(4):
        whole, rows, turned = bh.rpc_sync("worker1", list, args=([matrix, matrix[3:7], matrix.t()],))
        assert torch.equal(whole, matrix)
        whole.zero_()
        assert not rows.any()
        assert not turned.any()
        sparse = torch.eye(8, device="cuda").to_sparse()
        assert torch.equal(bh.rpc_sync("worker1", torch.neg, args=(sparse,)).to_dense(), -sparse.to_dense())
        value = bh.remote("worker1", torch.add, args=(matrix, 1))
        assert torch.equal(value.to_here(), matrix + 1)


def errors() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        bh.rpc_sync("worker1", run_out_of_memory)
    assert bh.get_debug_info()["cuda_usable"]


def run(program: Callable[[], None]) -> None:
    if bh.get_worker_info().id == 0:
        program()


@pytest.mark.parametrize("options", [bh.Options(), bh.Options(device_maps={"worker0": {0: 0}, "worker1": {0: 0}})])
@pytest.mark.parametrize("program", [calls, passes, kinds])
def test_two_processes(program: Callable[[], None], options: bh.Options) -> None:
    bh.launch(run, 2, args=(program,), options=options)


def test_errors() -> None:
    bh.launch(run, 2, args=(errors,))


@pytest.mark.parametrize("program", [passes, kinds])
def test_one_process(program: Callable[[], None]) -> None:
    with bh.cluster(2):
        program()
