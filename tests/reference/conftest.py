"""Modules that put Backhaul in torch's place are for processes of their own, not for the one that collects tests."""

collect_ignore = ["substitute.py", "suites.py", "worker.py", "run.py"]
