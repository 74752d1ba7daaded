"""Compares what a worker claims to be with the certificate at the other end of its channel."""

from __future__ import annotations

from backhaul._options import Tls
from backhaul._rpc.cluster.membership_table import WorkerRecord
from backhaul._transport.base import Channel
from backhaul._worker.worker import Worker


class CertificateNames:
    """One worker's rules about certificates and what they prove."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._security = worker.options.security

    @property
    def bound(self) -> bool:
        """Whether a certificate proves the name of a worker."""
        return self._security.binds_names

    @property
    def _needed(self) -> bool:
        """Whether a channel without a certificate is refused: what it claims could not be checked. Workers of one
        process have no certificates.
        """
        endpoint = self._worker.endpoint
        connects = bool(endpoint.key) or any(address.startswith("tcp:") for address in endpoint.addresses)
        return self.bound and connects and not self._security.trusted

    def allow(self, channel: Channel, name: str) -> bool:
        """Whether the peer of a channel may be the worker ``name``."""
        if channel.names is None:
            return not self._needed
        tls = self._security.tls
        return (isinstance(tls, Tls) and not tls.names) or name in channel.names

    @staticmethod
    def holds_key(channel: Channel, record: WorkerRecord) -> bool:
        """Whether the peer of a channel has the certificate of the worker with that record, and its private key. Where
        a member passes the bytes on, this shows that the member does not speak for that worker.
        """
        if channel.relayed:
            return bool(record.key) and channel.key == record.key
        return not record.key or channel.key is None or channel.key == record.key

    @staticmethod
    def mismatch(channel: Channel, name: str) -> str:
        """The reason to refuse a worker whose certificate does not name it."""
        if channel.names is None:
            return f"'{name}' shows no certificate; give all workers certificates, and Options(transport='tcp')"
        listed = ", ".join(f"'{each}'" for each in sorted(channel.names)) or "nobody by name"
        return f"the certificate of '{name}' is for {listed}"
