"""Channels over TLS."""

from __future__ import annotations

import socket
from typing import cast

from backhaul._transport.base import Event, Lost, Received
from backhaul._transport.sockets.laned_channel import LanedChannel, LanesOwner
from backhaul._transport.sockets.tls_socket import TlsSocket


class TlsChannel(LanedChannel):
    """A channel over a TLS connection."""

    def __init__(
        self, endpoint: LanesOwner, secure: TlsSocket, peer: str, *, connects: bool, relayed: bool = False
    ) -> None:
        super().__init__(endpoint, cast("socket.socket", secure), peer, connects=connects, relayed=relayed)
        self._secure = secure
        self.names = secure.peer_names()
        self.key = secure.peer_key()

    def _has_buffered(self) -> bool:
        return not self._lanes.blocked and self._secure.pending() > 0

    def _read(self) -> Event | None:
        event = super()._read()
        while isinstance(event, Received) and self._has_buffered():
            more = super()._read()
            if isinstance(more, Lost):
                return more
            if more is not None:
                event.frames.extend(more.frames)
        return event
