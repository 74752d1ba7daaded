"""The registry of backends. ``TENSORPIPE``, the default, is Backhaul. Programs may register others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from backhaul.compat.rpc import agent, api, constants, membership
from backhaul.compat.rpc.options import TensorPipeRpcBackendOptions


class BackendValue(NamedTuple):
    """The functions that make a backend's options and start its agent."""

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


class _ExtensibleEnum(type):
    """Makes ``BackendType`` look like an enum to which members can be added."""

    _known: dict[str, BackendType]

    @property
    def __members__(cls) -> Mapping[str, BackendType]:
        return dict(cls._known)

    def __iter__(cls) -> Iterator[BackendType]:
        return iter(cls._known.values())

    def __getitem__(cls, name: str) -> BackendType:
        return cls._known[name]

    def __getattr__(cls, name: str) -> BackendType:
        try:
            return cls._known[name]
        except KeyError:
            raise AttributeError(
                f"there is no RPC backend {name}: register it with register_backend, or use one of "
                f"{', '.join(cls._known)}"
            ) from None


class BackendType(metaclass=_ExtensibleEnum):
    """The registered backends."""

    _known: ClassVar[dict[str, BackendType]] = {}

    def __init__(self, name: str, value: BackendValue) -> None:
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"


def backend_registered(backend_name: str) -> bool:
    """Whether a backend with this name is registered."""
    return backend_name in BackendType._known


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> BackendType:
    """Add a backend; return its member of ``BackendType``."""
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    value = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    made = BackendType._known[backend_name] = BackendType(backend_name, value)
    return made


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = constants.DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    """Make the options of a backend."""
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Start a backend; return its agent."""
    return backend.value.init_backend_handler(*args, **kwargs)


def _options(rpc_timeout: float, init_method: str, **kwargs: Any) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def _start(store: Store, name: str, rank: int, world_size: int | None, rpc_backend_options: Any) -> Any:
    if not isinstance(store, Store):
        raise TypeError(f"`store` must be a c10d::Store. {store}")
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise TypeError(f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`. {rpc_backend_options}")
    if not world_size:
        started = membership.join(name, rank, store, rpc_backend_options)
    else:
        membership.announce_static(store)
        started = agent.start(name, rank, world_size, store, rpc_backend_options)
    api._init_rpc_states(started)
    return started


register_backend("TENSORPIPE", _options, _start)
