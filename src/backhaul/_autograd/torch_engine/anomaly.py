"""Anomaly mode (``torch.autograd.detect_anomaly``) over all workers of a pass, and of the calls of a context.

torch has one switch for the whole process. So a pass does not touch it: the nodes that it runs get hooks, which look
for NaN as the engine does and know which node has failed. Only while a handler runs for a caller in anomaly mode is
torch's own switched on, since nothing else makes it note where nodes come from.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch

from backhaul._autograd.torch_engine.hooks import own_hook
from backhaul._autograd.torch_engine.run import Node

OFF, ON, CHECK_NAN = 0, 1, 2
"""Levels: off, on with ``check_nan=False``, on."""

_TRACE, _PARENT = "traceback_", "parent_"  # under which torch keeps, with a node, where it comes from


def level() -> int:
    """The level of what runs here: that of the caller in a handler that holds torch's switch, else the program's."""
    if not (torch.is_anomaly_enabled() or _switch.moved):
        return OFF
    return _switch.level() if not _switch.held_only else _handled.get()


def hold_for_handler(level: int) -> Hold:
    """Switch anomaly mode on for a handler that is about to run in this context of execution."""
    _handled.set(level)
    return _switch.hold(level)


_handled: contextvars.ContextVar[int] = contextvars.ContextVar("backhaul_anomaly", default=OFF)


def watching(nodes: Iterable[Node], level: int) -> contextlib.AbstractContextManager[object]:
    """While inside, this thread runs these nodes in anomaly mode."""
    return _WatchedPass(nodes, level) if level else _UNWATCHED


_UNWATCHED = contextlib.nullcontext()


class StopEngine(Exception):
    """Raised in a hook to stop the engine: nothing has gone wrong. torch's anomaly mode tells of an error on the way if
    the switch is on then; see ``begin_stop``.
    """


class _WatchedPass(contextlib.AbstractContextManager[None]):
    def __init__(self, nodes: Iterable[Node], level: int) -> None:
        self._thread = threading.get_ident()  # others may run the same nodes, in passes of their own
        self._running: Node = None  # the node that was begun last
        self._handles: list[Any] = []
        for node in nodes:
            self._handles.append(node.register_prehook(own_hook(functools.partial(self._begin, node))))
            if level == CHECK_NAN:
                self._handles.append(node.register_hook(own_hook(functools.partial(self._check, node))))

    def _begin(self, node: Node, grads: object) -> None:
        if self._thread == threading.get_ident():
            self._running = node

    def _check(self, node: Node, grads: Sequence[torch.Tensor | None], _: object) -> None:
        """As the engine does it, in its words."""
        if self._thread != threading.get_ident():
            return
        with torch.no_grad():
            for number, grad in enumerate(grads):
                if grad is not None and torch._is_any_true(torch.isnan(grad)).item():
                    raise RuntimeError(f"Function '{node.name()}' returned nan values in its {number}th output.")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        if isinstance(error, Exception) and not isinstance(error, StopEngine) and self._running is not None:
            for line in _origins(self._running):
                error.add_note(line)
        self._running = None


def _origins(node: Node) -> Iterator[str]:
    """Where a node comes from; where it was made by a backward function, where that comes from, too."""
    found = node.metadata.get(_TRACE)
    if found is None:
        yield (
            f"Error detected in {node.name()}. No forward pass information available. Enable detect anomaly during "
            "forward pass for more information."
        )
    else:
        yield f"Error detected in {node.name()}. Traceback of forward call that caused the error:\n{''.join(found)}"
    while (node := node.metadata.get(_PARENT)) is not None and (found := node.metadata.get(_TRACE)) is not None:
        yield (
            f"Previous calculation was induced by {node.name()}. Traceback of forward call that induced the previous "
            f"calculation:\n{''.join(found)}"
        )


class _Switch:
    """torch's own switch. Thread-safe.

    It is on while anybody holds it, and off while the engine is being stopped. The program may use it at the same time:
    what the program has switched on stays on, and what it has switched off stays off. Where a block of the program
    begins on another thread while the switch is held, and ends later, the switch is left as if two threads of one
    program had used such blocks.
    """

    def __init__(self) -> None:
        self.moved = False  # whether the engine was ever stopped while it was on
        self._lock = threading.Lock()  # guards what follows
        self._holders = 0
        self._ours = False  # it was off when one of them came
        self._stopping = 0
        self._before = OFF  # while stopping: where it was, and will be

    @property
    def held_only(self) -> bool:
        """Whether it is on for handlers alone, and the program has not switched it on."""
        return self._ours

    def level(self) -> int:
        """Where it is, but for being stopped."""
        with self._lock:
            return self._level()

    def _level(self) -> int:
        if self._stopping:
            return self._before
        if not torch.is_anomaly_enabled():
            return OFF
        return CHECK_NAN if torch.is_anomaly_check_nan_enabled() else ON

    def _set(self, level: int) -> None:
        if self._stopping:
            self._before = level
        else:
            torch.set_anomaly_enabled(level != OFF, level != ON)

    def hold(self, level: int) -> Hold:
        """Switch it on, until ``release`` of what is returned."""
        with self._lock:
            self._holders += 1
            now = self._level()
            if now == OFF or (self._ours and level > now):
                self._ours = True
                self._set(level)
        return Hold(self)

    def let_go(self) -> None:
        """One holder less."""
        with self._lock:
            self._holders -= 1
            if not self._holders and self._ours:
                self._ours = False
                self._set(OFF)

    def begin_stop(self) -> bool:
        """A hook is about to raise ``StopEngine``. Returns whether ``end_stop`` must follow once the engine is over."""
        if not (torch.is_anomaly_enabled() or self.moved) or self.level() == OFF:
            return False
        self.moved = True
        with self._lock:
            if not self._stopping:
                self._before = self._level()
                torch.set_anomaly_enabled(False, True)
            self._stopping += 1
        return True

    def end_stop(self) -> None:
        """Undo ``begin_stop``."""
        with self._lock:
            self._stopping -= 1
            if not self._stopping:
                self._set(self._before)


class Hold:
    """That torch's switch is on."""

    def __init__(self, switch: _Switch) -> None:
        self._switch: _Switch | None = switch
        self._lock = threading.Lock()  # guards it

    def release(self) -> None:
        """It need not be any more; counts once."""
        with self._lock:
            held, self._switch = self._switch, None
        if held is not None:
            held.let_go()


_switch = _Switch()
begin_stop, end_stop = _switch.begin_stop, _switch.end_stop
