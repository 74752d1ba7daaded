"""The protocol of a rendezvous: processes that arrive, die and are restarted in any order, at a store in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul._rpc.cluster.generations import (
    AddToKey,
    AwaitKeys,
    GetKeys,
    Participant,
    SetKey,
    Steps,
    SupersededError,
    add_member,
    agree_on_secret,
    find_members,
    follow,
    lead,
)


class Memory:
    """A store in memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.rounds = 0  # waits that ended without the keys

    def carry_out(self, operation: Any) -> tuple[bool, Any]:
        """Whether the process need not wait, and the answer."""
        match operation:
            case AddToKey(key, amount):
                self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
                return True, int(self.values[key])
            case SetKey(key, value):
                self.values[key] = value
                return True, None
            case GetKeys(keys) | AwaitKeys(keys):
                there = all(key in self.values for key in keys)
                found = [self.values[key] for key in keys] if there else None
                return there or isinstance(operation, GetKeys), found
        raise AssertionError(operation)


class Process:
    """One process: carries out one operation at a time."""

    def __init__(self, steps: Steps[Any], token: str = "") -> None:
        self.token = token
        self.result: Any = None
        self.error: Exception | None = None
        self.over = False
        self._steps = steps
        self._operation: Any = None
        self._advance(lambda: next(steps))

    def step(self, memory: Memory, *, impatient: bool = False) -> bool:
        """Whether anything happened. ``impatient``: what it waits for takes a while."""
        if self.over:
            return False
        ready, answer = memory.carry_out(self._operation)
        if not ready and not impatient:
            return False
        self._advance(lambda: self._steps.send(answer))
        return True

    def _advance(self, resume: Callable[[], Any]) -> None:
        try:
            self._operation = resume()
        except StopIteration as end:
            self.over, self.result = True, end.value
        except SupersededError as error:
            self.over, self.error = True, error


_tokens = itertools.count()


def start(rank: int, size: int) -> Process:
    own = Participant(f"{rank}:{next(_tokens)}", size, msgspec.Raw(b"%d" % rank))
    return Process(lead(own) if rank == 0 else follow(rank, own), own.token)


def run(memory: Memory, processes: list[Process]) -> None:
    """Run all to their end. A wait ends without the keys only if no process can do anything else."""
    for _ in range(1000):
        moved = [process.step(memory) for process in processes]
        if all(process.over for process in processes):
            return
        if not any(moved):
            memory.rounds += 1
            for process in processes:
                process.step(memory, impatient=True)
    raise AssertionError("they do not meet")


def tokens(process: Process) -> list[str]:
    return [arrival.token for arrival in process.result]


def assert_met(processes: list[Process]) -> None:
    for process in processes:
        assert process.error is None
        assert tokens(process) == [other.token for other in processes]


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[tuple[int, str]]]:
    """A size, and what happens to which rank."""
    size = draw(st.integers(1, 4))
    event = st.tuples(st.integers(0, size - 1), st.sampled_from(["step"] * 6 + ["impatient", "restart", "kill"]))
    return size, draw(st.lists(event, max_size=60))


@given(histories())
def test_a_table_holds_only_who_takes_part_in_it(history: tuple[int, list[tuple[int, str]]]) -> None:
    """And whatever happened before: once a new rank 0 has come, and nobody dies, all meet."""
    size, events = history
    memory, everyone = Memory(), []
    alive: dict[int, Process] = {}
    for rank, event in events:
        if event == "kill":
            alive.pop(rank, None)
        elif event == "restart" or rank not in alive:
            alive[rank] = start(rank, size)
            everyone.append(alive[rank])
        else:
            alive[rank].step(memory, impatient=event == "impatient")
    seen = [process for process in everyone if process.result is not None]
    for process in seen:
        found = tokens(process)
        assert len(found) == size
        assert process.token in found
        leader = next(other for other in everyone if other.token == found[0])
        assert leader.over or leader not in alive.values()
        assert leader.result is None or tokens(leader) == found
        assert all(tokens(other) == found for other in seen if other.token in found)

    for rank in range(size):  # those that wait go on waiting
        if rank == 0 or rank not in alive or alive[rank].over:
            alive[rank] = start(rank, size)
    processes = [alive[rank] for rank in range(size)]
    run(memory, processes)
    assert_met(processes)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_they_meet_in_any_order_and_again_without_a_wait_that_ends(order: tuple[int, ...]) -> None:
    memory = Memory()
    for size in (3, 2, 3):  # an elastic job changes its size
        processes = [start(rank, size) for rank in range(size)]
        for rank in order:
            if rank < size:
                while processes[rank].step(memory):
                    pass
        run(memory, processes)
        assert_met(processes)
    assert memory.rounds == 0


def test_a_process_that_a_table_has_passed_over_is_in_the_next() -> None:
    memory = Memory()
    first, dead, late = start(0, 2), start(1, 2), start(1, 2)
    while first.step(memory) or dead.step(memory):
        pass
    assert tokens(first) == [first.token, dead.token]
    while late.step(memory):
        pass
    assert not late.over
    again = start(0, 2)
    run(memory, [again, late])
    assert_met([again, late])


def test_those_that_wait_hear_at_once_of_a_rank_0_that_was_restarted() -> None:
    memory = Memory()
    processes = [start(rank, 3) for rank in range(3)]
    while processes[0].step(memory) or processes[1].step(memory):
        pass
    processes[0] = start(0, 3)
    run(memory, processes)
    assert_met(processes)
    assert memory.rounds == 0


@pytest.mark.parametrize("steps", range(1, 8))
def test_of_two_ranks_0_one_meets_the_others(steps: int) -> None:
    """The second comes after the first has taken some steps."""
    memory = Memory()
    first, second, other = start(0, 2), start(0, 2), start(1, 2)
    for number in range(steps):
        first.step(memory)
        if number == 2:
            while other.step(memory):
                pass
    while second.step(memory) or other.step(memory):
        pass
    for _ in range(10):
        first.step(memory, impatient=True)
    assert first.over
    while second.step(memory) or other.step(memory):
        pass
    assert_met([second if first.error else first, other])
    assert second.over is isinstance(first.error, SupersededError)


@given(st.lists(st.integers(0, 2), max_size=12))
def test_all_get_one_secret(order: list[int]) -> None:
    """Also if rank 0 is restarted."""
    memory = Memory()
    processes = [Process(agree_on_secret(rank, 3, b"%d" % rank)) for rank in range(3)]
    for rank in order:
        processes[rank].step(memory)
    processes.append(Process(agree_on_secret(0, 3, b"of the second")))
    run(memory, processes[1:])
    assert len({process.result for process in processes[1:] if process.over}) == 1
    if processes[0].over:
        assert processes[0].result == processes[1].result


def test_later_joiners_find_the_newest_members() -> None:
    memory = Memory()
    early = Process(find_members())
    while early.step(memory):
        pass
    processes = [start(rank, 2) for rank in range(2)]
    run(memory, [*processes, early])
    assert early.result == (1, [b"0", b"1"])
    run(memory, [Process(add_member(1, b"7")), Process(add_member(1, b"8"))])
    start(0, 2).step(memory)  # a generation without a table
    later = Process(find_members())
    run(memory, [later])
    assert later.result == (1, [b"0", b"1", b"8", b"7"])
