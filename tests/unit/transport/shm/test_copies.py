"""Copies with helper threads that start in time, late, or not at all."""

from __future__ import annotations

import _thread
import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from backhaul._transport.shm import copies
from backhaul._wire.memory import Buffer, Recycler

KIB = 1 << 10
KINDS: list[Callable[[bytes], Buffer]] = [memoryview, bytes, bytearray]
SIZES = [300 * KIB, 512 * KIB, 1024 * KIB + 77, 4096 * KIB - 1]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Helpers from half a MiB on, on four processors."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.setattr(copies, "_PARALLEL_BYTES", 512 * KIB)
    monkeypatch.setattr(copies, "_PIECE_BYTES", 64 * KIB)


def copied(size: int, seed: int = 0) -> None:
    """Copy ``size`` bytes between others that must not change."""
    content = bytes((n * 7 + seed) % 251 for n in range(997)) * (size // 997 + 1)
    target = bytearray(size + 2 * KIB)
    block = (ctypes.c_ubyte * size).from_buffer(target, KIB)
    copies.copy_into(block, memoryview(content)[:size])
    assert target[KIB:-KIB] == content[:size]
    assert not any(target[:KIB])
    assert not any(target[-KIB:])


@pytest.mark.parametrize("size", SIZES)
def test_all_of_it_is_copied(size: int) -> None:
    for seed in range(20):
        copied(size, seed)


@pytest.mark.parametrize("sizes", [[], [0, 7], [300 * KIB], [9, 700 * KIB, 0, 1, 2048 * KIB + 3, 64 * KIB]])
def test_parts_are_joined(sizes: list[int]) -> None:
    contents = [bytes((n * 7 + size) % 251 for n in range(997)) * (size // 997 + 1) for size in sizes]
    parts = [kind(content[:size]) for kind, content, size in zip(KINDS * 6, contents, sizes, strict=False)]
    assert bytes(copies.join(parts, Recycler())) == b"".join(parts)


@pytest.mark.parametrize(("free", "expected"), [(4, 3), (3.5, 3), (3, 0), (0, 0), (-2, 0)])
def test_smaller_copies_have_helpers_where_processors_are_free(
    monkeypatch: pytest.MonkeyPatch, free: float, expected: int
) -> None:
    monkeypatch.setattr(copies, "_FREE_PARALLEL_BYTES", 256 * KIB)
    monkeypatch.setattr(copies, "_PARALLEL_BYTES", 1 << 40)
    monkeypatch.setattr(copies.PROCESSORS, "free", lambda: free)
    helped: list[Callable[..., None]] = []

    def start(function: Callable[..., None], args: tuple[Any, ...]) -> None:
        helped.append(function)
        function(*args)

    monkeypatch.setattr(_thread, "start_new_thread", start)
    for size in SIZES:
        helped.clear()
        copied(size)
        assert len(helped) == expected
    helped.clear()
    copied(200 * KIB)
    assert helped == []


def test_nobody_waits_for_a_helper_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
    monkeypatch.setattr(_thread, "start_new_thread", lambda function, args: late.append((function, args)))
    copied(SIZES[-1])
    moved = threading.Event()
    monkeypatch.setattr(ctypes, "memmove", lambda *_: moved.set())
    for function, args in late:
        function(*args)
    assert len(late) == 3
    assert not moved.is_set()


def test_it_does_without_helpers_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    copied(SIZES[-1])


def test_a_copy_that_is_broken_off_leaves_nobody_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    caller, begun, ended = threading.get_ident(), list[Any](), list[Any]()
    at_it = threading.Event()
    real = ctypes.memmove

    def move(*args: Any) -> None:
        if threading.get_ident() == caller:
            at_it.wait(10)
            raise KeyboardInterrupt
        begun.append(args)
        at_it.set()
        real(*args)
        ended.append(args)

    monkeypatch.setattr(ctypes, "memmove", move)
    with pytest.raises(KeyboardInterrupt):
        copied(SIZES[-1])
    assert sorted(begun) == sorted(ended) != []
