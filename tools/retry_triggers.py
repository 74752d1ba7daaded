"""The stages of a step made with ``retry_step`` at which a worker can die. ``arm_retry`` sets a trigger in that worker.

As in ``triggers``, a trigger patches the process of the worker and stays until the process ends.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from typing import Any, Literal

from backhaul._autograd.messages import AutogradKind
from backhaul._recovery import owner_snapshot
from backhaul._wire.messages import Kind
from backhaul.optim.local import Local
from backhaul.optim.step_on_owner import OwnedOptimizer
from tools import retried_training
from tools.fleet import die
from tools.triggers import _incoming, _outgoing, _unread

When = Literal["before", "middle", "after"]

_SNAPSHOT = owner_snapshot.__name__.encode()
_GRADIENTS = b"BkHl\1" + bytes([AutogradKind.GRADIENT])


def _at(place: Any, name: str, when: When, how: signal.Signals) -> None:
    """Die before or after a function of the worker runs."""
    run = getattr(place, name)

    def running(*args: Any, **kwargs: Any) -> Any:
        if when == "before":
            die(how)
        made = run(*args, **kwargs)
        if when == "after":
            die(how)
        return made

    setattr(place, name, running)


def _in_update(how: signal.Signals) -> None:
    """Die when one half of the parameters of the worker has been updated."""
    for place in (OwnedOptimizer, Local):
        step = place.step

        def stepping(self: Any, *args: Any, _step: Callable[..., Any] = step) -> Any:
            optimizer: Any = self._optimizer if isinstance(self, OwnedOptimizer) else self.optimizer
            for group in optimizer.param_groups:
                group["params"] = group["params"][: len(group["params"]) // 2]
            optimizer.step()
            die(how)
            return _step(self, *args)

        place.step = stepping  # type: ignore[assignment, method-assign]


def _around_update(when: When, how: signal.Signals) -> None:
    _at(OwnedOptimizer, "step", when, how)
    _at(Local, "step", when, how)


def _part(function: Callable[..., None], *args: Any) -> Callable[[signal.Signals], None]:
    return functools.partial(function, *args)


RETRY_STAGES: dict[str, Callable[[signal.Signals], None]] = {
    "request of the forward read": _part(_incoming, Kind.REQUEST, b"forward"),
    "forward begins": _part(_at, retried_training.ResidualLayer, "forward", "before"),
    "forward ends": _part(_at, retried_training.ResidualLayer, "forward", "after"),
    "gradients not read": _part(_unread, _GRADIENTS, 0.0),
    "gradients half read": _part(_unread, _GRADIENTS, 0.5),
    "gradients read": _part(_incoming, AutogradKind.GRADIENT, b""),
    "gradients sent: half": _part(_outgoing, AutogradKind.GRADIENT, "middle"),
    "gradients sent: after": _part(_outgoing, AutogradKind.GRADIENT, "after"),
    "update begins": _part(_around_update, "before"),
    "middle of the update": _in_update,
    "update ends": _part(_around_update, "after"),
    "snapshot asked for": _part(_incoming, Kind.REQUEST, _SNAPSHOT + b":save"),
    "snapshot half made": _part(_at, owner_snapshot, "pack", "after"),
    "snapshot made": _part(_at, owner_snapshot, "_checksum", "after"),
    "look at the state asked for": _part(_incoming, Kind.REQUEST, _SNAPSHOT + b":is_same"),
}
"""By name, in the order in which a step reaches them."""

RESTORE_STAGES: dict[str, Callable[[signal.Signals], None]] = {
    "restore asked for": _part(_incoming, Kind.REQUEST, _SNAPSHOT + b":install"),
    "restore half made": _part(_at, owner_snapshot, "unpack", "after"),
    "restore made": _part(_at, owner_snapshot, "_checksum", "after"),
    "options and state of an optimizer set": _part(_at, OwnedOptimizer, "set_up", "after"),
}
"""Stages that a survivor, or a worker that has taken the place of a lost one, reaches while the state is restored."""


def arm_retry(name: str, how: signal.Signals = signal.SIGKILL) -> None:
    """Make this process die, once, at a stage."""
    (RETRY_STAGES.get(name) or RESTORE_STAGES[name])(how)
