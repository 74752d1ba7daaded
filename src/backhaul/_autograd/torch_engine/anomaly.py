"""Anomaly mode (``torch.autograd.detect_anomaly``) on all workers of a pass, and for the calls of a context.

Torch has one switch for the whole process, so a pass does not touch it. Instead, the nodes that the pass runs get
hooks, which look for NaN as the engine does and know which node has failed. Torch's own switch is on only while a
handler runs for a caller in anomaly mode: nothing else makes torch note where nodes come from.
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
"""Levels of anomaly mode: off, on with ``check_nan=False``, on."""

_TRACE, _PARENT = "traceback_", "parent_"  # keys in a node's metadata: where torch notes its origin


def level() -> int:
    """The level that holds here: the caller's in a handler that holds torch's switch, else the program's."""
    if not (torch.is_anomaly_enabled() or _switch.moved):
        return OFF
    return _switch.level() if not _switch.held_only else _handled.get()


def hold_for_handler(level: int) -> Hold:
    """Switch anomaly mode on for a handler that is about to run with these context variables."""
    _handled.set(level)
    return _switch.hold(level)


_handled: contextvars.ContextVar[int] = contextvars.ContextVar("backhaul_anomaly", default=OFF)


def watching(nodes: Iterable[Node], level: int) -> contextlib.AbstractContextManager[object]:
    """A context manager: inside, this thread runs these nodes in anomaly mode."""
    return _WatchedPass(nodes, level) if level else _UNWATCHED


_UNWATCHED = contextlib.nullcontext()


class StopEngine(Exception):
    """A hook raises this to stop the engine; nothing has gone wrong. If torch's switch is on, torch prints an error
    nevertheless; see ``begin_stop``.
    """


class _WatchedPass(contextlib.AbstractContextManager[None]):
    """Nodes with hooks that look for NaN. If one of them fails, the error says where the node comes from."""

    def __init__(self, nodes: Iterable[Node], level: int) -> None:
        self._thread = threading.get_ident()  # other threads may run the same nodes in other passes
        self._running: Node = None  # the node that began last
        self._handles: list[Any] = []
        for node in nodes:
            self._handles.append(node.register_prehook(own_hook(functools.partial(self._begin, node))))
            if level == CHECK_NAN:
                self._handles.append(node.register_hook(own_hook(functools.partial(self._check, node))))

    def _begin(self, node: Node, grads: object) -> None:
        if self._thread == threading.get_ident():
            self._running = node

    def _check(self, node: Node, grads: Sequence[torch.Tensor | None], _: object) -> None:
        """Look for NaN as the engine does; the text of the error is the engine's."""
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
    """Where a node comes from. If a backward function made the node, also where that function's node comes from."""
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
    """Torch's own switch. Thread-safe.

    The switch is on while a handler holds it, and off while a hook stops the engine. The program may use the switch at
    the same time: what the program has switched on stays on, and what it has switched off stays off. If a
    ``detect_anomaly`` block of the program begins on another thread while a handler holds the switch, and ends later,
    the switch is left as if two threads of the program had used such blocks.
    """

    def __init__(self) -> None:
        self.moved = False  # whether a hook has ever stopped the engine while the switch was on
        self._lock = threading.Lock()  # guards what follows
        self._holders = 0
        self._ours = False  # the switch was off when a holder came
        self._stopping = 0
        self._before = OFF  # while a hook stops the engine: the level to go back to

    @property
    def held_only(self) -> bool:
        """Whether the switch is on only for handlers: the program has not switched it on."""
        return self._ours

    def level(self) -> int:
        """The level of the switch; while a hook stops the engine, the level before."""
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
        """Switch it on, until ``Hold.release``."""
        with self._lock:
            self._holders += 1
            now = self._level()
            if now == OFF or (self._ours and level > now):
                self._ours = True
                self._set(level)
        return Hold(self)

    def drop_hold(self) -> None:
        """A holder no longer needs the switch."""
        with self._lock:
            self._holders -= 1
            if not self._holders and self._ours:
                self._ours = False
                self._set(OFF)

    def begin_stop(self) -> bool:
        """A hook is about to raise ``StopEngine``: switch anomaly mode off, so that torch prints nothing. Returns
        whether ``end_stop`` must follow after the engine has stopped.
        """
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
    """Keeps torch's switch on until ``release``."""

    def __init__(self, switch: _Switch) -> None:
        self._switch: _Switch | None = switch
        self._lock = threading.Lock()  # guards _switch

    def release(self) -> None:
        """Let the switch go back; only the first call has an effect."""
        with self._lock:
            held, self._switch = self._switch, None
        if held is not None:
            held.drop_hold()


_switch = _Switch()
begin_stop, end_stop = _switch.begin_stop, _switch.end_stop
