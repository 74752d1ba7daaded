"""The one way from Python into PyTorch's engine: ``torch.autograd.backward`` and ``grad`` both go through it.

``Tensor.backward``, ``torch.autograd.backward`` and ``torch.autograd.grad`` call ``_engine_run_backward`` of
``torch.autograd.graph``. ``patches`` puts ``make_entry`` in its place while a worker runs. Knows nothing of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from backhaul._autograd.torch_engine.run import engine_runs, grad_writers
from backhaul._runtime.compile_marks import not_compiled
from backhaul._torch_support import NEWEST, OLDEST
from backhaul.errors import UnsupportedTorchError

take: Callable[..., tuple[Any, ...] | None] = lambda *args, **kwargs: None  # noqa: E731
"""Takes over a backward pass, with the arguments of ``_engine_run_backward``, and returns what that would return. None:
the pass concerns only this process, and torch runs it. ``plain_backward`` sets this.
"""

_probes: dict[int, _Probe] = {}  # by id of the root of a pass that only looks whether it comes through here


def make_entry(torch_entry: Callable[..., Any]) -> Callable[..., Any]:
    """The function that replaces ``torch_entry``."""

    @not_compiled
    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if _probes and outputs and (probe := _probes.get(id(outputs[0]))) is not None:
            return probe.enter(outputs, *args, **kwargs)
        taken = take(outputs, *args, **kwargs)
        if taken is not None:
            return taken
        with grad_writers, engine_runs:
            return torch_entry(outputs, *args, **kwargs)

    return run_backward


class _Probe:
    """A backward pass of one node that only looks whether it enters the engine by ``make_entry``."""

    def __init__(self) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            self.leaf = torch.zeros((), device="cpu", requires_grad=True)
            self.root = self.leaf * 2
        self._answer = torch.zeros((), device="cpu")
        self._entered: Any = None

    def enter(  # noqa: PLR0917 (torch's signature)
        self,
        outputs: Sequence[Any],
        seeds: Sequence[Any],
        retain: bool | None,
        create: bool,
        inputs: Sequence[Any] = (),
        allow_unreachable: bool = True,
        accumulate_grad: bool = True,
    ) -> tuple[Any, ...]:
        """What ``take`` does with the same arguments."""
        self._entered = len(outputs), len(seeds), retain, create, list(map(id, inputs)), accumulate_grad
        return () if accumulate_grad else (self._answer,)

    def enters(self, way: Callable[[_Probe], Any], *, wanted: bool) -> bool:
        """Whether a function of torch comes here. ``wanted``: it asks for the gradient of the leaf."""
        _probes[id(self.root)] = self
        try:
            found = way(self)
        except Exception:  # torch gives other arguments, or takes another answer
            return False
        finally:
            del _probes[id(self.root)]
        if self._entered != (1, 1, False, False, [id(self.leaf)] if wanted else [], not wanted):
            return False
        return found is None if not wanted else found[0] is self._answer


_WAYS: Mapping[str, tuple[Callable[[_Probe], Any], bool]] = {
    "torch.Tensor.backward": (lambda probe: probe.root.backward(), False),
    "torch.autograd.backward": (lambda probe: torch.autograd.backward(probe.root), False),
    "torch.autograd.grad": (lambda probe: torch.autograd.grad(probe.root, probe.leaf), True),
}


def missed() -> tuple[str, ...]:
    """The functions of torch whose backward passes Backhaul could not take over. Takes some 100 us."""
    return tuple(name for name, (way, wanted) in _WAYS.items() if not _Probe().enters(way, wanted=wanted))


def require() -> None:
    """Check that every backward pass of this process comes here.

    Raises:
        UnsupportedTorchError: Some do not. Gradients of other workers would be missing without an error.
    """
    names = missed()
    if not names:
        return
    tested = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)
    raise UnsupportedTorchError(
        f"{', '.join(names)} of torch {torch.__version__} cannot run backward passes over workers: they do not call "
        "torch.autograd.graph._engine_run_backward as Backhaul expects. Either this torch is not supported (tested "
        f"versions are {tested}), or other code has replaced these functions: install a tested torch, start the "
        'worker before that code, or give Options(autograd="context") and use bh.context() with bh.backward()',
        torch_version=torch.__version__,
        missing=names,
    )
