"""Steps over three workers with kernels that take long at places drawn by lot, each compared with the same step in one
process: bit by bit, unless it adds three gradients, which may be in another order.

    python -m tests.cuda.races 1000
"""

from __future__ import annotations

import random
import sys
import time

import torch

import backhaul as bh

SIZES = (1, 16, 1000, 4096, 5000, 1 << 16, 1 << 20)
kept: dict[int, torch.Tensor] = {}


class _Nap(torch.autograd.Function):
    """Takes long in forward or backward, and returns a copy in memory that held other values before."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, there: int, back: int) -> torch.Tensor:
        ctx.back = back  # type: ignore[attr-defined]
        y = torch.full_like(x, float("nan"))
        torch.cuda._sleep(there)
        return y.copy_(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad,) = grads
        made = torch.full_like(grad, float("nan"))
        torch.cuda._sleep(ctx.back)  # type: ignore[attr-defined]
        return made.copy_(grad), None, None


def weight(seed: int, size: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(size, device="cuda", generator=generator)


def one(x: torch.Tensor, w: torch.Tensor, naps: tuple[int, int]) -> torch.Tensor:
    return _Nap.apply(x, *naps).mul(w).tanh()  # type: ignore[no-untyped-call]


def far_one(x: torch.Tensor, number: int, naps: tuple[int, int]) -> torch.Tensor:
    return one(x, kept[number], naps)


def prepare(number: int, size: int) -> None:
    kept[number] = weight(number, size).requires_grad_()


def relay(
    x: torch.Tensor, to: str, number: int, naps: tuple[int, int], more: tuple[int, int], around: bool
) -> torch.Tensor:
    """With ``around``, the value also goes through the other worker."""
    y = _Nap.apply(x, *more)  # type: ignore[no-untyped-call]
    z = bh.rpc_sync(to, far_one, args=(y, number, naps)) * 2
    return y + z if around else z


def update(number: int, context: int, nap: int) -> None:
    w = kept[number]
    torch.cuda._sleep(nap)
    with torch.no_grad():
        w.sub_(bh.get_gradients(context)[w], alpha=0.1)


def value(number: int) -> torch.Tensor:
    return kept.pop(number).detach()


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def check(lot: random.Random) -> str:
    """One round; return what differed."""
    size, steps = lot.choice(SIZES), 2
    numbers = lot.sample(range(1 << 20), 2)
    first, second = lot.sample(["worker1", "worker2"], 2)

    def nap() -> int:
        return lot.choice((0, 0, 1_000_000, 10_000_000))

    bh.rpc_sync(first, prepare, args=(numbers[0], size))
    bh.rpc_sync(second, prepare, args=(numbers[1], size))
    plain = [weight(number, size).requires_grad_() for number in numbers]
    x = torch.randn(size, device="cuda", requires_grad=True)
    for _ in range(steps):
        naps = [(nap(), nap()) for _ in range(3)]
        mode, around = lot.choice(("exact", "fast")), lot.random() < 0.5
        same = _alike if around else torch.equal
        with bh.context() as ctx:
            hidden = _Nap.apply(x, nap(), nap())  # type: ignore[no-untyped-call]
            future = bh.rpc_async(first, far_one, args=(hidden, numbers[0], naps[0]))
            b = bh.rpc_sync(first, relay, args=(hidden, second, numbers[1], naps[1], naps[2], around))
            if lot.random() < 0.5:
                torch.cuda._sleep(nap())
            loss = (future.wait() * b).sum()
            ctx.backward(loss, mode=mode)  # type: ignore[arg-type]
            found = ctx.grads[x].clone()
            changes = [
                bh.rpc_async(to, update, args=(number, int(ctx), nap()))
                for to, number in zip((first, second), numbers, strict=True)
            ]
            for change in changes:
                change.wait()
        relayed = one(x, plain[1], (0, 0)) * 2
        wanted_loss = (one(x, plain[0], (0, 0)) * (x + relayed if around else relayed)).sum()
        wanted, *grads = torch.autograd.grad(wanted_loss, [x, *plain])
        with torch.no_grad():
            for w, grad in zip(plain, grads, strict=True):
                w.sub_(grad, alpha=0.1)
        if not torch.equal(loss, wanted_loss):
            return f"size {size}: loss {loss.item()}, not {wanted_loss.item()}"
        if not same(found, wanted):
            return f"size {size}: a gradient differs by {(found - wanted).abs().max().item()}"
    for to, number, w in zip((first, second), numbers, plain, strict=True):
        if not torch.equal(bh.rpc_sync(to, value, args=(number,)), w.detach()):
            return f"size {size}: a parameter differs"
    return ""


def run(rounds: int, seed: int) -> list[str] | None:
    """Run rounds on the first worker; return what differed."""
    if bh.get_worker_info().id:
        return None
    lot = random.Random(seed)
    found = [check(lot) for _ in range(rounds)]
    return [text for text in found if text]


if __name__ == "__main__":
    if not torch.cuda.is_available():
        print("skipped: needs a CUDA device")
        sys.exit(0)
    rounds, begun = int(sys.argv[1]), time.monotonic()
    differences = bh.launch(run, 3, args=(rounds, int(sys.argv[2]) if len(sys.argv) > 2 else 0))[0]
    for text in differences:
        print(text)
    print(f"{rounds} rounds in {time.monotonic() - begun:.0f} s, {len(differences)} differences")
    sys.exit(bool(differences))
