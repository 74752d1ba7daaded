"""How references name members of the cluster: by identity, so that a restarted worker is another one."""

from __future__ import annotations

from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.cluster.peers import Peer
from backhaul._rref.ownership import Identity


def identity_of(peer: Peer) -> Identity:
    """The identity that a peer has now."""
    return peer.record.id, peer.record.incarnation


def find_member(client: CallClient, identity: Identity) -> Peer | tuple[str, str] | None:
    """The member with that identity. If it is gone for good: its name and the reason. None: it is not known yet."""
    return client.peers.in_life(*identity)


def is_gone(client: CallClient, identity: Identity) -> bool:
    """Whether that incarnation is gone for good."""
    return isinstance(client.peers.in_life(*identity), tuple)
