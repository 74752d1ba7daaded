"""What the first of two workers does, on one device. Each program compares with plain autograd in its own process.

Kernels that take long (``torch.cuda._sleep``) stand wherever a wait could be missing.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.graph import register_multi_grad_hook

import backhaul as bh
from backhaul._devices.links import DeviceLink
from backhaul._devices.shared_slots import SharedSlots
from backhaul._rpc.node import Node
from backhaul._worker.worker import current_worker

LONG = 20_000_000  # cycles, about ten milliseconds
WIDE = 1 << 16  # elements; too large for slots in host memory
PEER = "worker1"


def nap() -> None:
    torch.cuda._sleep(LONG)


def late(x: torch.Tensor) -> torch.Tensor:
    """Double ``x``, in memory that holds other values until then."""
    made = torch.full_like(x, float("nan"))
    nap()
    return made.copy_(x * 2)


def far(function: Callable[..., Any], *args: Any) -> Any:
    return bh.rpc_sync(PEER, function, args=args)


# Called on the other worker.

weights: dict[str, torch.Tensor] = {}


def slowly(x: torch.Tensor) -> torch.Tensor:
    """Double ``x``, late; overwrite its input later."""
    nap()
    y = x * 2
    nap()
    x.fill_(-1)
    return y


async def slowly_in_asyncio(x: torch.Tensor) -> torch.Tensor:
    await asyncio.sleep(0)
    return slowly(x)


def keep_weight(size: int) -> None:
    weights["w"] = torch.full((size,), 3.0, device="cuda", requires_grad=True)


def scale(x: torch.Tensor) -> torch.Tensor:
    nap()
    return x * weights["w"]


def change_weight() -> None:
    nap()
    with torch.no_grad():
        weights["w"].mul_(2)


def weight_grad(context: int) -> torch.Tensor:
    return bh.get_gradients(context)[weights["w"]]


def cube(x: torch.Tensor) -> torch.Tensor:
    nap()
    return x**3


def run_out_of_memory() -> torch.Tensor:
    return torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


def keep_table() -> bh.RRef[Any]:
    torch.manual_seed(3)
    return bh.RRef(torch.nn.Embedding(32, 8, sparse=True, device="cuda"))


def look_up(table: bh.RRef[Any], index: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = table.local_value()(index)
    return found


def table_grad(table: bh.RRef[Any], context: int) -> torch.Tensor:
    return bh.get_gradients(context)[table.local_value().weight]


def look_up_in(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    found = torch.nn.functional.embedding(index, table, sparse=True)
    found.register_hook(late)
    return found


class Pair:
    """Two weights with slow hooks of all kinds."""

    def __init__(self) -> None:
        self.p = torch.full((WIDE,), 2.0, device="cuda", requires_grad=True)
        self.q = torch.full((WIDE,), 5.0, device="cuda", requires_grad=True)
        self.seen: dict[str, torch.Tensor] = {}
        self.p.register_hook(late)
        self.q.register_post_accumulate_grad_hook(self._after)
        register_multi_grad_hook((self.p, self.q), self._both)

    def _after(self, leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        self.seen["after"] = late(leaf.grad)

    def _both(self, grads: Any) -> None:
        self.seen["both"] = late(grads[0] + grads[1])

    def blend(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.p + x.square() * self.q
        y.register_hook(late)
        return y


pairs: list[Pair] = []


def keep_pair() -> None:
    pairs[:] = [Pair()]


def blend(x: torch.Tensor) -> torch.Tensor:
    return pairs[0].blend(x)


def pair_saw(context: int) -> list[torch.Tensor]:
    pair, grads = pairs[0], bh.get_gradients(context)
    return [grads[pair.p], grads[pair.q], pair.seen["both"], pair.seen["after"]]


def layer() -> torch.nn.Linear:
    """Its gradients are late."""
    torch.manual_seed(5)
    made = torch.nn.Linear(64, 64, device="cuda")
    for parameter in made.parameters():
        parameter.register_hook(late)
    return made


def keep_layer() -> tuple[bh.RRef[Any], list[bh.RRef[Any]]]:
    made = layer()
    return bh.RRef(made), [bh.RRef(parameter) for parameter in made.parameters()]


def half_precision(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", dtype=torch.float16):
        made: torch.Tensor = net(x)
        return made.relu()


def far_half_precision(net: bh.RRef[Any], x: torch.Tensor) -> torch.Tensor:
    return half_precision(net.local_value(), x)


def parameters_of(net: bh.RRef[Any]) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in net.local_value().parameters()]


class Recorded:
    """Work that a CUDA graph does."""

    def __init__(self) -> None:
        self.graph: Any = torch.cuda.CUDAGraph()
        self.x = torch.zeros(WIDE, device="cuda")
        torch.cuda.synchronize()
        begun.set()
        with torch.cuda.graph(self.graph):
            assert going_on.wait(30)
            self.y = self.x * 2 + 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.x.copy_(x)
        self.graph.replay()
        return self.y.clone()


begun, going_on = threading.Event(), threading.Event()
recorded: list[Recorded] = []


def record_graph() -> None:
    recorded.append(Recorded())


def while_recording(x: torch.Tensor) -> torch.Tensor:
    assert begun.wait(30)
    return x + 1


def go_on() -> None:
    going_on.set()


def replay(x: torch.Tensor) -> torch.Tensor:
    return recorded[0](x)


def all_shared() -> list[SharedSlots]:
    links = [peer.link for peer in current_worker().part(Node).peers]
    return [shared for link in links if isinstance(link, DeviceLink) for _, shared in link.shared()]


def slots_used() -> int:
    return sum(shared.lender.bytes_lent for shared in all_shared())


def slots_lent() -> int:
    return sum(shared.lender.lent for shared in all_shared())


# Programs.


def calls() -> None:
    for size in (16, 4096, WIDE, 1 << 20):
        for number in range(6):
            x = torch.zeros(size, device="cuda")
            nap()
            x += number
            for function in (slowly, slowly_in_asyncio):
                future = bh.rpc_async(PEER, function, args=(x,))
                y = far(function, x)
                assert y.device == x.device
                assert torch.equal(y, x * 2)
                assert torch.equal(future.wait(), x * 2)
            x.fill_(-5)
    shares = current_worker().options.devices.slot_bytes != 0
    assert (slots_used() > 0) == shares
    assert (far(slots_used) > 0) == shares
    del x, y, future
    assert far(slots_lent) == 0


def passes() -> None:
    for size in (16, WIDE):
        far(keep_weight, size)
        for number in range(5):
            x = torch.full((size,), 1.0 + number, device="cuda", requires_grad=True)
            with bh.context() as ctx:
                y = far(scale, x)
                y.register_hook(lambda grad: (nap(), grad * 2)[1])
                nap()
                ctx.backward(y.sum(), mode="fast" if number % 2 else "exact")
                scaled = float(2**number) * 3
                assert torch.equal(ctx.grads[x], torch.full_like(x, 2 * scaled))
                assert torch.equal(far(weight_grad, int(ctx)), 2 * x.detach())
            far(change_weight)


def higher_orders() -> None:
    x = torch.linspace(-1, 1, WIDE, device="cuda", requires_grad=True)
    with bh.context() as ctx:
        y = far(cube, x).sum()
        ctx.backward(y, create_graph=True)
        first = ctx.grads[x]
        assert torch.equal(first, torch.autograd.grad((x**3).sum(), x)[0])
    with bh.context() as ctx:
        ctx.backward(far(cube, x).sum(), create_graph=True)
        nap()
        ctx.backward((ctx.grads[x] ** 2).sum())  # through the first pass, on both workers
        both = ctx.grads[x]
    plain = x.detach().clone().requires_grad_()
    (first,) = torch.autograd.grad((plain**3).sum(), plain, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), plain)
    assert torch.allclose(both, first + second)


def sparse_gradients() -> None:
    table = far(keep_table)
    torch.manual_seed(3)
    plain = torch.nn.Embedding(32, 8, sparse=True, device="cuda")
    index = torch.tensor([1, 5, 5, 31], device="cuda")
    for _ in range(4):
        with bh.context() as ctx:
            ctx.backward(far(look_up, table, index).square().sum())
            found = far(table_grad, table, int(ctx))
        (wanted,) = torch.autograd.grad(plain(index).square().sum(), plain.weight)
        assert found.is_sparse
        assert torch.equal(found.to_dense(), wanted.to_dense())
        with bh.context() as ctx:  # and one that travels
            ctx.backward(far(look_up_in, plain.weight, index).square().sum())
            found = ctx.grads[plain.weight]
        assert found.is_sparse
        assert torch.equal(found.to_dense(), 2 * wanted.to_dense())


def mixed_precision() -> None:
    net, parameters = far(keep_layer)
    optimizer = bh.optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    scaler = bh.optim.GradScaler(init_scale=1024.0, growth_interval=2)
    plain = layer()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain_scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2)
    for seed in range(6):
        torch.manual_seed(seed)
        x = torch.randn(32, 64, device="cuda")
        if seed == 3:
            x *= 1e30  # too large for float16: no step, and a lower scale
        with bh.context() as ctx:
            hidden = far(far_half_precision, net, x)
            assert hidden.dtype is torch.float16
            ctx.backward(scaler.scale(hidden.float().square().mean()))
            assert scaler.step(optimizer, ctx) is (seed != 3)
            scaler.update()
        plain_scaler.scale(half_precision(plain, x).float().square().mean()).backward()
        plain_scaler.step(plain_optimizer)
        plain_scaler.update()
        plain_optimizer.zero_grad()
        for found, wanted in zip(far(parameters_of, net), plain.parameters(), strict=True):
            assert torch.equal(found, wanted)
        assert scaler.get_scale() == plain_scaler.get_scale()


def optimizers() -> None:
    net, parameters = far(keep_layer)
    optimizer = bh.optim.DistributedOptimizer(torch.optim.Adam, parameters, lr=0.05)
    plain = layer()
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=0.05)
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.randn(8, 64, device="cuda")
        with bh.context() as ctx:
            ctx.backward(net.rpc_sync().forward(x).square().mean())
            norm = bh.optim.clip_grad_norm_(ctx, optimizer, max_norm=1e9)  # which changes nothing
            optimizer.step(ctx)
        plain(x).square().mean().backward()
        assert torch.allclose(norm, torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]).cpu())
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        for found, wanted in zip(far(parameters_of, net), plain.parameters(), strict=True):
            assert torch.equal(found, wanted)


def graphs() -> None:
    x = torch.ones(WIDE, device="cuda")
    for _ in range(3):
        far(slowly, x)  # so that slots are there, which come and go while the graph is made
    making = bh.rpc_async(PEER, record_graph)
    for number in range(20):
        assert torch.equal(far(while_recording, x * number), x * number + 1)
        assert far(while_recording, torch.full((4,), number, device="cuda"))[0] == number + 1
    far(go_on)
    making.wait()
    for number in range(4):
        assert torch.equal(far(replay, x * number), x * (2 * number + 1))


def kinds() -> None:
    matrix = torch.randn(64, 64, device="cuda")
    for _ in range(4):
        whole, rows, turned = far(list, [matrix, matrix[3:7], matrix.t()])
        assert torch.equal(whole, matrix)
        whole.zero_()
        assert not rows.any()
        assert not turned.any()
        sparse = torch.sparse_coo_tensor([[0, 3], [1, 2]], [1.0, 2.0], (8, 8), device="cuda", check_invariants=False)
        assert torch.equal(far(torch.neg, sparse).to_dense(), -sparse.to_dense())
        for dtype in (torch.bool, torch.int8, torch.float16, torch.bfloat16, torch.float64, torch.complex64):
            small = torch.ones(5, device="cuda").to(dtype)
            assert torch.equal(far(torch.clone, small), small)
        empty = torch.empty(0, 3, device="cuda")
        assert far(torch.clone, empty).shape == (0, 3)
        assert far(torch.clone, torch.tensor(2.5, device="cuda")).item() == 2.5
        value = bh.remote(PEER, torch.add, args=(matrix, 1))
        assert torch.equal(value.to_here(), matrix + 1)


def modules() -> None:
    net = bh.nn.RemoteModule(f"{PEER}/cuda:0", layer)
    plain = layer()
    for seed in range(4):
        torch.manual_seed(seed)
        x = late(torch.randn(8, 64, device="cuda")).requires_grad_()
        with bh.context() as ctx:
            y = net(x)
            assert y.device == x.device
            ctx.backward(late(y).sum())
            found = ctx.grads[x]
        (wanted,) = torch.autograd.grad(late(plain(x)).sum(), x)
        assert torch.equal(found, wanted)
        assert torch.equal(net(x.detach().cpu()), y), "inputs are brought to it"


def hooks() -> None:
    for number in range(4):
        far(keep_pair)
        x = torch.full((WIDE,), 1.0 + number, device="cuda", requires_grad=True)
        with bh.context() as ctx:
            ctx.backward(far(blend, x).sum(), mode="fast" if number % 2 else "exact")
            found = [ctx.grads[x], *far(pair_saw, int(ctx))]
        pair, plain = Pair(), x.detach().clone().requires_grad_()
        pair.blend(plain).sum().backward()  # type: ignore[no-untyped-call]
        wanted = [plain.grad, pair.p.grad, pair.q.grad, pair.seen["both"], pair.seen["after"]]
        for one, other in zip(found, wanted, strict=True):
            assert other is not None
            assert torch.equal(one, other)


def callbacks() -> None:
    async def awaited(x: torch.Tensor) -> torch.Tensor:
        return (await bh.rpc_async(PEER, slowly, args=(x,))) + 1

    for size in (16, WIDE):
        for number in range(4):
            x = torch.full((size,), float(number), device="cuda")
            chained = (
                bh.rpc_async(PEER, slowly, args=(x,)).then(lambda done: late(done.wait())).then(lambda d: d.value())
            )
            passed: bh.Future[torch.Tensor] = bh.Future()
            called = bh.rpc_async(PEER, slowly, args=(x,))
            called.add_done_callback(lambda done, passed=passed: passed.set_result(late(done.value())))  # type: ignore[misc]
            many = bh.wait_all([bh.rpc_async(PEER, slowly, args=(x,)) for _ in range(3)])
            assert torch.equal(chained.wait(), x * 4)
            assert torch.equal(passed.wait(), x * 4)
            assert torch.equal(torch.stack(many), torch.stack([x * 2] * 3))
            assert torch.equal(asyncio.run(awaited(x)), x * 2 + 1)


def several_streams() -> None:
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for size in (16, WIDE):
        for number in range(4):
            with bh.context() as ctx:
                with torch.cuda.stream(first):
                    x = late(torch.full((size,), 0.5 * number, device="cuda")).requires_grad_()
                    future = bh.rpc_async(PEER, cube, args=(x,))
                with torch.cuda.stream(second):
                    other = far(slowly, late(torch.full((size,), 1.0, device="cuda")))
                    loss = (future.wait() * other).sum()
                    nap()
                first.wait_stream(second)
                with torch.cuda.stream(first):
                    ctx.backward(loss)
                with torch.cuda.stream(second):
                    found = ctx.grads[x] + 1
            torch.cuda.synchronize()
            assert torch.equal(other, torch.full_like(other, 4.0))
            plain = x.detach().clone().requires_grad_()
            (wanted,) = torch.autograd.grad((plain**3 * 4).sum(), plain)
            assert torch.equal(found, wanted + 1)


def nothing_waits() -> None:
    def step(x: torch.Tensor) -> Any:
        with bh.context() as ctx:
            y = far(cube, x)
            ctx.backward(y.sum())
            return y, ctx.grads[x]

    for size in (16, WIDE):
        x = torch.full((size,), 2.0, device="cuda", requires_grad=True)
        for _ in range(4):  # until there are slots enough
            kept = [step(x) for _ in range(6)]
            del kept
            torch.cuda.synchronize()
            time.sleep(0.2)
        for _ in range(100):
            nap()
        _, grad = step(x)
        assert not torch.cuda.current_stream().query(), "the step took as long as what came before it on the device"
        assert torch.equal(grad, 3 * x.detach() ** 2)


def own_streams() -> None:
    ours = torch.cuda.Stream()
    for size in (16, WIDE):
        for number in range(6):
            with torch.cuda.stream(ours):
                nap()
                x = torch.full((size,), float(number), device="cuda")
                y = far(slowly, x)
                z = y + 1
            ours.synchronize()
            assert torch.equal(z, torch.full_like(z, 2 * number + 1))


def threads() -> None:
    trouble: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(10):
                x = torch.full((16 if turn % 2 else WIDE,), float(number), device="cuda")
                assert torch.equal(far(slowly, x), x * 2)
        except BaseException as error:
            trouble.append(error)

    group = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in group:
        thread.start()
    for thread in group:
        thread.join()
    if trouble:
        raise trouble[0]


def what_is_kept() -> None:
    kept = []
    for number in range(60):
        for size in (16, WIDE):
            x = torch.full((size,), float(number), device="cuda")
            kept.append((number, far(slowly, x)))
            del x
        if number % 3 == 0:
            kept.pop(0)
    for number, y in kept:
        assert torch.equal(y, torch.full_like(y, 2.0 * number))


def memory_comes_back() -> None:
    x = torch.ones(16 << 20, device="cuda")
    for number in range(60):
        y = far(slowly, x)
        if number == 10:
            torch.cuda.synchronize()
            before = torch.cuda.mem_get_info()[0]
    del y
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] > before - (256 << 20)


def errors() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        far(run_out_of_memory)
    assert any("worker 'worker1' and its CUDA devices are still usable" in note for note in caught.value.__notes__)
    assert bh.get_debug_info()["cuda_usable"]
    x = torch.ones(4, device="cuda")
    assert torch.equal(far(slowly, x), x * 2)


ALL = [
    calls,
    passes,
    higher_orders,
    sparse_gradients,
    mixed_precision,
    optimizers,
    kinds,
    modules,
    hooks,
    callbacks,
    own_streams,
    several_streams,
    nothing_waits,
    threads,
    what_is_kept,
    memory_comes_back,
    errors,
    graphs,
]


@functools.cache
def by_name() -> dict[str, Callable[[], None]]:
    return {program.__name__: program for program in ALL}
