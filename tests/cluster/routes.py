"""All the ways in which a value or an exception of a function comes back to who called it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import torch

import backhaul as bh

Run = Callable[..., Any]
Route = Callable[..., Any]
"""Calls ``route(to, function, *args)``; returns the value, or raises what arrives."""


class Box:
    """Lives on another worker and runs functions there."""

    def run(self, function: Run, *args: Any) -> Any:
        return function(*args)

    async def run_in_coroutine(self, function: Run, *args: Any) -> Any:
        return await run_in_coroutine(function, *args)

    @bh.async_execution
    def run_later(self, function: Run, *args: Any) -> bh.Future[Any]:
        return run_later(function, *args)


class Runs(torch.nn.Module):
    """A module that runs functions."""

    def forward(self, function: Run, *args: Any) -> Any:
        return function(*args)


async def run_in_coroutine(function: Run, *args: Any) -> Any:
    await asyncio.sleep(0)
    return function(*args)


@bh.async_execution
def run_later(function: Run, *args: Any) -> bh.Future[Any]:
    """A future of the user's own that ends as the function does."""
    future: bh.Future[Any] = bh.Future()
    try:
        future.set_result(function(*args))
    except BaseException as error:
        future.set_exception(error)
    return future


@bh.async_execution
def run_in_then(function: Run, *args: Any) -> bh.Future[Any]:
    """A future whose callback runs the function."""
    return bh.rpc_async(bh.get_worker_info(), bh.get_worker_info).then(lambda _: function(*args))


class RunInBackward(torch.autograd.Function):
    """Runs a function where its gradient is computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Run, *args: Any) -> torch.Tensor:
        ctx.run, ctx.arguments = function, args
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.run(*ctx.arguments)
        return grad, *[None] * (1 + len(ctx.arguments))


def run_in_backward(x: torch.Tensor, function: Run, *args: Any) -> torch.Tensor:
    made: torch.Tensor = RunInBackward.apply(x, function, *args)
    return made


async def wait_for(future: bh.Future[Any]) -> Any:
    return await future


def _backward(to: str, function: Run, *args: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    with bh.context() as ctx:
        ctx.backward(bh.rpc_sync(to, run_in_backward, args=(x, function, *args)).sum())


def _backward_of_reference(to: str, function: Run, *args: Any) -> None:
    x = torch.ones((), requires_grad=True)
    with bh.context() as ctx:
        bh.remote(to, run_in_backward, args=(x, function, *args)).backward(ctx)


def _on_a_value_to_come(to: str, function: Run, *args: Any) -> Any:
    """Call a method of a value that is made after the call has come."""
    made: bh.Future[Box] = bh.Future()
    rref = bh.remote(to, _give, args=(_key(made),))
    try:
        called = rref.rpc_async().run(function, *args)
        bh.rpc_sync(to, bh.get_worker_info)  # channels keep order
    finally:
        made.set_result(Box())
    return called.wait()


_to_come: dict[int, bh.Future[Box]] = {}


def _key(future: bh.Future[Box]) -> int:
    _to_come[id(future)] = future
    return id(future)


@bh.async_execution
def _give(key: int) -> bh.Future[Box]:
    return _to_come.pop(key)


CALLS: dict[str, Route] = {
    "rpc_sync": lambda to, function, *args: bh.rpc_sync(to, function, args=args),
    "rpc_sync, retry": lambda to, function, *args: bh.rpc_sync(to, function, args=args, retry=bh.Retry()),
    "rpc_async": lambda to, function, *args: bh.rpc_async(to, function, args=args).wait(),
    "rpc_async, retry": lambda to, function, *args: bh.rpc_async(to, function, args=args, retry=bh.Retry()).wait(),
    "then": lambda to, function, *args: bh.rpc_async(to, function, args=args).then(lambda it: it.value()).wait(),
    "await": lambda to, function, *args: asyncio.run(wait_for(bh.rpc_async(to, function, args=args))),
    "collect_all": lambda to, function, *args: bh.collect_all([bh.rpc_async(to, function, args=args)]).wait()[0].wait(),
    "wait_all": lambda to, function, *args: bh.wait_all([bh.rpc_async(to, function, args=args)])[0],
    "async def": lambda to, *call: bh.rpc_sync(to, run_in_coroutine, args=call),
    "async_execution": lambda to, *call: bh.rpc_sync(to, run_later, args=call),
    "async_execution, then": lambda to, *call: bh.rpc_sync(to, run_in_then, args=call),
    "to_here": lambda to, function, *args: bh.remote(to, function, args=args).to_here(),
    "to_here, retry": lambda to, function, *args: bh.remote(to, function, args=args, retry=bh.Retry()).to_here(),
    "to_here, async def": lambda to, *call: bh.remote(to, run_in_coroutine, args=call).to_here(),
    "to_here, async_execution": lambda to, *call: bh.remote(to, run_later, args=call).to_here(),
    "to_here, then": lambda to, *call: bh.remote(to, run_in_then, args=call).to_here(),
    "proxy": lambda to, *call: bh.remote(to, Box).rpc_sync().run(*call),
    "proxy, rpc_async": lambda to, *call: bh.remote(to, Box).rpc_async().run(*call).wait(),
    "proxy, remote": lambda to, *call: bh.remote(to, Box).remote().run(*call).to_here(),
    "proxy, async def": lambda to, *call: bh.remote(to, Box).rpc_sync().run_in_coroutine(*call),
    "proxy, async_execution": lambda to, *call: bh.remote(to, Box).rpc_sync().run_later(*call),
    "proxy, value to come": _on_a_value_to_come,
    "RemoteModule": lambda to, *call: bh.nn.RemoteModule(to, Runs)(*call),
}
"""Those that end with the value of the function too."""

BACKWARD: dict[str, Route] = {"backward": _backward, "backward of a reference": _backward_of_reference}
"""Those in which the function runs in a backward pass."""
