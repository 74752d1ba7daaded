"""The reference's faulty backend: it drops or delays messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backhaul.compat.rpc import agent, api, backend_registry, kinds
from backhaul.compat.rpc.agent import TensorPipeAgent as FaultyTensorPipeAgent
from backhaul.compat.rpc.options import TensorPipeRpcBackendOptions
from backhaul.testing.faults import Faults

__all__ = ["FaultyTensorPipeAgent", "FaultyTensorPipeRpcBackendOptions", "is_available"]


def is_available() -> bool:
    """Whether the faulty backend is available: always."""
    return True


class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    """The options of the default backend, and which messages to drop or delay."""

    def __init__(
        self,
        *,
        messages_to_fail: Sequence[str] = (),
        messages_to_delay: Mapping[str, float] | None = None,
        num_fail_sends: int = 0,
        **others: Any,
    ) -> None:
        super().__init__(**others)
        self.messages_to_fail = list(messages_to_fail)
        self.messages_to_delay = dict(messages_to_delay or {})
        self.num_fail_sends = num_fail_sends


def _options(rpc_timeout: float, init_method: str, **others: Any) -> FaultyTensorPipeRpcBackendOptions:
    return FaultyTensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **others)


def _start(store: Any, name: str, rank: int, world_size: int, rpc_backend_options: Any) -> FaultyTensorPipeAgent:
    if not isinstance(rpc_backend_options, FaultyTensorPipeRpcBackendOptions):
        raise TypeError(f"`rpc_backend_options` must be `FaultyTensorPipeRpcBackendOptions`. {rpc_backend_options}")
    started = agent.start(name, rank, world_size, store, rpc_backend_options)
    faults = Faults(
        kinds.kinds_of,
        lose=rpc_backend_options.messages_to_fail,
        times=rpc_backend_options.num_fail_sends,
        delay=rpc_backend_options.messages_to_delay,
    )
    faults.install(started.node.client)
    api._init_rpc_states(started)
    return started


backend_registry.register_backend("FAULTY_TENSORPIPE", _options, _start)
