"""Whether a process of this host has ended. Tells it from a later process that got the same number."""

from __future__ import annotations


def identity_of(process: int) -> int:
    """The start time of a process, which tells it from a later process with the same number.

    Returns:
        0 if the process has ended, also if its parent has not collected it; -1 if that cannot be seen.
    """
    try:
        with open(f"/proc/{process}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        return 0 if fields[0] in (b"Z", b"X") else int(fields[19])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except (OSError, IndexError, ValueError):
        return -1


def has_ended(process: int, identity: int) -> bool:
    """Whether the process that had this ``identity`` has ended."""
    now = identity_of(process)
    return now == 0 or (min(now, identity) > 0 and now != identity)
