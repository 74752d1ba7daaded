"""The reference's defaults."""

from backhaul._options import Options

DEFAULT_RPC_TIMEOUT_SEC: float = 60.0
DEFAULT_INIT_METHOD: str = "env://"
DEFAULT_NUM_WORKER_THREADS: int = 16
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
"""None: a graceful shutdown waits as long as it takes."""

RENDEZVOUS_TIMEOUT: float = Options().rendezvous_timeout
"""How long ``init_rpc`` waits for the others; the reference waits for half an hour."""

UNSET_RPC_TIMEOUT: float = -1.0
"""Stands for the worker's default."""
