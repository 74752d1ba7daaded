"""Functions and tensors that Ray would send with a loss: of the state in globals, or of the graph."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from backhaul.errors import SerializationError
from backhaul.ray.shipped_functions import refuse_shipped_state
from backhaul.ray.worker_actor import refuse_graphs

seen: list[int] = []
keep = lambda value: seen.append(value) or value  # noqa: E731 (a lambda goes by value)
double = lambda value: 2 * value  # noqa: E731


def keep_by_name(value: int) -> None:
    seen.append(value)


@pytest.mark.parametrize("function", [keep, functools.partial(keep, 1)])
def test_state_in_globals_is_refused(function: Any) -> None:
    with pytest.raises(SerializationError):
        refuse_shipped_state([math.sqrt, function])


@pytest.mark.parametrize("value", [keep_by_name, double, functools.partial(double, 1), math.sqrt, 3, "text"])
def test_everything_else_is_left_to_ray(value: Any) -> None:
    refuse_shipped_state([value])


def test_tensors_with_a_graph_are_refused() -> None:
    leaf = torch.ones(2, requires_grad=True)
    refuse_graphs({"leaf": leaf, "plain": [torch.ones(2), leaf.detach() * 2]}, "it")
    with pytest.raises(ValueError):
        refuse_graphs({"deep": [(leaf * 2,)]}, "it")
