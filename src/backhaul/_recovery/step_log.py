"""Which actions make a step exactly once, whatever is lost when. Pure: outcomes in, actions out.

[Note: exactly once] The *state* is all that steps change: parameters, buffers, gradients, the state of optimizers. At
any time it is one of these:

- *whole*: the last snapshot, changed by each of the calls in ``done`` exactly once, in their order;
- *torn*: nobody knows. A call has failed, or has not ended yet.

A call is run on a whole state only. A torn state becomes whole by a restore and by running ``done`` again, never by
undoing what a call has done. A restore replaces objects on the workers by new ones: what is still under way of an
earlier try changes objects that nothing refers to any more. So the state after ``RETURN`` is that of the calls that
have returned, each made once, and after ``RAISE`` it is the state before the call, or torn. A torn state is restored
before the next call.
"""

from __future__ import annotations

import enum
from typing import Generic, TypeVar

C = TypeVar("C")
S = TypeVar("S")


class StepAction(enum.Enum):
    """What is to be done next. Its outcome is given to ``StepLog.next``."""

    CHECK = "see whether the state is still what it was after the last call"
    SAVE = "take a snapshot of the state"
    RESTORE = "make the state that of the snapshot, on all workers"
    RUN = "run StepLog.current"
    RETURN = "return the result of the call"
    RAISE = "raise the last error"


class StepOutcome(enum.Enum):
    """How an action has ended."""

    DONE = "it is done; for CHECK: the state is the same"
    CHANGED = "for CHECK: the program has changed the state since the last call"
    LOST = "a worker was lost"
    FAILED = "it has failed, and trying again is of no use"


class StepLog(Generic[C, S]):
    """What is known of the state, and what to do about the call that is made.

    Attributes:
        torn: Whether the state is torn.
    """

    def __init__(self) -> None:
        self.torn = False
        self._base: tuple[S | None, tuple[C, ...]] = None, ()  # the snapshot, and ``done``
        self._redo: list[C] = []  # the calls of ``done`` that the restored state lacks
        self._call: list[C] = []  # the call to make; empty once it has failed for good
        self._has_run = False
        self._tries = 0
        self._every = 1
        self._action = StepAction.RETURN

    @property
    def snapshot(self) -> S | None:
        """The last snapshot, if there is one."""
        return self._base[0]

    @property
    def done(self) -> tuple[C, ...]:
        """The calls that have changed the state since the snapshot."""
        return self._base[1]

    def renew(self, snapshot: S) -> None:
        """Use another snapshot of the same state. ``done`` is empty."""
        assert not self.done
        self._base = snapshot, ()

    @property
    def current(self) -> C:
        """The call to run."""
        return (self._redo or self._call)[0]

    @property
    def saves_next(self) -> bool:
        """Whether a snapshot follows when ``current`` has run."""
        return not self._redo and len(self.done) + 1 >= self._every

    def begin(self, call: C, *, attempts: int, every: int) -> StepAction:
        """Begin a call. ``every``: take a snapshot after that many calls."""
        self._call, self._tries, self._every = [call], attempts, every
        self._has_run = False
        if self.torn:
            return self._act(StepAction.RESTORE)
        return self._act(StepAction.SAVE if self.snapshot is None else StepAction.CHECK)

    def interrupt(self) -> None:
        """The call was interrupted. Nobody knows whether it counts. The next call restores a state that may be torn."""
        self.torn = self.torn or self._action in (StepAction.RUN, StepAction.RESTORE)

    def next(self, outcome: StepOutcome, snapshot: S | None = None) -> StepAction:
        """The action that follows. ``snapshot``: what ``SAVE`` has made."""
        action = self._action
        if action is StepAction.RUN:
            return self._after_run(outcome)
        if action is StepAction.RESTORE:
            return self._after_restore(outcome)
        if outcome is StepOutcome.CHANGED:
            return self._act(StepAction.SAVE)
        if outcome is StepOutcome.DONE:
            if action is StepAction.SAVE:
                self._base = snapshot, ()
                return self._act(StepAction.RETURN if self._has_run else StepAction.RUN)
            return self._act(StepAction.RUN)
        if self._has_run:  # a part of the state after the call is lost
            return self._give_up(outcome)
        if self.snapshot is None or outcome is StepOutcome.FAILED:
            return self._act(StepAction.RAISE)
        self.torn = True
        return self._act(StepAction.RESTORE)

    def _after_restore(self, outcome: StepOutcome) -> StepAction:
        if outcome is not StepOutcome.DONE:
            self._redo = []
            return self._act(StepAction.RAISE)
        self._redo = list(self.done)
        return self._run_next()

    def _after_run(self, outcome: StepOutcome) -> StepAction:
        if outcome is not StepOutcome.DONE:
            return self._give_up(outcome)
        if self._redo:
            del self._redo[0]
            return self._run_next()
        self._has_run = True
        if self.saves_next:
            return self._act(StepAction.SAVE)
        self._base = self.snapshot, (*self.done, self._call[0])
        return self._act(StepAction.RETURN)

    def _run_next(self) -> StepAction:
        """Run what the state lacks. A call that has failed for good is not run."""
        if self._redo or self._call:
            return self._act(StepAction.RUN)
        self.torn = False
        return self._act(StepAction.RAISE)

    def _give_up(self, outcome: StepOutcome) -> StepAction:
        """A try has failed. Restore the state, for another try or to raise the error."""
        self.torn, self._has_run = True, False
        if not self._call:  # the state before the call could not be made either
            self._redo = []
            return self._act(StepAction.RAISE)
        self._tries -= 1
        if outcome is StepOutcome.FAILED or self._tries <= 0:
            self._call = []
        return self._act(StepAction.RESTORE)

    def _act(self, action: StepAction) -> StepAction:
        self._action = action
        if action is StepAction.RUN:
            self.torn = True
        elif action in (StepAction.RETURN, StepAction.RAISE):
            self.torn = self.torn and action is StepAction.RAISE
            self._call = []
        return action
