"""Every call ends, whatever the values that it sends or returns raise where they are encoded or decoded; and what a
function raises has the same type by whatever route it arrives.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import backhaul as bh

from . import remote_functions as remote
from .conftest import TRANSPORTS
from .remote_functions import PlainError
from .routes import BACKWARD, CALLS

LEAVING: tuple[BaseException, ...] = (
    SystemExit("leaving"),
    KeyboardInterrupt("leaving"),
    GeneratorExit("leaving"),
    asyncio.CancelledError("leaving"),
)
"""Exceptions that end a program, a generator or a task."""

ROUTES = pytest.mark.parametrize("route", CALLS.values(), ids=CALLS)
ALL_ROUTES = pytest.mark.parametrize("route", (CALLS | BACKWARD).values(), ids=CALLS | BACKWARD)
Route = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("pair")


@pytest.fixture
def pair() -> Iterator[None]:
    """Two workers; ``alice`` is current. At the end they still work, and so do their event loops."""
    with bh.cluster(["alice", "bob"], endpoints=TRANSPORTS["unix"]):
        yield
        for name in ("alice", "bob"):
            assert bh.rpc_sync(name, remote.whoami) == name
            assert bh.rpc_sync(name, remote.gather, args=(name, 2)) == [0, 1]


def owners(route: Route) -> tuple[str, ...]:
    """Where a function may run: an error that a pass raises at its own driver was not sent."""
    return ("bob",) if route in BACKWARD.values() else ("bob", "alice")


class Undecodable:
    """Raises where it is decoded."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return remote.raise_it, (self.error,)


class Unencodable(Undecodable):
    """Raises where it is encoded."""

    def __reduce__(self) -> Any:
        raise self.error


@ROUTES
def test_a_result_whose_decoding_raises(route: Route) -> None:
    for error in LEAVING:
        with pytest.raises(bh.errors.SerializationError, match=f"{type(error).__name__}: leaving") as caught:
            route("bob", Undecodable, error)
        assert (caught.value.worker, caught.value.path) == ("bob", "result")


@ROUTES
def test_an_argument_whose_decoding_raises(route: Route) -> None:
    for error in LEAVING:
        with pytest.raises(bh.errors.SerializationError, match=f"{type(error).__name__}: leaving") as caught:
            route("bob", remote.identity, Undecodable(error))
        assert caught.value.worker == "bob"


@ROUTES
def test_a_result_whose_encoding_raises(route: Route) -> None:
    for error in LEAVING:
        with pytest.raises(bh.errors.SerializationError, match=f"{type(error).__name__}: leaving") as caught:
            route("bob", Unencodable, error)
        assert (caught.value.worker, caught.value.path) == ("bob", "result")


@ROUTES
def test_an_argument_whose_encoding_raises(route: Route) -> None:
    for error in LEAVING:
        with pytest.raises(bh.errors.SerializationError, match=f"{type(error).__name__}: leaving") as caught:
            route("bob", remote.identity, Unencodable(error))
        assert caught.value.path


def leave_on_signal(number: int, frame: Any) -> None:
    raise SystemExit("from a signal")


class Signals:
    """Raises a signal where it is decoded."""

    def __reduce__(self) -> Any:
        return signal.raise_signal, (signal.SIGUSR1,)


class SignalsError(Signals, Exception):
    """An exception that does so."""


def raise_signals() -> None:
    raise SignalsError


@pytest.mark.parametrize("function", [Signals, raise_signals])
def test_an_error_of_a_signal_handler_during_decoding_reaches_the_program(function: Any) -> None:
    before = signal.signal(signal.SIGUSR1, leave_on_signal)
    try:
        with pytest.raises(SystemExit, match="from a signal"):
            bh.rpc_sync("bob", function)
    finally:
        signal.signal(signal.SIGUSR1, before)


class UnshownError(Exception):
    """Raises where it is encoded, and where its text is made."""

    error: BaseException

    def __reduce__(self) -> Any:
        raise self.error

    def __str__(self) -> str:
        raise self.error


def raise_unshown(error: BaseException) -> None:
    made = UnshownError()
    made.error = error
    raise made


class LeavesError(Exception):
    """Raises an exception that ends programs where it is rebuilt."""

    def __init__(self, code: object) -> None:
        super().__init__(f"code {code}")
        if not isinstance(code, int):
            raise SystemExit("leaving")


def raise_leaves() -> None:
    raise LeavesError(1)


