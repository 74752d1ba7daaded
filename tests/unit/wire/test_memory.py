"""A block is reused as soon as nothing refers to it, and never before."""

from __future__ import annotations

import gc
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from backhaul._wire.memory import Buffer, Recycler

LARGE = 1 << 20


@pytest.fixture(autouse=True)
def without_gc() -> Iterator[None]:
    """Turn the garbage collector off: blocks must come back by reference counts alone."""
    gc.disable()
    yield
    gc.enable()


def address(block: Buffer) -> int:
    return torch.frombuffer(block, dtype=torch.uint8).data_ptr()


def fill(block: Buffer, value: int) -> None:
    torch.frombuffer(block, dtype=torch.uint8).fill_(value)


@pytest.mark.parametrize("size", [0, 1, 4096, 128 * 1024 - 1, 128 * 1024, 128 * 1024 + 1, 1_234_567, 5 << 20])
def test_a_block_has_the_size_asked_for_and_can_be_written(size: int) -> None:
    block = Recycler().allocate(size)
    view = memoryview(block).cast("B")
    assert len(block) == view.nbytes == size
    view[:] = b"\xa5" * size
    assert bytes(view) == b"\xa5" * size


def test_a_dropped_block_is_used_again() -> None:
    recycler = Recycler()
    block = recycler.allocate(LARGE)
    where = address(block)
    assert recycler.kept == 0
    del block
    assert recycler.kept >= LARGE
    assert address(recycler.allocate(LARGE)) == where


def test_a_block_in_use_is_not_counted_as_kept() -> None:
    recycler = Recycler()
    del_me = recycler.allocate(LARGE)
    del del_me
    block = recycler.allocate(LARGE)
    assert recycler.kept == 0
    assert len(block) == LARGE


def test_sizes_that_differ_a_little_share_a_block() -> None:
    recycler = Recycler()
    block = recycler.allocate(LARGE)
    where = address(block)
    del block
    smaller = recycler.allocate(LARGE - 100)
    assert address(smaller) == where
    assert len(smaller) == LARGE - 100


def test_a_used_block_is_never_too_small() -> None:
    recycler = Recycler()
    del_me = recycler.allocate(LARGE)
    del del_me
    block = recycler.allocate(4 * LARGE)
    assert memoryview(block).nbytes == 4 * LARGE
    fill(block, 1)


def _as_tensor(block: Buffer) -> torch.Tensor:
    return torch.frombuffer(block, dtype=torch.uint8)


