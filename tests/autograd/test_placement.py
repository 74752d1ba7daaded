"""The same program gives the same gradients wherever its calls run: here, on another worker of this process, or in
another process; and they are those of plain autograd.

A program calls functions at a place. It says what has come, and what loss to differentiate; the gradients of the
leaves of both ends are looked at.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import backhaul as bh

from .worlds import copied, gradients_on, vector

Program = Callable[["Place"], torch.Tensor]

weight = vector(0.5, -1.5)  # of the worker that is called
parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
x = vector(1.0, 2.0)  # of the caller


class Place(abc.ABC):
    """Where calls run."""

    @abc.abstractmethod
    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run it there, and wait for its result."""

    @abc.abstractmethod
    def start(self, function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        """Start it there; returns a function that waits for its result."""

    @abc.abstractmethod
    def refer(self, function: Callable[[], Any]) -> Any:
        """A reference that was made there, to the result."""

    @abc.abstractmethod
    def make(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run it there; the result stays."""

    @abc.abstractmethod
    def method(self, value: Any, name: str, *args: Any) -> Any:
        """Call a method of a value that is there, and wait for its result."""

    @abc.abstractmethod
    def make_by(self, value: Any, name: str, *args: Any) -> Any:
        """Call a method of a value that is there; the result stays."""

    @abc.abstractmethod
    def fetch(self, value: Any) -> Any:
        """A value that is there."""

    @abc.abstractmethod
    def module(self) -> torch.nn.Module:
        """A module there."""

    @abc.abstractmethod
    def differentiate(self, root: torch.Tensor) -> dict[str, Any]:
        """The gradients of the leaves of both ends."""

    def run(self, program: Program) -> dict[str, Any]:
        """The results of a program."""
        found = program(self)
        return {
            "requires_grad": found.requires_grad,
            "value": found.tolist(),
            **self.differentiate((found.clone() * x).sum()),
        }


class Plain(Place):
    """No workers, plain autograd."""

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return copied(function(*args))

    def start(self, function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        result = self.call(function, *args)
        return lambda: result

    def refer(self, function: Callable[[], Any]) -> Any:
        return function()

    def make(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def method(self, value: Any, name: str, *args: Any) -> Any:
        return copied(getattr(value, name)(*args))

    def make_by(self, value: Any, name: str, *args: Any) -> Any:
        return getattr(value, name)(*args)

    def fetch(self, value: Any) -> Any:
        return copied(value)

    def module(self) -> torch.nn.Module:
        return Scale()

    def differentiate(self, root: torch.Tensor) -> dict[str, Any]:
        grads = torch.autograd.grad(root, (x, weight), allow_unused=True)
        return dict(zip(("x", "weight"), map(listed, grads), strict=True))


class At(Place):
    """A worker, and the context that is current, if one is."""

    def __init__(self, to: int, context: bh.ContextHandle | None = None) -> None:
        self._to = to
        self._context = context

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return bh.rpc_sync(self._to, function, args=args)

    def start(self, function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        return bh.rpc_async(self._to, function, args=args).wait

    def refer(self, function: Callable[[], Any]) -> Any:
        return bh.rpc_sync(self._to, reference_to, args=(function,))

    def make(self, function: Callable[..., Any], *args: Any) -> Any:
        return bh.remote(self._to, function, args=args)

    def method(self, value: Any, name: str, *args: Any) -> Any:
        return getattr(value.rpc_sync(), name)(*args)

    def make_by(self, value: Any, name: str, *args: Any) -> Any:
        return getattr(value.remote(), name)(*args)

    def fetch(self, value: Any) -> Any:
        return value.to_here()

    def module(self) -> torch.nn.Module:
        return bh.nn.RemoteModule(f"worker{self._to}", Scale)

    def differentiate(self, root: torch.Tensor) -> dict[str, Any]:
        assert self._context is not None
        self._context.backward(root)
        there = bh.rpc_sync(self._to, gradient_of_weight, args=(self._context,))
        return {"x": listed(self._context.grads.get(x)), "weight": there}


def listed(grad: torch.Tensor | None) -> list[float] | None:
    return None if grad is None else grad.tolist()


def gradient_of_weight(context: int) -> list[float] | None:
    return listed(bh.get_gradients(context).get(weight))


# What runs there.


class Scale(torch.nn.Module):
    """Multiply by the weight on this worker."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * weight


def scaled(value: torch.Tensor) -> torch.Tensor:
    return value * weight


def scaled_quietly(value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return value * weight


def scaled_for_inference(value: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return (value * weight).clone()


def many(value: torch.Tensor) -> dict[str, Any]:
    return {"one": value * weight, "more": [value * 2, (weight * 3,)]}


def the_weight() -> torch.Tensor:
    return weight


def twice_the_weight() -> torch.Tensor:
    return weight * 2


def the_parameter() -> torch.nn.Parameter:
    return parameter


def reference_to(function: Callable[[], Any]) -> bh.RRef[Any]:
    return bh.RRef(function())


def nested(value: torch.Tensor) -> torch.Tensor:
    """Calls its own worker."""
    return bh.rpc_sync(bh.get_worker_info(), scaled, args=(value,)) if bh_runs() else scaled(value)


def nested_quietly(value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return nested(value)


def bh_runs() -> bool:
    try:
        bh.get_worker_info()
    except bh.errors.NotInitializedError:
        return False
    return True


# Programs.


def total(made: dict[str, Any]) -> torch.Tensor:
    return made["one"] + made["more"][0] + made["more"][1][0]


def programs_of(mode: Callable[[], Any]) -> dict[str, Program]:
    """Programs that run partly under another grad mode."""

    def around_a_call(place: Place) -> torch.Tensor:
        with mode():
            return place.call(scaled, x * 3)

    def around_a_call_without_arguments(place: Place) -> torch.Tensor:
        with mode():
            return place.call(twice_the_weight)

    def around_starting_a_call(place: Place) -> torch.Tensor:
        with mode():
            end = place.start(scaled, x * 3)
        return end()

    def around_the_end_of_a_call(place: Place) -> torch.Tensor:
        end = place.start(scaled, x * 3)
        with mode():
            return end()

    def around_making(place: Place) -> torch.Tensor:
        with mode():
            made = place.make(scaled, x * 3)
        return place.fetch(made)

    def around_making_without_arguments(place: Place) -> torch.Tensor:
        with mode():
            made = place.make(twice_the_weight)
        return place.fetch(made)

    def around_making_many(place: Place) -> torch.Tensor:
        with mode():
            made = place.make(many, x * 3)
        return total(place.fetch(made))

    def around_making_and_fetching(place: Place) -> torch.Tensor:
        with mode():
            return place.fetch(place.make(scaled, x * 3))

    def around_fetching(place: Place) -> torch.Tensor:
        made = place.make(scaled, x * 3)
        with mode():
            return place.fetch(made)

    def around_fetching_many(place: Place) -> torch.Tensor:
        made = place.make(many, x * 3)
        with mode():
            found = place.fetch(made)
        return total(found)

    def around_fetching_a_leaf(place: Place) -> torch.Tensor:
        made = place.make(the_weight)
        with mode():
            return place.fetch(made)

    def around_fetching_what_was_there(place: Place) -> torch.Tensor:
        made = place.refer(twice_the_weight)
        with mode():
            return place.fetch(made)

    def around_a_method(place: Place) -> torch.Tensor:
        made = place.make(scaled, x * 3)
        with mode():
            return place.method(made, "mul", x)

    def around_making_by_a_method(place: Place) -> torch.Tensor:
        made = place.make(scaled, x * 3)
        with mode():
            made = place.make_by(made, "mul", x)
        return place.fetch(made)

    def around_a_module(place: Place) -> torch.Tensor:
        module = place.module()
        with mode():
            return module(x * 3)

    return {name: program for name, program in locals().items() if name.startswith("around")}


def a_call(place: Place) -> torch.Tensor:
    return place.call(scaled, x * 3)


def many_results(place: Place) -> torch.Tensor:
    return total(place.call(many, x * 3))


def a_quiet_function(place: Place) -> torch.Tensor:
    return place.call(scaled_quietly, x * 3)


def a_function_for_inference(place: Place) -> torch.Tensor:
    return place.call(scaled_for_inference, x * 3)


def a_leaf(place: Place) -> torch.Tensor:
    return place.call(the_weight) * 3


def a_value(place: Place) -> torch.Tensor:
    return place.fetch(place.make(scaled, x * 3))


def many_values(place: Place) -> torch.Tensor:
    return total(place.fetch(place.make(many, x * 3)))


def a_quiet_value(place: Place) -> torch.Tensor:
    return place.fetch(place.make(scaled_quietly, x * 3))


def a_leaf_that_stays(place: Place) -> torch.Tensor:
    return place.fetch(place.make(the_weight)) * 3


def a_leaf_made_quietly(place: Place) -> torch.Tensor:
    """It is the same leaf under ``no_grad``."""
    with torch.no_grad():
        made = place.make(the_weight)
    return place.fetch(made) * 3


def a_call_that_is_waited_for(place: Place) -> torch.Tensor:
    return place.start(scaled, x * 3)()


def what_was_there(place: Place) -> torch.Tensor:
    return place.fetch(place.refer(twice_the_weight))


def a_value_twice(place: Place) -> torch.Tensor:
    made = place.make(scaled, x * 3)
    return place.fetch(made) * place.fetch(made)


def methods(place: Place) -> torch.Tensor:
    made = place.make(scaled, x * 3)
    return place.method(made, "mul", x) + place.fetch(place.make_by(made, "mul", 2))


def a_module(place: Place) -> torch.Tensor:
    return place.module()(x * 3)


def calls_within(place: Place) -> torch.Tensor:
    return place.call(nested, x * 3)


def quiet_calls_within(place: Place) -> torch.Tensor:
    return place.call(nested_quietly, x * 3)


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        *(a_call, many_results, a_quiet_function, a_function_for_inference, a_leaf, a_value, many_values),
        *(a_quiet_value, a_leaf_that_stays, a_leaf_made_quietly, a_value_twice, methods, a_module),
        *(calls_within, quiet_calls_within, a_call_that_is_waited_for, what_was_there),
    )
}
for mode in (torch.no_grad, torch.inference_mode):
    PROGRAMS |= {f"{mode.__name__} {name}": program for name, program in programs_of(mode).items()}


# Programs of which a part is outside any context: ``run`` is inside one.


def outside_a_call(place: Place) -> Program:
    found = place.call(scaled, x * 3)
    return lambda _: found


def outside_making(place: Place) -> Program:
    made = place.make(scaled, x * 3)
    return lambda place: place.fetch(made)


def outside_making_without_arguments(place: Place) -> Program:
    made = place.make(twice_the_weight)
    return lambda place: place.fetch(made)


def outside_a_module(place: Place) -> Program:
    found = place.module()(x * 3)
    return lambda _: found


def outside_a_quiet_call(place: Place) -> Program:
    with torch.no_grad():
        found = place.call(scaled, x * 3)
    return lambda _: found


def outside_making_quietly(place: Place) -> Program:
    with torch.no_grad():
        made = place.make(scaled, x * 3)
    return lambda place: place.fetch(made)


def outside_fetching(place: Place) -> Program:
    """On the owner this is the value itself."""
    made = place.make(twice_the_weight)
    found = place.fetch(made)
    return lambda _: found.detach()


REFUSED = {"error": "ForeignGraphError"}
OUTSIDE: dict[str, tuple[Callable[[Place], Program], dict[str, Any] | None]] = {
    "a call": (outside_a_call, REFUSED),
    "making": (outside_making, REFUSED),
    "making without arguments": (outside_making_without_arguments, None),
    "a module": (outside_a_module, REFUSED),
    "a quiet call": (outside_a_quiet_call, None),
    "making quietly": (outside_making_quietly, None),
    "fetching": (outside_fetching, None),
}

Results = dict[str, dict[str, Any]]


def run_at(to: int) -> Results:
    """All programs, each in a context of its own."""
    found = {}
    for name, program in [*PROGRAMS.items(), *((name, begin(At(to))) for name, (begin, _) in OUTSIDE.items())]:
        with bh.context() as context:
            try:
                found[name] = At(to, context).run(program)
            except bh.BackhaulError as error:
                found[name] = {"error": type(error).__name__}
    return found


def run_in_a_process() -> Results | None:
    return run_at(1) if bh.get_worker_info().id == 0 else None


@pytest.fixture(scope="module")
def found() -> dict[str, Results]:
    """By place."""
    with bh.cluster(2):
        places = {"here": run_at(0), "a worker": run_at(1)}
    return places | {"a process": bh.launch(run_in_a_process, 2, start_method="forkserver")[0]}


@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_do_not_depend_on_the_place(found: dict[str, Results], program: str) -> None:
    expected = Plain().run(PROGRAMS[program])
    assert {place: results[program] for place, results in found.items()} == dict.fromkeys(found, expected)


@pytest.mark.parametrize("program", OUTSIDE)
def test_nor_do_they_where_a_part_is_outside_of_contexts(found: dict[str, Results], program: str) -> None:
    begin, refused = OUTSIDE[program]
    expected = refused or Plain().run(begin(Plain()))
    assert {place: results[program] for place, results in found.items()} == dict.fromkeys(found, expected)


# Whose memory it is.


def add_one(value: torch.Tensor) -> torch.Tensor:
    return value.add_(1)


def is_required(value: torch.Tensor, parameter: torch.nn.Parameter) -> tuple[bool, bool]:
    return value.requires_grad, parameter.requires_grad


@pytest.mark.parametrize("to", [0, 1])
def test_arguments_and_results_are_copies(to: int) -> None:
    sent = torch.zeros(2)
    with bh.cluster(2):
        found = bh.rpc_sync(to, add_one, args=(sent,))
        made = bh.remote(to, add_one, args=(sent,))
        assert bh.rpc_sync(to, torch.clone, args=(found,)).add_(1).tolist() == [2.0, 2.0]
        assert made.rpc_sync().add_(1).add_(1).tolist() == [3.0, 3.0]
        assert made.to_here().tolist() == [2.0, 2.0]
    assert (sent.tolist(), found.tolist()) == ([0.0, 0.0], [1.0, 1.0])


def the_shared() -> list[torch.Tensor]:
    return shared


shared = [torch.zeros(1)]


def test_what_is_made_under_no_grad_is_the_value_itself() -> None:
    with bh.cluster(2), torch.no_grad():
        assert bh.remote(0, the_shared).to_here() is shared
        bh.remote(1, the_shared).rpc_sync().append(torch.ones(1))
    assert len(shared) == 2


def test_what_its_owner_fetches_is_the_value_itself() -> None:
    """Also under ``no_grad``: if it requires grad, the result is another tensor in the same memory."""
    plain, leaf = torch.zeros(2), vector(0.0)
    with bh.cluster(1):
        for value in (plain, leaf, object(), [leaf]):
            assert bh.RRef(value).to_here() is value
        with torch.no_grad():
            assert bh.RRef(plain).to_here() is plain
            fetched = bh.RRef(leaf).to_here()
            assert bh.RRef(leaf).local_value() is leaf
            assert not fetched.requires_grad
            fetched.add_(1)
    assert leaf.tolist() == [1.0]


@pytest.mark.parametrize("to", [0, 1])
def test_arguments_need_no_gradient_under_no_grad(to: int) -> None:
    """Except parameters, which are state."""
    with bh.cluster(2):
        assert bh.rpc_sync(to, is_required, args=(x, parameter)) == (True, True)
        with torch.no_grad():
            assert bh.rpc_sync(to, is_required, args=(x, parameter)) == (False, True)


@pytest.mark.parametrize("to", [0, 1])
def test_a_parameter_fetched_under_no_grad(to: int) -> None:
    """A leaf of its own, like a copied parameter; its gradient does not go back."""
    with bh.cluster(2) as workers, bh.context() as ctx:
        made = bh.remote(to, the_parameter)
        with torch.no_grad():
            found = made.to_here()
        ctx.backward((found * 3).sum())
        assert type(found) is torch.nn.Parameter
        assert ctx.grads[found].tolist() == [3.0, 3.0]
        assert not any(parameter in gradients_on(worker, ctx) for worker in workers)
