"""The one way from Python into PyTorch's engine: ``torch.autograd.backward`` and ``grad`` both go through it.

``Tensor.backward``, ``torch.autograd.backward`` and ``torch.autograd.grad`` call ``_engine_run_backward`` of
``torch.autograd.graph``. ``patches`` puts ``make_entry`` in its place while a worker runs. Knows nothing of workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backhaul._autograd.torch_engine.run import grad_writers

take: Callable[..., tuple[Any, ...] | None] = lambda *args, **kwargs: None  # noqa: E731
"""Takes over a backward pass, with the arguments of ``_engine_run_backward``, and returns what that would return. None:
the pass concerns only this process, and torch runs it. The room that runs passes over workers sets this.
"""


def make_entry(torch_entry: Callable[..., Any]) -> Callable[..., Any]:
    """The function that replaces ``torch_entry``."""

    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        taken = take(outputs, *args, **kwargs)
        if taken is not None:
            return taken
        with grad_writers:
            return torch_entry(outputs, *args, **kwargs)

    return run_backward
