"""Scripted functions and modules that all workers have.

The tests compare the results of calls with those of the same functions called locally.
"""

import warnings
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.futures import Future

import backhaul as bh
import backhaul.jit

T = TypeVar("T")


def script(what: T) -> Any:
    """As ``torch.jit.script``, without the warning that it is deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit")
        return torch.jit.script(what)


def interface(what: T) -> Any:
    """As ``torch.jit.interface``, without the warning that it is deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit")
        return torch.jit.interface(what)


# Functions that the tests call on other workers.


@script
def blend(a: Tensor, b: Tensor, scale: float = 2.0, shift: int = 1) -> Tensor:
    """A function that is not symmetric in any two arguments, so that a mix-up changes the result."""
    return a * a * scale + torch.sin(b) * shift


@script
def three() -> int:
    return 3


@script
def many(a: Tensor, n: int) -> dict[str, list[Tensor]]:
    return {"a": [a * i for i in range(n)], "none": []}


@script
def several(a: Tensor, word: str = "w") -> tuple[Tensor, str, int | None]:
    return a + 1, word + "!", None


@script
def fail(a: Tensor) -> Tensor:
    if a.numel() > 1:
        raise ValueError("fail() takes one element, got too many")
    return a


@script
def nothing(a: Tensor) -> None:
    pass


# Calls from script, with each of the three functions.


@script
def sync(to: str, a: Tensor, b: Tensor) -> Tensor:
    return bh.rpc_sync(to, blend, (a, b))


@script
def async_(to: str, a: Tensor, b: Tensor) -> Tensor:
    return bh.rpc_async(to, blend, (a, b)).wait() + 0.0


@script
def remote(to: str, a: Tensor, b: Tensor) -> Tensor:
    return bh.remote(to, blend, (a, b)).to_here()


@script
def two_hops(first: str, second: str, a: Tensor, b: Tensor) -> Tensor:
    inner = bh.rpc_sync(first, sync, (second, a, b))
    return inner * bh.rpc_sync(second, sync, (first, b, inner))


# Forks.


@script
def forked(to: str, other: str, a: Tensor, b: Tensor) -> Tensor:
    one = torch.jit.fork(sync, to, a, b)
    two = torch.jit.fork(async_, other, b, a)
    return one.wait() * two.wait()


@script
def forked_twice(to: str, other: str, a: Tensor, b: Tensor) -> Tensor:
    outer = torch.jit.fork(forked, to, other, a, b)
    unforked = sync(other, b, b)
    return outer.wait() + unforked


@script
def after_wait(to: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first = bh.rpc_async(to, blend, (a, b)).wait()  # the script continues on another thread
    second = bh.rpc_async(to, blend, (b, first)).wait()
    third = bh.remote(to, blend, (second, a)).to_here()
    return first, second, third


# Gradients.


@script
def differentiate(context: int, loss: Tensor) -> dict[Tensor, Tensor]:
    bh.backward(context, [loss], True)
    return bh.get_gradients(context)


@script
def step(context: int, to: str, a: Tensor, b: Tensor) -> dict[Tensor, Tensor]:
    loss = forked(to, to, a, b).sum()
    bh.backward(context, [loss])
    return bh.get_gradients(context)


# References.


@script
def describe(rref: bh.RRef[Tensor]) -> tuple[bool, str, bool, str, int]:
    owner = rref.owner()
    return rref.is_owner(), rref.owner_name(), rref.confirmed_by_owner(), owner.name, owner.id


@script
def fetch(rref: bh.RRef[Tensor], factor: Tensor) -> Tensor:
    return rref.to_here() * factor


@script
def fetch_with_timeout(rref: bh.RRef[Tensor], timeout: float) -> Tensor:
    return rref.to_here(timeout)


@script
def local(rref: bh.RRef[Tensor], factor: Tensor) -> Tensor:
    return rref.local_value() * factor


@script
def pass_on(rref: bh.RRef[Tensor]) -> bh.RRef[Tensor]:
    return rref


@script
def at_owner(rref: bh.RRef[Tensor], factor: Tensor) -> Tensor:
    return bh.rpc_sync(rref.owner(), local, (rref, factor)) + bh.rpc_sync(rref.owner_name(), local, (rref, factor))


@script
def total(rrefs: list[bh.RRef[Tensor]]) -> Tensor:
    made = torch.zeros(2)
    for rref in rrefs:
        made = made + rref.to_here()
    return made


@script
def create_and_use(to: str, a: Tensor, b: Tensor) -> tuple[bool, str, Tensor]:
    rref = bh.remote(to, blend, (a, b), {"shift": 3})
    rrefs = [rref, bh.remote(to, blend, (b, a))]
    return rref.is_owner(), rref.owner_name(), rrefs[0].to_here() + rrefs[1].to_here(5.0)


@script
def return_reference(to: str, a: Tensor, b: Tensor):  # type: ignore[no-untyped-def]
    return bh.remote(to, blend, (a, b))


@script
def return_future(to: str, a: Tensor, b: Tensor) -> Future[Tensor]:
    return bh.rpc_async(to, blend, (a, b))


# Modules.


@interface
class Layer:
    """The interface of the remote modules in these tests."""

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        pass

    def size(self) -> int:
        pass


class Plain(torch.nn.Module):
    """A local layer that implements ``Layer``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return torch.tanh(x @ self.weight) * factor

    @torch.jit.export
    def size(self) -> int:
        return self.weight.numel()


def make_layer() -> Any:
    return script(Plain())


@script
def run_layer(rref: bh.RRef[Layer], x: Tensor) -> Tensor:
    return rref.local_value().forward(x, 3.0)


class Model(torch.nn.Module):
    """A module that contains a layer, local or remote."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.last = torch.nn.Parameter(torch.tensor([2.0, -1.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x, 0.5)) * self.last * self.inner.size()


class Async(Model):
    """The same module, with futures."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.inner.forward_async(x, 0.5).wait()
        return self.inner.forward_async(first).wait() * self.last * self.inner.size_async().wait()


class Caller(torch.nn.Module):
    """A module that makes calls and holds references."""

    rrefs: list[bh.RRef[Tensor]]

    def __init__(self, to: str, rrefs: list[bh.RRef[Tensor]]) -> None:
        super().__init__()
        self.callee = to
        self.rrefs = rrefs
        self.weight = torch.nn.Parameter(torch.tensor([0.5, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        for rref in self.rrefs:
            x = x + rref.to_here()
        return bh.rpc_sync(self.callee, blend, (x, self.weight))
