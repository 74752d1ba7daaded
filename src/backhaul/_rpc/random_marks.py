"""Which random states the program holds, and what other workers must do so that restoring one reaches them too.

``torch.utils.checkpoint`` takes the random state, runs a function, and later restores the state to run the function
again. Calls in that function may draw random numbers on other workers. So a worker keeps the states that its callers
may restore. This module does no I/O; ``random_states`` puts what it decides on calls.

A *mark* is a state of this process that the program holds: a tensor of ``torch.get_rng_state``. A *state* is one of
another worker. Both are numbers. Each call begins a new state, since it may draw numbers.
"""

from __future__ import annotations

import collections
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch

from backhaul._runtime.compile_marks import graph_break
from backhaul._runtime.worker_patches import while_workers_run
from backhaul._wire.messages import prepare

NONE = -1


class RandomNote(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What a worker does with its random state before it runs the function of a request: first it drops, then it keeps,
    then it restores.
    """

    keep: int = NONE  # the number under which it keeps its state
    restore: int = NONE  # the number of the state that it goes back to
    drop: tuple[int, ...] = ()  # numbers of states that nobody will restore


prepare(RandomNote)


class PeerStates:
    """The random states of one other worker. Pure. The caller holds the lock of ``RandomMarks``."""

    __slots__ = ("_actual", "_held", "_kept", "_numbers", "_wanted")

    def __init__(self, marks: Iterable[int]) -> None:
        self._numbers = itertools.count()
        self._actual = self._wanted = next(self._numbers)  # the state there, and the one before the next call
        self._held = dict.fromkeys(marks, self._actual)  # for each mark, the state that goes with it
        self._kept: set[int] = set()

    def take(self, mark: int) -> None:
        """The program has taken its random state."""
        self._held[mark] = self._wanted

    def restore(self, mark: int) -> None:
        """The program has restored its random state."""
        self._wanted = self._held.get(mark, self._wanted)

    def drop(self, mark: int) -> None:
        """The program cannot restore this state any more."""
        self._held.pop(mark, None)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to say with the next call, whatever the program does."""
        return not self._held and not self._kept and self._wanted == self._actual

    def call(self) -> RandomNote | None:
        """A call goes to the worker. Returns what goes with it."""
        needed = set(self._held.values())
        keep = self._actual if self._actual in needed and self._actual not in self._kept else NONE
        restore = self._wanted if self._wanted != self._actual else NONE
        drop = tuple(self._kept - needed - {restore})
        self._kept.difference_update(drop)
        if keep != NONE:
            self._kept.add(keep)
        self._actual = self._wanted = next(self._numbers)
        return RandomNote(keep, restore, drop) if drop or (keep, restore) != (NONE, NONE) else None


class RandomMarks:
    """The marks of this process, and the workers that its workers have called since the first of them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all but _over
        self._numbers = itertools.count()
        self._marks: dict[int, tuple[int, Callable[[], torch.Tensor | None]]] = {}  # by the id of the tensor
        self._over: collections.deque[tuple[int, int]] = collections.deque()  # marks that destructors have ended
        self._peers: dict[tuple[str, str], PeerStates] = {}  # by the incarnations of caller and callee

    @property
    def any(self) -> bool:
        """Whether a call may need a note."""
        return bool(self._marks or self._peers)

    def take(self, state: torch.Tensor) -> None:
        """The program has taken the random state of this process."""
        with self._lock:
            self._end_marks()
            mark, key = next(self._numbers), id(state)
            over = functools.partial(self._note_over, key, mark)
            self._marks[key] = mark, weakref.ref(state, over)
            for peer in self._peers.values():
                peer.take(mark)

    def _note_over(self, key: int, mark: int, reference: object) -> None:
        self._over.append((key, mark))

    def restore(self, state: torch.Tensor) -> None:
        """The program has restored a random state of this process."""
        with self._lock:
            self._end_marks()
            mark, found = self._marks.get(id(state), (NONE, lambda: None))
            if found() is state:
                for peer in self._peers.values():
                    peer.restore(mark)

    def call(self, caller: str, callee: str) -> RandomNote | None:
        """One worker calls another; both are given by their incarnation."""
        with self._lock:
            self._end_marks()
            peer = self._peers.get((caller, callee))
            if peer is None:
                if not self._marks:
                    return None
                peer = self._peers[caller, callee] = PeerStates(mark for mark, _ in self._marks.values())
            note = peer.call()
            if peer.idle:
                del self._peers[caller, callee]
            return note

    def forget(self, caller: str, callee: str) -> None:
        """A worker is gone, or has ended."""
        with self._lock:
            self._peers.pop((caller, callee), None)

    def forget_calls_of(self, caller: str) -> None:
        """A worker of this process has ended."""
        with self._lock:
            for pair in [pair for pair in self._peers if pair[0] == caller]:
                del self._peers[pair]

    def _end_marks(self) -> None:
        while self._over:
            key, mark = self._over.popleft()
            if self._marks.get(key, (NONE,))[0] == mark:
                del self._marks[key]
            for pair, peer in list(self._peers.items()):
                peer.drop(mark)
                if peer.idle:
                    del self._peers[pair]


marks = RandomMarks()

_undo: list[Callable[[], None]] = []


def _install() -> None:
    if _undo:
        return
    take, restore = torch.random.get_rng_state, torch.random.set_rng_state

    @functools.wraps(take)
    def get_rng_state() -> torch.Tensor:
        state = take()
        marks.take(state)
        return state

    @functools.wraps(restore)
    def set_rng_state(new_state: torch.Tensor) -> None:
        restore(new_state)
        marks.restore(new_state)

    for function, original in ((get_rng_state, take), (set_rng_state, restore)):
        for module in (torch, torch.random):
            _replace(module, original, graph_break(function))


def _replace(module: Any, original: Callable[..., Any], function: Callable[..., Any]) -> None:
    name = original.__name__
    if getattr(module, name) is not original:
        return  # another library has replaced it
    setattr(module, name, function)

    def undo() -> None:
        if getattr(module, name) is function:
            setattr(module, name, original)

    _undo.append(undo)


def _uninstall() -> None:
    while _undo:
        _undo.pop()()


while_workers_run(_install, _uninstall)
