"""Finds the operations and threads that belong to the records of a worker. Pure."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterator

from backhaul.profiler.records import OpRecord, Records

_NO_END_NS = 1 << 63  # later than any time
_NATIVE_THREADS = 0  # one number for all threads that Python did not start: those of torch's autograd engine


def ops_for_profile(ops: list[OpRecord], records: Records, python_threads: set[int]) -> Iterator[OpRecord]:
    """The operations that a worker ran for a profile that another worker opened.

    These are the operations of a thread while it served a call of the profile, continued with one, or ran a group.
    Threads that are not in ``python_threads`` belong to torch's engine, which works for the groups.
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
        spans.setdefault(_NATIVE_THREADS, []).append((group.begun, group.end))
    merged = {thread: _merge(found) for thread, found in spans.items()}
    for op in ops:
        if op.device:
            yield op
            continue
        is_known = op.thread in python_threads or op.thread in spans
        spans_of_thread = merged.get(op.thread if is_known else _NATIVE_THREADS, [])
        place = bisect.bisect_right(spans_of_thread, op.start, key=operator.itemgetter(0)) - 1
        if place >= 0 and op.start <= spans_of_thread[place][1]:
            yield op


def _merge(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same spans of time, without overlaps. A span that has not ended has no end."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        until = end or _NO_END_NS
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], until)
        else:
            merged.append((start, until))
    return merged


def threads_of(records: Records, ops: list[OpRecord]) -> set[int]:
    """All threads that the records and operations mention."""
    found = {op.thread for op in ops if not op.device}
    kinds = (records.calls, records.waits, records.steps, records.passes, records.groups, records.gradients)
    for kind in (*kinds, records.serves):
        found |= {record.thread for record in kind}
    return found | {call.end_thread for call in records.calls} | {serve.reply_thread for serve in records.serves}
