"""Threads, waits, time and interrupts, and the hooks that a simulator, a profiler or a compiler uses."""
