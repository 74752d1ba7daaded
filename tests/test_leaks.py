"""The leak checker notices what it should."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from multiprocessing import shared_memory

from backhaul.testing.leaks import take_snapshot


def test_notices_a_thread_a_descriptor_a_process_and_a_segment() -> None:
    before = take_snapshot()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="leaky")
    thread.start()
    reading, writing = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    segment = shared_memory.SharedMemory(create=True, size=16)
    found = "; ".join(take_snapshot().beyond(before))
    stop.set()
    thread.join()
    process.communicate()
    segment.close()
    segment.unlink()
    for fd in (reading, writing):
        os.close(fd)
    assert "leaky" in found
    assert f"{reading} ->" in found
    assert f"{writing} ->" in found
    assert str(process.pid) in found
    assert segment.name in found
    assert take_snapshot().beyond(before) == []
