"""Compares what a worker claims to be with the certificate at the other end of its channel."""

from __future__ import annotations

from backhaul._options import Options, Tls
from backhaul._rpc.cluster.membership_table import WorkerRecord
from backhaul._transport.base import Channel


class CertificateNames:
    """One worker's rules about certificates and what they prove."""

    def __init__(self, options: Options) -> None:
        self._options = options

    @property
    def bound(self) -> bool:
        """Whether a certificate proves the name of a worker. One that is made from the cluster secret does not: every
        member can make one of any name.
        """
        tls = self._options.security.tls
        return isinstance(tls, Tls) and tls.names

    def allow(self, channel: Channel, name: str) -> bool:
        """Whether the peer of a channel may be the worker ``name``. A channel without a certificate allows any name."""
        tls = self._options.security.tls
        return (isinstance(tls, Tls) and not tls.names) or channel.names is None or name in channel.names

    @staticmethod
    def holds_key(channel: Channel, record: WorkerRecord) -> bool:
        """Whether the peer of a channel has the certificate of the worker with that record, and its private key. Where
        a member passes the bytes on, this shows that the member does not speak for that worker.
        """
        if channel.relayed:
            return bool(record.key) and channel.key == record.key
        return not record.key or channel.key is None or channel.key == record.key

    @staticmethod
    def listed(channel: Channel) -> str:
        """The names in the certificate of the peer, for an error."""
        return ", ".join(f"'{name}'" for name in sorted(channel.names or ())) or "nobody by name"

    @classmethod
    def mismatch(cls, channel: Channel, name: str) -> str:
        """The reason to refuse a worker whose certificate does not name it."""
        return f"the certificate of '{name}' is for {cls.listed(channel)}"
