"""The reference's defaults."""

DEFAULT_RPC_TIMEOUT_SEC: float = 60.0
DEFAULT_INIT_METHOD: str = "env://"
DEFAULT_NUM_WORKER_THREADS: int = 16
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
"""None: a graceful shutdown waits as long as it takes."""

UNSET_RPC_TIMEOUT: float = -1.0
"""Stands for the worker's default."""
