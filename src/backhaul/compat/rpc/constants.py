"""The reference's defaults."""

from backhaul._options import Options

DEFAULT_RPC_TIMEOUT_SEC: float = 60.0
DEFAULT_INIT_METHOD: str = "env://"
DEFAULT_NUM_WORKER_THREADS: int = 16
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
"""Seconds. 0 means no limit: a graceful shutdown waits as long as necessary."""

RENDEZVOUS_TIMEOUT: float = Options().rendezvous_timeout
"""Seconds that ``init_rpc`` waits for the other workers. The reference waits for half an hour."""

UNSET_RPC_TIMEOUT: float = -1.0
"""Means the default timeout of the worker."""
