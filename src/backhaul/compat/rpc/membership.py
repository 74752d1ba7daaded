"""Groups whose members come and go, which the reference makes where no ``world_size`` is given.

Who is there is written in the store; one at a time changes that. A newcomer makes itself known to all, and whoever
leaves tells them.
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

_TURN, _STATIC, _MEMBERS, _SECRET = "turn", "static", "members", "secret"
_FREE = "free"


@contextlib.contextmanager
def _turn(store: Store, who: str) -> Iterator[None]:
    """Wait until nobody else changes the group; nobody does while inside."""
    mine = f"{who}-{secrets.token_hex(8)}"
    store.compare_set(_TURN, "", _FREE)  # the first one to come makes it
    while (found := store.compare_set(_TURN, _FREE, mine).decode()) != mine:
        if found != _FREE:
            store.wait([f"done/{found}"])
    try:
        yield
    finally:
        store.set(_TURN, _FREE)
        store.set(f"done/{mine}", "1")


def announce_static(store: Store) -> None:
    """Say that this group's members are known from the start."""
    store.set(_STATIC, "1")


def join(name: str, rank: int, store: Store, given: TensorPipeRpcBackendOptions) -> TensorPipeAgent:
    """Make this process a member."""
    if store.check([_STATIC]):
        raise RuntimeError("RPC group mixes statically and dynamically initialized members which is not supported.")
    options = to_options(given)
    with _turn(store, name), errors.rewording():
        if not store.check([_SECRET]):
            store.set(_SECRET, secrets.token_hex(32))
        endpoint = SocketEndpoint(
            secret=store.get(_SECRET), limit=options.limits.frame_bytes, shm_bytes=options.shm_bytes
        )
        own = describe(name, rank, endpoint, options, host=host_identity())
        others = _read(store)
        if any(name == other.name or rank == other.id for other in others):
            endpoint.close()
            raise RuntimeError(f"Worker name {name} is not unique, or its rank {rank} is not.")
        try:
            devices.check([*map(devices.of_record, others), devices.of_options(name, given)], complete=False)
        except ValueError:
            endpoint.close()
            raise
        node = start_node(own, [*others, own], endpoint, options)
        node.worker.attach(store)
        for other in others:
            rpc_sync(other.name, greet)
        _write(store, [*others, own])
    return TensorPipeAgent(node.worker, store, given, static=False)


def leave(agent: TensorPipeAgent) -> None:
    """Stop being a member, once what this worker has begun is over."""
    own = int(agent.worker.info.id)
    idle = agent.worker.runtime.one_shot()
    agent.node.client.idleness.when_idle(idle.open)
    with agent.worker.blocking():
        idle.wait()
    with _turn(agent.store, agent.worker.name), errors.rewording():
        others = [other for other in _read(agent.store) if other.id != own]
        for other in others:
            try:
                rpc_sync(other.name, dismiss, args=(own,))
            except PeerLostError as error:
                logger.warning("worker '%s' is lost, and not told that this one leaves: %s", other.name, error)
        _write(agent.store, others)


def greet() -> None:
    """What a newcomer calls: by then the other has admitted it."""


def dismiss(worker: int) -> None:
    """What one that leaves calls."""
    peers = current_worker().part(Node).peers
    peers.dismiss(peers.find(worker))


def _read(store: Store) -> list[WorkerRecord]:
    return msgspec.json.decode(store.get(_MEMBERS), type=list[WorkerRecord]) if store.check([_MEMBERS]) else []


def _write(store: Store, members: list[WorkerRecord]) -> None:
    store.set(_MEMBERS, msgspec.json.encode(members).decode())
