"""Names of contexts and messages, unique in the cluster."""

from __future__ import annotations

from typing import NewType

MessageId = NewType("MessageId", int)
"""Names one recorded message in the cluster: 16 bits of worker id, 48 bits of counter."""

ContextId = NewType("ContextId", int)
"""Names one context in the cluster: 16 bits of worker id, 48 bits of counter."""

NO_CONTEXT = ContextId(-1)
"""Stands where there is no context."""

PLAIN = ContextId(-2)
"""Names the graph of messages outside contexts, the same on every worker; see ``plain_graph``."""

ROOTS = MessageId(0)
"""The roots of a pass, as a source; on a note: the message was not recorded."""

TOGETHER = MessageId(-1)
"""Stands in errors for several messages whose gradients came together, when it is not known which of them failed."""

COUNTER_BITS = 48


def split(number: int) -> tuple[int, int]:
    """The worker that made the id of a context or a message, and its number there.

    >>> split(3 << 48 | 7)
    (3, 7)
    """
    return number >> COUNTER_BITS, number & (1 << COUNTER_BITS) - 1
