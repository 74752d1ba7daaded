"""Which operations and threads belong to what a worker wrote down. Pure."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterator

from backhaul.profiler.records import OpRecord, Records

_FOREVER = 1 << 63
_NATIVE = 0  # stands for all threads that are not Python's: those of torch's engine, which runs groups on devices


def during(ops: list[OpRecord], records: Records, known: set[int]) -> Iterator[OpRecord]:
    """Operations that were done for the profile: while a thread served one of its calls, went on with one, or ran one
    of its groups. ``known`` are the threads of Python; others do what groups have them do.
    """
    spans: dict[int, list[tuple[int, int]]] = {}
    for serve in records.serves:
        spans.setdefault(serve.thread, []).append((serve.begun, serve.ran or serve.resumed))
        if serve.resumed:
            spans.setdefault(serve.reply_thread, []).append((serve.resumed, serve.replied))
    for step in records.steps:
        spans.setdefault(step.thread, []).append((step.start, step.end))
    for group in records.groups:
        spans.setdefault(group.thread, []).append((group.begun, group.end))
        spans.setdefault(_NATIVE, []).append((group.begun, group.end))
    merged = {thread: _merge(found) for thread, found in spans.items()}
    for op in ops:
        if op.device:
            yield op
            continue
        mine = merged.get(op.thread if op.thread in known or op.thread in spans else _NATIVE, [])
        place = bisect.bisect_right(mine, op.start, key=operator.itemgetter(0)) - 1
        if place >= 0 and op.start <= mine[place][1]:
            yield op


def _merge(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same stretches of time, without overlaps. What has not ended goes on for ever."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        until = end or _FOREVER
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], until)
        else:
            merged.append((start, until))
    return merged


def threads_of(records: Records, ops: list[OpRecord]) -> set[int]:
    """All threads that records or operations name."""
    found = {op.thread for op in ops if not op.device}
    kinds = (records.calls, records.waits, records.steps, records.passes, records.groups, records.gradients)
    for kind in (*kinds, records.serves):
        found |= {record.thread for record in kind}
    return found | {call.end_thread for call in records.calls} | {serve.reply_thread for serve in records.serves}
