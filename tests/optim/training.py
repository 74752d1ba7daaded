"""One small model, trained in two ways by the same code: ``Plain`` in one process with a plain optimizer, ``Far`` with
its parameters on workers. What comes out must be equal to the last bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

import backhaul as bh

WORKERS = 4
SHAPES = {
    "w0": (3, 4),
    "b0": (4,),
    "w1": (4, 4),
    "b1": (4,),
    "w2": (4, 2),
    "b2": (2,),
    "idle": (2,),  # gets no gradient
    "spare": (3,),  # nor does this one, on a worker that no pass ever reaches
}
OWNERS = {
    "w0": "worker1",
    "b0": "worker1",
    "w1": "worker2",
    "b1": "worker2",
    "w2": "worker0",
    "b2": "worker0",
    "idle": "worker1",
    "spare": "worker3",
}
ELSEWHERE = {name: f"worker{number}" for name, number in zip(OWNERS, [2, 0, 0, 1, 1, 3, 3, 2], strict=True)}
"""Another way to spread the same parameters."""

Groups = Callable[[Mapping[str, Any]], Any]


def initial(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


def batches(count: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randn(5, 3, generator=generator, dtype=dtype) for _ in range(count)]


def layer(weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight + bias)


def far_layer(weight: bh.RRef[Any], bias: bh.RRef[Any], x: torch.Tensor) -> torch.Tensor:
    return layer(weight.local_value(), bias.local_value(), x)


class Model:
    """The parameters, by name."""

    params: dict[str, Any]

    def groups(self) -> list[Any]:
        return list(self.params.values())

    def two_groups(self) -> list[dict[str, Any]]:
        """Both with parameters on worker1; the second with a learning rate of its own."""
        names = list(self.params)
        return [
            {"params": [self.params[name] for name in names[1:]]},
            {"params": [self.params[names[0]]], "lr": 0.5},
        ]

    def backward(self, x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
        """Inside, the gradients of the loss exist. Gives what ``optimizer.step`` takes."""
        raise NotImplementedError

    def values(self) -> dict[str, torch.Tensor]:
        raise NotImplementedError


class Plain(Model):
    def __init__(self, values: Mapping[str, torch.Tensor] | None = None) -> None:
        self.params = {name: torch.nn.Parameter(value.clone()) for name, value in (values or initial()).items()}

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(3):
            x = layer(self.params[f"w{number}"], self.params[f"b{number}"], x)
        return x.square().sum()

    @contextlib.contextmanager
    def backward(self, x: torch.Tensor) -> Iterator[None]:
        self.loss(x).backward()
        yield None
        for param in self.params.values():
            param.grad = None

    def values(self) -> dict[str, torch.Tensor]:
        return {name: param.detach().clone() for name, param in self.params.items()}

    def grads(self) -> dict[str, torch.Tensor | None]:
        return {name: param.grad for name, param in self.params.items()}


class Far(Model):
    def __init__(
        self, values: Mapping[str, torch.Tensor] | None = None, owners: Mapping[str, str] = OWNERS, **options: Any
    ) -> None:
        self.params = {
            name: bh.remote(owners[name], torch.nn.Parameter, args=(value,))
            for name, value in (values or initial()).items()
        }
        self.owners = owners
        self.options = options

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(3):
            weight, bias = self.params[f"w{number}"], self.params[f"b{number}"]
            if weight.owner() == bias.owner():
                x = bh.rpc_sync(weight.owner(), far_layer, args=(weight, bias, x))
            else:
                x = layer(weight.to_here(), bias.to_here(), x)
        return x.square().sum()

    @contextlib.contextmanager
    def backward(self, x: torch.Tensor) -> Iterator[Any]:
        with bh.context() as ctx:
            ctx.backward(self.loss(x), **self.options)
            yield None if self.options.get("accumulate") == "grad" else ctx

    def values(self) -> dict[str, torch.Tensor]:
        return {name: rref.to_here().detach().clone() for name, rref in self.params.items()}

    def grads(self, context: int | None) -> dict[str, torch.Tensor | None]:
        return {name: bh.rpc_sync(r.owner(), grad_of, args=(r, context)) for name, r in self.params.items()}


def grad_of(rref: bh.RRef[Any], context: int | None) -> torch.Tensor | None:
    """On the owner: a gradient in a context, or ``.grad``."""
    param = rref.local_value()
    if context is None:
        return param.grad
    try:
        return bh.get_gradients(context).get(param)
    except bh.errors.UnknownContextError:
        return None


def train(model: Model, optimizer: Any, data: Sequence[torch.Tensor], scheduler: Any = None) -> None:
    for x in data:
        with model.backward(x) as ctx:
            optimizer.step(ctx)  # a plain optimizer gets None, for its closure
        if scheduler is not None:
            scheduler.step()


def same(found: Any, wanted: Any, where: str = "") -> None:
    """Assert that two values are equal to the last bit, tensors inside of them too."""
    assert type(found) is type(wanted), f"{where}: {found} is not {wanted}"
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype, where
        assert found.layout == wanted.layout, where
        if wanted.is_sparse:
            found, wanted = found.to_dense(), wanted.to_dense()
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{where}: {m}")
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted) or sorted(found) == sorted(wanted), where
        for name, value in wanted.items():
            same(found[name], value, f"{where}[{name!r}]")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), where
        for place, value in enumerate(wanted):
            same(found[place], value, f"{where}[{place}]")
    else:
        assert found == wanted, where