class Drifts(Exception):
    """Has another text each time it is rebuilt from its ``args``."""

    def __init__(self, text: str) -> None:
        super().__init__(f"code {text}")


def raise_drifting() -> None:
    raise Drifts("5")


@ALL_ROUTES
def test_an_exception_that_raises_where_it_is_encoded(route: Route) -> None:
    for error in LEAVING:
        for to in owners(route):
            with pytest.raises(bh.RemoteError) as caught:
                route(to, raise_unshown, error)
            assert (caught.value.type_name, caught.value.worker) == (f"{__name__}.UnshownError", to)


@ALL_ROUTES
@pytest.mark.parametrize(
    ("function", "type_name"),
    [
        (remote.fail_awkwardly, f"{remote.__name__}.AwkwardError"),
        (remote.fail_with_lock, f"{remote.__name__}.HoldsLockError"),
        (raise_leaves, f"{__name__}.LeavesError"),
    ],
)
def test_an_exception_that_cannot_be_rebuilt(route: Route, function: Any, type_name: str) -> None:
    for to in owners(route):
        with pytest.raises(bh.RemoteError) as caught:
            route(to, function)
        error = caught.value
        assert type(error) is bh.RemoteError
        assert (error.type_name, error.worker) == (type_name, to)
        assert str(error).startswith(f"{type_name}: ")
        assert isinstance(error.__cause__, bh.errors.RemoteTraceback)
        assert f"in {function.__name__}" in error.__cause__.text


@ALL_ROUTES
def test_an_exception_that_is_not_for_callers(route: Route) -> None:
    for error in LEAVING:
        for to in owners(route):
            with pytest.raises(bh.RemoteError) as caught:
                route(to, remote.raise_it, error)
            kind = type(error)
            assert type(caught.value) is bh.RemoteError
            assert (caught.value.type_name, caught.value.worker) == (f"{kind.__module__}.{kind.__qualname__}", to)
            assert isinstance(caught.value.__cause__, bh.errors.RemoteTraceback)


@ALL_ROUTES
def test_an_exception_that_can_be_rebuilt(route: Route) -> None:
    for error in (
        PlainError("plain", 7),
        concurrent.futures.CancelledError("over"),
        FileNotFoundError(2, "no", "file"),
    ):
        for to in owners(route):
            with pytest.raises(type(error)) as caught:
                route(to, remote.raise_it, error)
            assert type(caught.value) is type(error)
            assert (caught.value.args, str(caught.value)) == (error.args, str(error))


@ALL_ROUTES
def test_an_exception_is_rebuilt_once(route: Route) -> None:
    with pytest.raises(Drifts) as caught:
        route("bob", raise_drifting)
    assert str(caught.value) == "code code 5"


class Gradient(torch.Tensor):
    """A gradient that raises where it is decoded."""

    error: BaseException

    def __reduce_ex__(self, protocol: Any) -> Any:
        return remote.raise_it, (self.error,)


class Undo(torch.autograd.Function):
    """Sends gradients that cannot be decoded."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: BaseException) -> torch.Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        made = grad.as_subclass(Gradient)
        made.error = ctx.error
        return made, None


def undo(x: torch.Tensor, error: BaseException) -> torch.Tensor:
    made: torch.Tensor = Undo.apply(x, error)
    return made


@pytest.mark.parametrize("decoder", ["alice", "bob"])
def test_a_gradient_whose_decoding_raises(decoder: str) -> None:
    for error in LEAVING:
        x = torch.ones(2, requires_grad=True)
        with bh.context() as ctx:
            if decoder == "alice":
                y = bh.rpc_sync("bob", undo, args=(x, error))
            else:
                y = undo(bh.rpc_sync("bob", torch.neg, args=(x,)), error)
            with pytest.raises(bh.errors.SerializationError, match=f"{type(error).__name__}: leaving") as caught:
                ctx.backward(y.sum(), timeout=remote.PATIENCE)
            assert caught.value.worker == decoder


async def start_a_task_that_leaves(error: BaseException) -> bool:
    """A task that nobody awaits: what it raises goes to the event loop."""

    async def leave() -> None:
        raise error

    task = asyncio.get_running_loop().create_task(leave())
    await asyncio.wait([task])
    return task.exception() is not None


@pytest.mark.parametrize("error", LEAVING[:2], ids=repr)
def test_a_task_of_a_handler_does_not_end_the_event_loop(error: BaseException) -> None:
    assert bh.rpc_sync("bob", start_a_task_that_leaves, args=(error,))
