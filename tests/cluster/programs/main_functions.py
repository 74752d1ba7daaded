"""A user's script whose workers run functions of this very script. Prints what came of it as JSON.

main_functions.py START_METHOD
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

import backhaul as bh

remembered: list[Any] = []


@dataclasses.dataclass
class Note:
    text: str


class NoteError(Exception):
    def __init__(self, text: str, note: Note) -> None:
        super().__init__(text, note)
        self.note = note


def remember(value: Any) -> list[Any]:
    remembered.append(value)
    return remembered


def describe(note: Any) -> tuple[bool, Note, int]:
    return isinstance(note, Note), Note(note.text + "!"), os.getpid()


def fail() -> None:
    raise NoteError("from main", Note("inside"))


@bh.async_execution
def remember_later(value: Any) -> bh.Future[list[Any]]:
    return bh.rpc_async(bh.get_worker_info(), remember, args=(value,))


async def remember_awaiting(value: Any) -> list[Any]:
    return await bh.rpc_async(bh.get_worker_info(), remember, args=(value,))


def work() -> dict[str, Any] | Note:
    """Runs in every worker."""
    if bh.get_worker_info().id != 0:
        return Note(bh.get_worker_info().name)
    extra = "closure"
    bh.rpc_sync("worker1", remember, args=("first",))
    bh.rpc_sync("worker1", lambda: remember("lambda"))
    bh.rpc_sync("worker1", lambda: remember(extra))
    bh.rpc_sync("worker1", remember_later, args=("future",))
    there = bh.rpc_sync("worker1", remember_awaiting, args=("coroutine",))
    known, note, pid = bh.rpc_sync("worker1", describe, args=(Note("mine"),))
    try:
        bh.rpc_sync("worker1", fail)
    except NoteError as error:
        caught = type(error.note) is Note and error.note.text
    return {
        "there": there,
        "here": remembered,
        "argument keeps its class": known,
        "result keeps its class": type(note) is Note and note.text,
        "another process": pid != os.getpid(),
        "exception": caught,
    }


def main(start_method: Any) -> None:
    found, note = bh.launch(work, 2, start_method=start_method)
    found["launch keeps the class of a result"] = type(note) is Note and note.text
    culprit = "worker1"
    try:
        bh.launch(lambda: fail() if bh.get_worker_info().name == culprit else None, 2, start_method=start_method)
    except NoteError as error:
        found["launch keeps the class of an exception"] = [error.note.text, error.__cause__.worker]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