def _saved_for_backward(block: Buffer) -> Any:
    weight = torch.ones(LARGE // 4, requires_grad=True)
    return (weight * torch.frombuffer(block, dtype=torch.float32)).grad_fn


HOLDERS: dict[str, Callable[[Buffer], Any]] = {
    "memoryview": memoryview,
    "slice": lambda block: memoryview(block)[10:20],
    "cast": lambda block: memoryview(block).cast("B").cast("d"),
    "readonly": lambda block: memoryview(block).toreadonly(),
    "tensor": _as_tensor,
    "tensor of floats": lambda block: torch.frombuffer(block, dtype=torch.float32),
    "tensor on a slice": lambda block: torch.frombuffer(memoryview(block)[64:128], dtype=torch.uint8),
    "view": lambda block: _as_tensor(block).view(-1, 4).t(),
    "element": lambda block: _as_tensor(block)[-1],
    "other dtype": lambda block: _as_tensor(block).view(torch.int64)[5:6],
    "detached": lambda block: _as_tensor(block).detach(),
    "expanded": lambda block: _as_tensor(block)[:1].expand(100),
    "storage": lambda block: _as_tensor(block).untyped_storage(),
    "set": lambda block: torch.empty(0).set_(_as_tensor(block).untyped_storage(), 3, (2,), (1,)),
    "parameter": lambda block: torch.nn.Parameter(torch.frombuffer(block, dtype=torch.float32)),
    "graph": _saved_for_backward,
    "array": lambda block: np.frombuffer(block, dtype=np.uint8),
    "array of a view": lambda block: _as_tensor(block)[1000:1001].numpy(),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_block_is_kept_from_use_by_whatever_refers_to_its_memory(name: str) -> None:
    recycler = Recycler()
    block = recycler.allocate(LARGE)
    where = address(block)
    holder = HOLDERS[name](block)
    del block
    assert recycler.kept == 0
    others = [recycler.allocate(LARGE) for _ in range(3)]
    for other in others:
        assert address(other) + LARGE <= where or where + LARGE <= address(other)
    del holder
    assert recycler.kept >= LARGE
    assert address(recycler.allocate(LARGE)) == where


def test_the_last_of_several_holders_decides() -> None:
    recycler = Recycler()
    block = recycler.allocate(LARGE)
    tensor = torch.frombuffer(block, dtype=torch.uint8)
    row, view = tensor[100:200], memoryview(block)
    del block, tensor
    assert recycler.kept == 0
    del view
    assert recycler.kept == 0
    del row
    assert recycler.kept >= LARGE


def test_blocks_outlive_their_recycler() -> None:
    recycler = Recycler()
    tensor = torch.frombuffer(recycler.allocate(LARGE), dtype=torch.uint8).fill_(7)
    del recycler
    others = [Recycler().allocate(LARGE) for _ in range(3)]
    for other in others:
        fill(other, 9)
    assert int(tensor.min()) == int(tensor.max()) == 7


def test_no_more_is_kept_than_allowed() -> None:
    recycler = Recycler(keep=4 * LARGE)
    blocks = [recycler.allocate(LARGE) for _ in range(8)]
    while blocks:
        blocks.pop()
        assert recycler.kept <= 4 * LARGE
    assert recycler.kept == 4 * LARGE


def test_the_largest_blocks_are_let_go_first() -> None:
    recycler = Recycler(keep=4 * LARGE)
    blocks = [recycler.allocate(size) for size in (4 * LARGE, LARGE, LARGE)]
    blocks.clear()
    assert recycler.kept == 2 * LARGE


@pytest.mark.parametrize("keep", [0, LARGE - 1])
def test_a_block_larger_than_allowed_is_not_kept(keep: int) -> None:
    recycler = Recycler(keep=keep)
    block = recycler.allocate(LARGE)
    del block
    assert recycler.kept == 0


class Use(RuleBasedStateMachine):
    """Threads take, share and drop blocks in any order. No thread may see its block change."""

    def __init__(self) -> None:
        super().__init__()
        self.recycler = Recycler(keep=LARGE)
        self.alive: list[tuple[int, torch.Tensor]] = []
        self.number = 0

    @rule(size=st.sampled_from([1, 130_000, 131_072, 200_000, 262_144, 300_000, 700_000, LARGE]))
    def take(self, size: int) -> None:
        self.number += 1
        tensor = torch.frombuffer(self.recycler.allocate(size), dtype=torch.uint8)
        assert tensor.numel() == size
        self.alive.append((self.number % 251, tensor.fill_(self.number % 251)))

    @rule(data=st.data())
    def keep_only_a_view(self, data: st.DataObject) -> None:
        if self.alive:
            index = data.draw(st.integers(0, len(self.alive) - 1))
            value, tensor = self.alive[index]
            start = data.draw(st.integers(0, tensor.numel() - 1))
            self.alive[index] = value, tensor[start : start + 1000]

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if self.alive:
            self.alive.pop(data.draw(st.integers(0, len(self.alive) - 1)))

    @invariant()
    def nobody_else_wrote(self) -> None:
        for value, tensor in self.alive:
            assert set(tensor[::997].tolist()) == {value}  # another owner would have overwritten all of it

    @invariant()
    def no_more_is_kept_than_allowed(self) -> None:
        assert self.recycler.kept <= LARGE


Use.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestUse = Use.TestCase


def test_many_threads_share_a_recycler() -> None:
    recycler = Recycler(keep=4 * LARGE)
    handed_over: queue.SimpleQueue[tuple[int, torch.Tensor]] = queue.SimpleQueue()
    wrong: list[str] = []
    sizes = [130_000, 200_000, 300_000, 400_000]

    def work(number: int) -> None:
        for turn in range(150):
            value = (number * 37 + turn) % 256
            tensor = torch.frombuffer(recycler.allocate(sizes[turn % 4]), dtype=torch.uint8).fill_(value)
            handed_over.put((value, tensor[turn:]))
            del tensor
            expected, other = handed_over.get()  # never empty: each thread puts before it gets
            if int(other.min()) != expected or int(other.max()) != expected:
                wrong.append(f"{expected} became {other.min()}..{other.max()}")
            del other

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
    assert handed_over.empty()
    assert 0 < recycler.kept <= 4 * LARGE
