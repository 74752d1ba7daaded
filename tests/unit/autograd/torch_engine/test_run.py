"""What is done with parts of torch that are not public."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from backhaul._autograd.torch_engine.graph_task import GraphTask
from backhaul._autograd.torch_engine.run import OfRun, run_engine


def test_a_task_is_entered_again_and_again() -> None:
    task = GraphTask(1, set)
    before = sys.getrefcount(task)
    for _ in range(10):
        with task:
            pass
    assert sys.getrefcount(task) == before


def test_a_run_within_a_run_has_a_value_of_its_own() -> None:
    run: OfRun[str] = OfRun()
    seen: list[str | None] = [run.get()]
    run.begin("outer")
    run.begin("inner")
    other = threading.Thread(target=lambda: seen.append(run.get()))
    other.start()
    other.join()
    seen.append(run.get())
    run.end()
    seen.append(run.get())
    run.end()
    assert [*seen, run.get()] == [None, None, "inner", "outer", None]


@pytest.mark.parametrize("before", [True, False])
def test_the_engine_uses_no_threads_in_a_pass_and_may_after_it(before: bool) -> None:
    def hook(_: torch.Tensor) -> None:
        seen.append(torch._C._is_multithreading_enabled())
        if len(seen) == 2:
            raise ValueError("refused")

    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(hook)
    y = x * 2
    with torch.autograd.set_multithreading_enabled(before):
        edges, seeds = [get_gradient_edge(y)], [torch.ones(2)]
        run_engine(edges, seeds, [x], retain=True, create=False)
        assert torch._C._is_multithreading_enabled() == before
        with pytest.raises(ValueError, match="refused"):
            run_engine(edges, seeds, [x], retain=True, create=False)
        assert torch._C._is_multithreading_enabled() == before
    assert seen == [False, False]
