"""Ways to start workers: processes on this machine, or many inside one process."""
