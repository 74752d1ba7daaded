"""Threads, time, interrupts, and the hooks that a simulator, a profiler or a compiler replaces."""
