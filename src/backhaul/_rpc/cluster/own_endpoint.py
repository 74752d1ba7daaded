"""Makes the endpoint of this worker: where it listens, with which secret, and with which certificate. After the
rendezvous, tries whether the workers of another host answer. ``addressing`` decides who must be reachable.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from backhaul._options import Options, Tls
from backhaul._rpc.cluster.addressing import SECRET_NEEDED, AddressOffer, neighbor_of, on_several_hosts, settle
from backhaul._rpc.cluster.membership_table import WorkerRecord, choose
from backhaul._rpc.cluster.peers import Peers
from backhaul._transport.base import ConnectTimeoutError
from backhaul._transport.sockets.certificates import check_strength, issue
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._transport.sockets.interfaces import NoAddressError
from backhaul._transport.sockets.tcp_listener import ListenAddress, TcpListener, is_loopback_name, listen_address
from backhaul._transport.sockets.tls import Credentials
from backhaul.errors import AuthenticationError, RendezvousError

log = logging.getLogger("backhaul")

SECRET_VARIABLE = "BACKHAUL_SECRET"

_FAREWELL_SECONDS = 1.0  # for the news to come that a worker which does not answer has left
_POLL_SECONDS = 0.02
_LINGER_SECONDS = 1.0  # before a worker that cannot reach another ends


def secret_of(options: Options) -> bytes | None:
    """The secret from the options or the environment, or None."""
    secret = options.security.secret if options.security.secret is not None else os.environ.get(SECRET_VARIABLE)
    if secret is None:
        return None
    if not secret:
        raise ValueError(
            f"the cluster secret is empty; set {SECRET_VARIABLE} or Options(security=Security(secret=...)), or neither"
        )
    return secret.encode() if isinstance(secret, str) else secret


def check_options(options: Options) -> None:
    """Raise ``ValueError`` if the options let other hosts reach the worker without a secret."""
    if secret_of(options) is not None:
        return
    try:
        where = _given_address(options, None)
        exposed = where is not None and where.beyond_loopback
    except NoAddressError:  # the worker listens on all addresses, and it is not known yet which of them others use
        exposed = True
    if exposed:
        what = f"bind={options.bind!r}" if options.bind is not None else f"advertise={options.advertise!r}"
        raise ValueError(f"with {what} other hosts can reach this worker, so {SECRET_NEEDED}")


def host_of(store: Store) -> str | None:
    """The host of the process that serves a store; None if the store does not tell."""
    found: Any = store
    while (inner := getattr(found, "underlying_store", None)) is not None:
        found = inner
    host = getattr(found, "host", None)
    return host if isinstance(host, str) and host else None


def meets_other_hosts(store: Store) -> bool:
    """Whether workers of other hosts can come to a store."""
    host = host_of(store)
    return host is not None and not is_loopback_name(host)


def _given_address(options: Options, towards: str | None) -> ListenAddress | None:
    """Where to listen by TCP whatever the hosts of the others are; None: the options do not say, or it does not."""
    if not options.listen:
        return None
    if options.bind is not None or options.advertise is not None:
        return listen_address(options.bind, options.advertise, towards)
    return listen_address("127.0.0.1") if options.tcp_only else None


class OwnEndpoint:
    """The endpoint of this worker, and what the worker can add to it once it knows the hosts of the others.

    Attributes:
        endpoint: The endpoint.

    Args:
        name: The name of this worker.
        secret: The cluster secret.
        options: The options of this worker.
        towards: A host that all workers reach.
        own_secret: Whether the user has set the secret.
        several_hosts: Whether there are workers on other hosts; None: that is not known yet.
        joiners: Whether workers of other hosts may join later, although there are none yet. The worker then listens for
            them if it can.
    """

    def __init__(
        self,
        name: str,
        secret: bytes,
        options: Options,
        *,
        towards: str | None,
        own_secret: bool,
        several_hosts: bool | None = None,
        joiners: bool = False,
    ) -> None:
        self._name, self._secret, self._options = name, secret, options
        self._own_secret = own_secret
        self._made: Credentials | None = None
        self._spare: TcpListener | None = None
        self._obstacle = ""
        given = _given_address(options, towards)
        with contextlib.ExitStack() as made:
            searches = options.listen and options.bind is None and options.advertise is None
            if searches and (several_hosts is not False or joiners):
                self._reserve(towards)
                if several_hosts and self._spare is None:
                    why = self._obstacle or f"it has no secret of yours; {SECRET_NEEDED}"
                    raise RendezvousError(
                        f"the workers on other hosts cannot reach worker '{name}': {why}", worker=name
                    )
            if self._spare is not None:
                made.callback(self._spare.close)
            listener = TcpListener(given) if given is not None else None
            if listener is not None:
                made.callback(listener.close)
            credentials = self._credentials(beyond_loopback=given is not None and given.beyond_loopback)
            self.endpoint = SocketEndpoint(
                secret=secret,
                unix=not options.tcp_only,
                limit=options.limits.frame_bytes,
                shm_bytes=options.shm_bytes,
                spin=options.spin,
                lanes=options.lanes,
                relayed=options.limits.relayed,
            )
            made.callback(self.endpoint.close)
            self.endpoint.use_tcp(listener, credentials)
            if not options.listen:
                check_strength(secret)
                self.endpoint.use_relays(self._own_credentials())
            if several_hosts:
                self._face_hosts()
            elif joiners and options.listen:
                self._await_joiners()
            made.pop_all()

    def _reserve(self, towards: str | None) -> None:
        """Take a TCP port, in case there are several hosts."""
        if self._options.transport == "unix":
            self._obstacle = "its Options say transport='unix'; leave transport out"
        elif self._own_secret:
            try:
                self._spare = TcpListener(listen_address(None, None, towards))
            except (ValueError, OSError) as error:
                self._obstacle = str(error)

    def _credentials(self, *, beyond_loopback: bool) -> Credentials | None:
        security = self._options.security
        if isinstance(security.tls, Tls):
            return self._own_credentials()
        if security.tls is None and (security.allow_plain or not beyond_loopback):
            return None
        if beyond_loopback:
            check_strength(self._secret)
        return self._own_credentials()

    def _own_credentials(self) -> Credentials:
        """One certificate for all connections: the record of a worker that does not listen names it."""
        if self._made is None:
            tls = self._options.security.tls
            self._made = Credentials(tls if isinstance(tls, Tls) else issue(self._secret, self._name))
        return self._made

    def offer(self, record: WorkerRecord) -> AddressOffer:
        """What this worker brings to the rendezvous."""
        spare = self._spare.address if self._spare is not None else ""
        return AddressOffer(record, spare, self._obstacle, self._own_secret)

    def settle(self, offers: Sequence[AddressOffer]) -> list[WorkerRecord]:
        """Listen where the others will look for this worker; return the records of all. Raises ``RendezvousError``."""
        records = settle(offers)
        if on_several_hosts(offers):
            self._face_hosts()
        elif self._spare is not None:
            self._spare.close()
        return records

    def _face_hosts(self) -> None:
        """There are workers on other hosts: connect to them, and let them connect if the options do not say how."""
        if self._spare is not None or not self._options.listen:
            self.endpoint.use_tcp(self._spare, self._credentials(beyond_loopback=True))
            self._spare = None

    def _await_joiners(self) -> None:
        try:
            self._face_hosts()
        except ValueError as error:  # the secret is too short
            self._obstacle = str(error)
            if self._spare is not None:
                self._spare.close()
                self._spare = None
        if self._obstacle:
            log.info("workers of other hosts cannot join worker '%s': %s", self._name, self._obstacle)

    def close(self) -> None:
        """Close the endpoint."""
        if self._spare is not None:
            self._spare.close()
        self.endpoint.close()


def check_neighbor(peers: Peers, endpoint: SocketEndpoint, records: Sequence[WorkerRecord], timeout: float) -> None:
    """Connect to one worker of another host, to see now what the first call would find: that its address does not
    answer, or that it has another secret. One connection for each worker, however many there are.

    If that fails, this waits a moment: the worker that connects to this one should get an answer, not a closed port.

    Raises:
        RendezvousError: It does not answer. Not if it has left already.
        AuthenticationError: The two workers do not accept each other.
    """
    try:
        _try_neighbor(peers, endpoint, records, timeout)
    except (RendezvousError, AuthenticationError):
        time.sleep(_LINGER_SECONDS)
        raise


def _try_neighbor(peers: Peers, endpoint: SocketEndpoint, records: Sequence[WorkerRecord], timeout: float) -> None:
    own = peers.own.record
    other = neighbor_of(own, records)
    address = choose(other, own.host) if other is not None else None
    if other is None or address is None:
        return
    certificates = peers.connections.certificates
    try:
        channel = endpoint.connect(address, timeout=timeout)
        channel.close()
        if not certificates.allow(channel, other.name):
            raise AuthenticationError(certificates.mismatch(channel, other.name))
    except AuthenticationError as error:
        text = f"cannot talk to worker '{other.name}' at {address}: {error}"
        raise AuthenticationError(text, worker=other.name) from None
    except (ConnectionError, ValueError) as error:
        if isinstance(error, ConnectTimeoutError) or not _has_left(peers, other):
            raise RendezvousError(
                f"worker '{own.name}' cannot reach worker '{other.name}' on another host: {error}; if it has "
                "not failed itself, check that no firewall is between them, and that it listens on a network of both "
                "(Options(bind=...), Options(advertise=...))",
                worker=other.name,
            ) from error


def _has_left(peers: Peers, other: WorkerRecord) -> bool:
    """Whether a worker has left in order. Its announcement may still be on its way."""
    deadline = time.monotonic() + _FAREWELL_SECONDS
    while peers.table.gone(other.incarnation) is None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
