"""Each call changes the state exactly once, whatever is lost at whatever time. Against lists of calls."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul._recovery.step_log import StepAction, StepLog, StepOutcome

WORKERS = 3

Log = StepLog[str, list[list[str]]]


@dataclasses.dataclass
class World:
    """Workers whose state is the list of the calls that have changed it.

    Attributes:
        states: The state of each worker; None: it has taken the place of a lost one, and has no state yet.
        late: States of earlier tries, which calls that are still under way go on changing.
    """

    data: st.DataObject
    states: list[list[str] | None] = dataclasses.field(default_factory=lambda: [[] for _ in range(WORKERS)])
    saved: list[list[str]] | None = None
    noted: list[list[str]] | None = None
    late: list[list[str]] = dataclasses.field(default_factory=list)

    def do(self, action: StepAction, log: Log) -> StepOutcome:
        """Do a part of an action, or all of it, and say how it has ended."""
        fate = self.data.draw(
            st.sampled_from([StepOutcome.DONE] * 3 + [StepOutcome.LOST, StepOutcome.FAILED]), label=action.name
        )
        until = WORKERS if fate is StepOutcome.DONE else self.data.draw(st.integers(0, WORKERS))
        for each in self.late:  # nothing that counts refers to these
            each.append("late")
        if action is StepAction.RUN:
            outcome = self._run(log.current, until, fate)
        elif action is StepAction.RESTORE:
            outcome = self._restore(log.snapshot, until, fate)
        elif None in self.states:
            outcome = StepOutcome.LOST
        elif fate is not StepOutcome.DONE:
            outcome = fate
        elif action is StepAction.SAVE:
            self.saved = [list(state) for state in self.states if state is not None]
            outcome = StepOutcome.DONE
        else:
            outcome = StepOutcome.DONE if self.states == self.noted else StepOutcome.CHANGED
        if outcome is StepOutcome.LOST and None not in self.states:
            self.states[self.data.draw(st.integers(0, WORKERS - 1))] = None
        return outcome

    def _run(self, call: str, until: int, fate: StepOutcome) -> StepOutcome:
        for state in self.states[:until]:
            if state is None:
                return StepOutcome.LOST
            state.append(call)
        if fate is not StepOutcome.DONE:
            self.late += [state for state in self.states if state is not None]
        return fate

    def _restore(self, snapshot: list[list[str]] | None, until: int, fate: StepOutcome) -> StepOutcome:
        assert snapshot is not None
        for worker, saved in list(enumerate(snapshot))[:until]:
            self.states[worker] = list(saved)
        return fate


def make_call(world: World, log: Log, call: str, *, attempts: int, every: int, interrupted: int) -> StepAction:
    """Do all actions of a call, or as many as there are before an interrupt. Returns the last."""
    action, done, ran = log.begin(call, attempts=attempts, every=every), 0, 0
    while action not in (StepAction.RETURN, StepAction.RAISE):
        ran += action is StepAction.RUN and log.current == call
        outcome = world.do(action, log)
        done += 1
        if done == interrupted:
            log.interrupt()
            return action
        action = log.next(outcome, world.saved)
    assert ran <= attempts
    assert done <= (attempts + 2) * (every + 3)
    return action


@pytest.mark.parametrize("changes", [False, True])
@given(st.data(), st.integers(1, 3), st.integers(1, 4), st.integers(1, 8))
def test_each_call_that_returns_counts_once(
    changes: bool, data: st.DataObject, attempts: int, every: int, calls: int
) -> None:
    """``changes``: the program changes the state between calls. A loss before the next snapshot undoes that."""
    world, log = World(data), Log()
    possible: list[list[str]] = [[]]  # what the state may be
    for number in range(calls):
        if changes and None not in world.states and not log.torn and data.draw(st.booleans(), label="change"):
            possible += [[*each, f"change {number}"] for each in possible]
            for state in world.states:
                assert state is not None
                state.append(f"change {number}")
        interrupted = data.draw(st.one_of(st.just(0), st.integers(1, 12)), label="interrupted after")
        last = make_call(world, log, f"call {number}", attempts=attempts, every=every, interrupted=interrupted)
        if last is StepAction.RETURN:
            assert not log.torn
            possible = [[*each, f"call {number}"] for each in possible]
            assert world.states[0] in possible
        if not log.torn and None not in world.states:
            assert world.states == [world.states[0]] * WORKERS
            assert world.states[0] in possible
            possible = [list(world.states[0] or [])] if last is StepAction.RETURN else possible
            world.noted = [list(state or []) for state in world.states]


@pytest.mark.parametrize("attempts", [1, 2, 3])
def test_a_call_is_tried_so_often(attempts: int) -> None:
    log = Log()
    assert log.begin("call", attempts=attempts, every=1) is StepAction.SAVE
    action, ran = log.next(StepOutcome.DONE, []), 0
    while action is not StepAction.RAISE:
        ran += action is StepAction.RUN
        action = log.next(StepOutcome.LOST if action is StepAction.RUN else StepOutcome.DONE)
    assert ran == attempts
    assert not log.torn
