"""Groups whose members join and leave at any time. As in the reference, ``init_rpc`` without a ``world_size`` uses one.

The store holds the list of members. A lock in the store lets only one worker change the list at a time. A worker that
joins contacts all members, and a worker that leaves tells all members.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Iterator

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]

from backhaul._rpc.api import rpc_sync
from backhaul._rpc.cluster.membership_table import WorkerRecord
from backhaul._rpc.node import Node, describe, start_node
from backhaul._transport.sockets.addresses import host_identity
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._worker.worker import current_worker
from backhaul.compat import errors
from backhaul.compat.rpc import devices
from backhaul.compat.rpc.agent import TensorPipeAgent
from backhaul.compat.rpc.options import TensorPipeRpcBackendOptions, to_options
from backhaul.errors import PeerLostError

logger = logging.getLogger("backhaul")

# Keys of the store.
_LOCK, _STATIC, _MEMBERS, _SECRET = "lock", "static", "members", "secret"

_UNLOCKED = "unlocked"  # the value of _LOCK while no worker holds it


@contextlib.contextmanager
def _locked(store: Store, worker: str) -> Iterator[None]:
    """Hold the lock of the member list inside the ``with`` block."""
    own_lock = f"{worker}-{secrets.token_hex(8)}"
    store.compare_set(_LOCK, "", _UNLOCKED)  # the first worker creates the key
    while (holder := store.compare_set(_LOCK, _UNLOCKED, own_lock).decode()) != own_lock:
        if holder != _UNLOCKED:
            store.wait([f"done/{holder}"])
    try:
        yield
    finally:
        store.set(_LOCK, _UNLOCKED)
        store.set(f"done/{own_lock}", "1")


def announce_static(store: Store) -> None:
    """Mark this group as one whose members are known from the start."""
    store.set(_STATIC, "1")


def join(name: str, rank: int, store: Store, agent_options: TensorPipeRpcBackendOptions) -> TensorPipeAgent:
    """Make this process a member."""
    if store.check([_STATIC]):
        raise RuntimeError("RPC group mixes statically and dynamically initialized members which is not supported.")
    options = to_options(agent_options)
    with _locked(store, name), errors.rewording():
        if not store.check([_SECRET]):
            store.set(_SECRET, secrets.token_hex(32))
        endpoint = SocketEndpoint(
            secret=store.get(_SECRET),
            limit=options.limits.frame_bytes,
            shm_bytes=options.shm_bytes,
            spin=options.spin,
        )
        own = describe(name, rank, endpoint, options, host=host_identity())
        others = _read(store)
        if any(name == other.name or rank == other.id for other in others):
            endpoint.close()
            raise RuntimeError(f"Worker name {name} is not unique, or its rank {rank} is not.")
        declarations = [*map(devices.from_record, others), devices.from_options(name, agent_options)]
        try:
            devices.check(declarations, complete=False)
        except ValueError:
            endpoint.close()
            raise
        node = start_node(own, [*others, own], endpoint, options)
        node.worker.attach(store)
        for other in others:
            rpc_sync(other.name, contact_member)
        _write(store, [*others, own])
    return TensorPipeAgent(node.worker, store, agent_options, static=False)


def leave(agent: TensorPipeAgent) -> None:
    """Leave the group, once the calls that this worker has started are done."""
    own = int(agent.worker.info.id)
    idle = agent.worker.runtime.one_shot()
    agent.node.client.idleness.when_idle(idle.open)
    with agent.worker.blocking():
        idle.wait()
    with _locked(agent.store, agent.worker.name), errors.rewording():
        others = [other for other in _read(agent.store) if other.id != own]
        for other in others:
            try:
                rpc_sync(other.name, remove_member, args=(own,))
            except PeerLostError as error:
                logger.warning(
                    "worker '%s' cannot tell worker '%s' that it leaves the group, because that worker is lost: %s",
                    agent.worker.name,
                    other.name,
                    error,
                )
        _write(agent.store, others)


def contact_member() -> None:
    """A joining worker calls this on each member. A member admits the joining worker before it serves the call."""


def remove_member(worker: int) -> None:
    """A leaving worker calls this on each member."""
    peers = current_worker().part(Node).peers
    peers.dismiss(peers.find(worker))


def _read(store: Store) -> list[WorkerRecord]:
    return msgspec.json.decode(store.get(_MEMBERS), type=list[WorkerRecord]) if store.check([_MEMBERS]) else []


def _write(store: Store, members: list[WorkerRecord]) -> None:
    store.set(_MEMBERS, msgspec.json.encode(members).decode())
