"""Sim tasks, the simulated processes that they belong to, and the OS threads that run them. Knows no order of running.

A *sim task* is a thread of the simulation. It runs only while it has the baton, see ``scheduler``. A simulated process
is what can be paused or killed as a whole: one worker.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable
from typing import Any


class Killed(BaseException):
    """Unwinds a sim task whose process is dead. Code that catches it gets it again at its next wait."""


class SimProcess:
    """A group of sim tasks that faults hit as a whole.

    Attributes:
        dead: Whether it was killed.
        paused: Whether none of its tasks may run.
        tasks: Its tasks that have not ended, in the order of their start.
        parked: Tasks that could run if the process were not paused.
        on_resume: Called once when the process is resumed.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.paused = False
        self.tasks: dict[SimTask, None] = {}
        self.parked: list[SimTask] = []
        self.on_resume: list[Callable[[], None]] = []


class SimTask:
    """One thread of the simulation. Only the scheduler changes it.

    Attributes:
        baton: Locked while the task may not run.
        wait_number: The number of the wait that the task is in; 0: it does not wait.
        woken: Whether its last wait was ended by ``wake``, and not by a timeout.
        where: What it waits for, for people.
        item: What the task that woke it has handed over.
        error: Raised in the task at the end of its wait.
        successor: Gets the baton when this task ends.
        effort: Processor time that it has used, in virtual seconds.
        joiners: Tasks that wait for its end.
    """

    __slots__ = (
        "baton",
        "done",
        "effort",
        "error",
        "item",
        "joiners",
        "name",
        "process",
        "successor",
        "wait_number",
        "where",
        "woken",
    )

    def __init__(self, name: str, process: SimProcess) -> None:
        self.name = name
        self.process = process
        self.baton = threading.Lock()
        self.baton.acquire()
        self.wait_number = 0
        self.woken = False
        self.where = "its start"
        self.item: Any = None
        self.error: BaseException | None = None
        self.successor: SimTask | None = None
        self.effort = 0.0
        self.done = False
        self.joiners: list[SimTask] = []


class SimThread(threading.Thread):
    """The OS thread of a sim task.

    Args:
        task: The task.
        target: What the task runs.
        on_end: Called as the last thing the task does with the baton.
    """

    def __init__(self, task: SimTask, target: Callable[[], None], on_end: Callable[[SimTask], None]) -> None:
        super().__init__(name=task.name, daemon=True)
        self.task = task
        self._target_function: Callable[[], None] | None = target
        self._on_end: Callable[[SimTask], None] | None = on_end

    def run(self) -> None:
        task, target, on_end = self.task, self._target_function, self._on_end
        assert target is not None
        assert on_end is not None
        task.baton.acquire()
        # Objects that die with the thread must die while the task has the baton.
        self._target_function = self._on_end = None
        context = contextvars.Context()
        try:
            if not task.process.dead:
                context.run(target)
        except Killed:
            pass
        except BaseException:
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), self)))
        del context, target
        on_end(task)
