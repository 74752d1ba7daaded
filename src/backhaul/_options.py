"""How a worker behaves: ``Options`` and its groups. Plain data that checks itself. Knows only names and devices."""

# Over the limit because each option is described where it stands: half of the lines are docstrings.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from backhaul._types import DeviceMaps, check_name, device_name

G = TypeVar("G")

MIN_VALUES = 4096
"""The lowest ``Limits.values``: messages that Backhaul sends on its own account have fewer values."""

UNTRUSTED_VALUES = 1 << 16
"""The default of ``Limits.values`` where peers are not trusted."""

_TIMES = ("timeout", "connect_timeout", "rendezvous_timeout", "backward_timeout", "shutdown_timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """With what a worker proves its identity over encrypted TCP, and whom it accepts: paths of PEM files, or their
    content as ``bytes``.

    Attributes:
        certificate: This worker's certificate, followed by the intermediate certificates up to the authority.
        key: The private key of that certificate.
        authority: The certificates that may have signed the certificates of other workers. Use an authority made for
            this cluster: everyone who holds a certificate of the authority may try to join.
        names: Whether a worker's certificate must contain the worker's name as a subject alternative name (DNS).
            Without that, any member can claim to be any other member.

    Example:
        >>> tls = Tls(certificate="worker1.pem", key="worker1.key", authority="authority.pem")
        >>> Options(security=Security(tls=tls)).security.tls.names
        True
    """

    certificate: str | Path | bytes
    key: str | Path | bytes
    authority: str | Path | bytes
    names: bool = True

    def __repr__(self) -> str:
        return _shown(self, hidden="key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Whom a worker talks to, and what the others may do.

    Attributes:
        secret: The cluster secret. Every peer must prove that it knows the secret before the worker reads anything
            else from it. Default: the environment variable ``BACKHAUL_SECRET``, else a secret that worker 0 makes and
            shares through the store. Workers on several hosts need one that is set on every host.
        tls: Certificates. TCP is then encrypted, and both ends prove who they are. ``"auto"``: every worker makes its
            certificate from the secret, which then needs 16 characters or more. None: as ``"auto"`` where other hosts
            can reach the worker, and no TLS on loopback.
        allow_plain: Whether TCP runs without TLS beyond loopback too, if ``tls`` is None. Everyone on the network path
            can then read and change the traffic.
        trusted: Whether other workers may run any code here, as the processes of one program may. If False, they can
            call only exposed functions (see ``expose``), with plain data and tensors; nothing they send is unpickled.
        allow: Only with ``trusted=False``: who may call which exposed function, as patterns of worker names ->
            patterns of function names. Default: every worker may call what ``expose`` allows it to call.
        tracebacks: Whether callers get the traceback of an error. Default: the value of ``trusted``.
        monitors: Whether a process that knows the secret, and is no worker, may see what this worker does
            (``backhaul top``): functions, rates, memory, members. Default: the value of ``trusted``.

    Example:
        >>> Security(trusted=False, allow={"client*": ["lookup"]}).trusted
        False
    """

    secret: str | bytes | None = None
    tls: Tls | Literal["auto"] | None = None
    allow_plain: bool = False
    trusted: bool = True
    allow: Mapping[str, Sequence[str]] | None = None
    tracebacks: bool | None = None
    monitors: bool | None = None

    def __post_init__(self) -> None:
        if self.tls is not None and self.tls != "auto" and not isinstance(self.tls, Tls):
            raise ValueError(f"tls must be a Tls, 'auto' or None, got {self.tls!r}")
        if self.allow is not None:
            _check_allow(self.allow, self.trusted)

    @property
    def allows_monitors(self) -> bool:
        """``monitors``, or its default."""
        return self.trusted if self.monitors is None else self.monitors

    @property
    def binds_names(self) -> bool:
        """Whether a certificate proves the name of a worker. One that is made from the cluster secret does not: every
        member can make one of any name.
        """
        return isinstance(self.tls, Tls) and self.tls.names

    def __repr__(self) -> str:
        return _shown(self, hidden="secret")


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """When a worker takes a peer for lost. Times are in seconds.

    Attributes:
        heartbeat_interval: How often this worker checks whether its peers are alive, and how often it tells them that
            it is alive if it has nothing else to send. 0 switches the failure detector off.
        suspect_after: A peer that has been silent this long is suspected: the worker logs it, counts it, and names it
            in errors. 0: never.
        lost_after: A peer that has been silent this long is lost: its channel is closed, and everything that waits
            for it fails with ``PeerLostError``. 0: never.
        quiet_above: A worker with more channels than this sends heartbeats less often over channels whose peers nothing
            waits for: the time between two grows with the square of the number of channels, up to a minute. Such a peer
            may then be silent for that much longer. ``inf``: every channel gets one each ``heartbeat_interval``.

    Example:
        >>> Options(liveness=Liveness(suspect_after=5.0, lost_after=60.0)).liveness.lost_after
        60.0
    """

    heartbeat_interval: float = 0.5
    suspect_after: float = 2.0
    lost_after: float = 10.0
    quiet_above: float = 10

    def __post_init__(self) -> None:
        _check_times(self, ("heartbeat_interval", "suspect_after", "lost_after"))
        if not self.quiet_above > 0:
            raise ValueError(f"quiet_above must be more than 0, got {self.quiet_above}")
        if self.heartbeat_interval == float("inf"):
            raise ValueError("heartbeat_interval must be finite; 0 switches heartbeats off")
        for name in ("suspect_after", "lost_after"):
            if 0 < getattr(self, name) < 2 * self.heartbeat_interval:
                raise ValueError(
                    f"{name} must be at least twice heartbeat_interval ({self.heartbeat_interval}), or 0 for never; "
                    f"got {getattr(self, name)}"
                )
        if 0 < self.lost_after < self.suspect_after:
            raise ValueError(f"lost_after must not be less than suspect_after, got {self.lost_after}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Where tensors of CUDA devices arrive.

    Attributes:
        maps: For each worker, on which of its devices a tensor from here arrives: ``{"worker1": {0: 1}}`` sends
            tensors of ``cuda:0`` to ``cuda:1`` of worker1. Replies and gradients take the opposite way. ``"cpu"`` in
            place of a map: all tensors arrive on the CPU, in both directions.
        placement: What happens without a map. ``"auto"``: a tensor arrives on the device of the same index; if the
            receiver has no such device, the call raises ``SerializationError``. ``"cpu"``: tensors arrive on the CPU.
            ``"mapped"``: the call raises ``SerializationError``.
        slot_bytes: The most memory of each device that this worker uses to pass tensors to other workers of its host.
            A tensor that does not fit is copied through host memory. 0 switches this off. Default: an eighth of the
            device's memory.

    Example:
        >>> Options(devices=Devices(maps={"worker1": {"cuda:0": "cuda:1"}})).devices.placement
        'auto'
    """

    maps: DeviceMaps | None = None
    placement: Literal["auto", "cpu", "mapped"] = "auto"
    slot_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.placement not in ("auto", "cpu", "mapped"):
            raise ValueError(f"placement must be 'auto', 'cpu' or 'mapped', got {self.placement!r}")
        if self.maps is not None and not isinstance(self.maps, Mapping):
            raise ValueError(
                "maps must give for each worker name a map from device to device, or 'cpu'; "
                f"got {self.maps!r}. placement='cpu' applies to all workers"
            )
        for to, given in (self.maps or {}).items():
            _check_map(check_name(to), given)
        _check_bytes(self, "slot_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much one message or one peer may ask of a worker. What exceeds a limit is refused with ``LimitError``.

    Attributes:
        frame_bytes: The largest message that this worker accepts.
        depth: How deep the values of a message may be nested, where they are not pickled.
        values: How many values one message may have: numbers, texts, lists, keys and entries of dicts, and the
            numbers that describe its tensors. A pickle counts as one. Default: 65536 if peers are not trusted, else
            no limit.
        tensors: How many tensors a call or its result may have. Default: 16384 if peers are not trusted, else no limit.
        calls: How many calls of one peer are served at once. Default: 1024 if peers are not trusted, else no limit.
        bytes_in_flight: How many bytes the calls of one peer that are being served may have together; a single call
            is limited by ``frame_bytes`` alone. Default: 1 GiB if peers are not trusted, else no limit.
        contexts: How many autograd contexts one peer may open here at once. Default: 1024 if peers are not trusted,
            else no limit.
        relayed: How many connections of workers that do not listen this worker relays, for all of them together.

    Example:
        >>> Options(limits=Limits(calls=64)).limits.calls
        64
    """

    frame_bytes: int = 8 << 30
    depth: int = 64
    values: int | None = None
    tensors: int | None = None
    calls: int | None = None
    bytes_in_flight: int | None = None
    contexts: int | None = None
    relayed: int = 256

    def __post_init__(self) -> None:
        if self.relayed < 0:
            raise ValueError(f"relayed must not be negative, got {self.relayed}")
        if self.frame_bytes < 1 << 16:
            raise ValueError(f"frame_bytes must be at least 65536, got {self.frame_bytes}")
        if not 1 <= self.depth <= 256:
            raise ValueError(f"depth must be 1 to 256, got {self.depth}")
        if self.values is not None and self.values < MIN_VALUES:
            raise ValueError(f"values must be at least {MIN_VALUES}, got {self.values}")
        for name in ("tensors", "calls", "bytes_in_flight", "contexts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


MOST_LANES = 64
"""The most lanes of a channel, see ``Options.lanes``."""

CodecName = Literal["fp16", "bf16", "int8", "zstd"]
"""How the tensors of a message are compressed, see ``Codec``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """How tensors are compressed on their way to another worker. Dense tensors and the values of sparse tensors.

    ``"fp16"`` and ``"bf16"`` send float32 and float64 in 16 bits. ``"int8"`` sends floating-point numbers in 8 bits, as
    multiples of a scale for each 256 of them. ``"zstd"`` changes no value, takes tensors of all dtypes, and needs the
    extra ``compression``. The receiver gets tensors of the dtype that was sent. A lossy codec leaves alone what it
    cannot hold: integers, parameters, tensors inside pickled objects, and a tensor with a value that would overflow.

    Attributes:
        forward: For arguments and results of calls.
        backward: For gradients.
        where: ``"hosts"``: between hosts only. ``"always"``: also between workers of one host that use TCP, or Unix
            sockets without shared memory (``shm_bytes=0``).

    Example:
        >>> Options(compression=Codec(forward="bf16", backward="int8")).compression.where
        'hosts'
    """

    forward: CodecName | None = None
    backward: CodecName | None = None
    where: Literal["hosts", "always"] = "hosts"

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            if getattr(self, name) not in (None, "fp16", "bf16", "int8", "zstd"):
                raise ValueError(f"{name} must be 'fp16', 'bf16', 'int8', 'zstd' or None, got {getattr(self, name)!r}")
        if self.where not in ("hosts", "always"):
            raise ValueError(f"where must be 'hosts' or 'always', got {self.where!r}")


# Over the limit because an option is an attribute; four of them are groups.
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How one worker behaves. Every option has a working default; times are in seconds, sizes in bytes.

    Attributes:
        timeout: Default timeout of a call; 0 means none.
        threads: How many handlers run at once. A handler that waits for Backhaul does not count, nor does a scripted
            handler that waits in script, and a request that has waited long for a thread gets one anyway. A low
            number can therefore slow calls down but never block them.
        transport: ``"auto"`` listens on a Unix socket, and on TCP too if the workers are on several hosts or ``bind``
            is given; ``"unix"`` and ``"tcp"`` listen on that alone. ``"auto"`` is ``"tcp"`` where peers are not trusted
            and certificates name them: Unix sockets have no certificates.
        bind: Where TCP listens: a host name or IP address, also with a port (``"10.0.0.5:7000"``), or ``"if:eth0"`` for
            the address of an interface. Default: the address that reaches the store of the rendezvous, if workers are
            on several hosts, or if one starts alone and others may join it; else none. Beyond loopback a secret is
            required.
        advertise: The host name or IP address that other workers are told, also with a port, where that is not the
            address on which TCP listens. Without a port in ``bind``, TCP listens on this port too.
        listen: Whether workers of other hosts may connect to this one. If not (NAT, firewalls) it opens all connections
            itself, and two such workers reach each other through a member that listens.
        init_method: Where the workers meet: ``env://`` (torchrun's environment), ``tcp://host:port`` or
            ``file:///path``. Not used if ``init`` gets a store.
        shm_bytes: The most shared memory that this worker makes for large tensors which it sends to other workers of
            its host. A tensor that does not fit goes through the socket. 0 switches shared memory off. Default: an
            eighth of the memory, at most 2 GiB.
        spin: The longest time that a thread which waits for a message polls for it before it sleeps, in seconds; at
            most 1. A thread that polls sees a message tens of microseconds sooner, but keeps a processor busy. 0 or
            False: threads never spin. ``"auto"``: up to 20 ms while many processors are free, and a few hundred
            microseconds on machines with fewer than 4 processors. A container counts as a machine with as many
            processors as its cpu quota. A thread spins only if recent messages came within this time, and stops as
            soon as other threads want the processor or the interpreter. So a worker without messages sleeps.
        lanes: How many connections carry large messages to a worker on another host, beside the one for all others. So
            small messages do not wait for large ones, and a packet that is lost delays only a part. 1: one connection
            carries all. ``"auto"``: 16 between hosts (fewer if a worker with many peers may open few files), 1 inside a
            host; a number holds for every TCP connection. They are opened for the first large message. The smaller
            number of both workers counts.
        connect_timeout: How long a first call may take to reach its peer; at most ``liveness.lost_after`` if that is
            not 0.
        rendezvous_timeout: How long ``init`` waits for all other workers. After 5 s it logs which ranks are missing,
            and the error at the end names them. The default is long because the processes of a large launch on few
            cores may take minutes to import torch.
        backward_timeout: How long a backward pass may take; 0 means no limit.
        autograd: ``"plain"`` records calls outside contexts, so that ``loss.backward()`` and ``torch.autograd.grad``
            run over all workers. ``"context"`` records calls inside ``backhaul.context()`` only.
        shutdown_timeout: How long ``shutdown`` waits for the other workers by default.
        compression: How tensors are compressed on their way to other workers: a ``Codec``, or patterns of worker names
            -> codecs, of which the first that matches counts. None, also as a codec: not at all.
        dashboard: Host and port at which worker 0 serves a page that shows the running cluster (port 0: any). Worker 0
            prints the address of the page, with a token, to the standard error. None: no page.
        security: Secrets, certificates, and what other workers may do.
        liveness: Heartbeats, and when a silent peer is lost.
        devices: Where tensors of CUDA devices arrive.
        limits: How much one message or one peer may ask of this worker.

    Example:
        >>> Options(timeout=5.0, liveness=Liveness(lost_after=30.0)).liveness.lost_after
        30.0
    """

    follows_reference: ClassVar[bool] = False
    """Whether tensors that are not recorded keep ``requires_grad``, as in the reference: those received outside a
    context are leaves, and ``no_grad`` does not change what is sent. True in ``backhaul.compat``.
    """

    timeout: float = 60.0
    threads: int = 16
    transport: Literal["auto", "unix", "tcp"] = "auto"
    bind: str | None = None
    advertise: str | None = None
    listen: bool = True
    init_method: str | None = None
    shm_bytes: int | None = None
    spin: float | Literal["auto"] = "auto"
    lanes: int | Literal["auto"] = "auto"
    connect_timeout: float = 20.0
    rendezvous_timeout: float = 120.0
    backward_timeout: float = 600.0
    autograd: Literal["plain", "context"] = "plain"
    shutdown_timeout: float = 60.0
    compression: Codec | Mapping[str, Codec | None] | None = None
    dashboard: str | None = None
    security: Security = field(default_factory=Security)
    liveness: Liveness = field(default_factory=Liveness)
    devices: Devices = field(default_factory=Devices)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        _check_times(self, _TIMES)
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, got {self.threads}")
        if self.transport not in ("auto", "unix", "tcp"):
            raise ValueError(f"transport must be 'auto', 'unix' or 'tcp', got {self.transport!r}")
        if self.autograd not in ("plain", "context"):
            raise ValueError(f"autograd must be 'plain' or 'context', got {self.autograd!r}")
        for name, kind in _GROUPS.items():
            if not isinstance(getattr(self, name), kind):
                raise TypeError(
                    f"{name} must be a {kind.__name__}, got {getattr(self, name)!r}; write "
                    f"Options({name}={kind.__name__}(...))"
                )
        if self.dashboard is not None and not self.security.allows_monitors:
            raise ValueError("dashboard needs security.monitors=True where trusted=False: its page shows all workers")
        if self.transport == "unix" and (self.bind, self.advertise, self.security.tls) != (None, None, None):
            raise ValueError("bind, advertise and security.tls are for TCP, but transport is 'unix'")
        if not self.listen and (self.bind, self.advertise) != (None, None):
            raise ValueError("bind and advertise say where a worker listens, but listen is False")
        _check_bytes(self, "shm_bytes")
        lanes = self.lanes
        if lanes != "auto" and (not isinstance(lanes, int) or lanes is True or not 1 <= lanes <= MOST_LANES):
            raise ValueError(f"lanes must be 'auto' or a number from 1 to {MOST_LANES}, got {lanes!r}")
        _check_compression(self.compression)
        if self.spin != "auto" and not (
            isinstance(self.spin, int | float) and self.spin is not True and 0 <= self.spin <= 1
        ):
            raise ValueError(f"spin must be 'auto' or a number of seconds from 0 to 1, got {self.spin!r}")

    @property
    def tcp_only(self) -> bool:
        """Whether the worker listens on TCP and not on a Unix socket."""
        named = self.security.binds_names and not self.security.trusted
        return self.transport == "tcp" or (self.transport == "auto" and named)

    @property
    def value_limit(self) -> int | None:
        """``limits.values``, or its default; None: no limit."""
        if self.limits.values is None and not self.security.trusted:
            return UNTRUSTED_VALUES
        return self.limits.values


_GROUPS = {"security": Security, "liveness": Liveness, "devices": Devices, "limits": Limits}


def _shown(options: Any, hidden: str) -> str:
    parts = (f"{each.name}={getattr(options, each.name)!r}" for each in fields(options) if each.name != hidden)
    return f"{type(options).__name__}({', '.join(parts)})"


def _check_times(options: object, names: Sequence[str]) -> None:
    for name in names:
        if not getattr(options, name) >= 0:  # written so that NaN is refused too
            raise ValueError(f"{name} must not be negative, got {getattr(options, name)}")


def _check_bytes(options: object, name: str) -> None:
    value = getattr(options, name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ValueError(f"{name} must be a number of bytes, 0 or more, got {value!r}")


def _check_compression(given: object) -> None:
    codecs = given.items() if isinstance(given, Mapping) else (("*", given),)
    if not all(isinstance(name, str) and (codec is None or isinstance(codec, Codec)) for name, codec in codecs):
        raise ValueError(
            f"compression must be a Codec, None, or a mapping of patterns of worker names to these, got {given!r}; "
            "write Codec(forward=...)"
        )


def _check_allow(allow: Mapping[str, Sequence[str]], trusted: bool) -> None:
    if trusted:
        raise ValueError("allow needs trusted=False: trusted workers can send any code, so a list would bind nobody")
    for caller, functions in allow.items():
        if not isinstance(caller, str) or isinstance(functions, str) or not all(isinstance(f, str) for f in functions):
            raise ValueError(f"allow must map patterns of workers to lists of patterns of functions, got {allow!r}")


def _check_map(to: str, given: object) -> None:
    if given == "cpu":
        return
    if not isinstance(given, Mapping):
        raise ValueError(f"maps must give for each worker a map from device to device, or 'cpu'; got {given!r}")
    for devices in (given.keys(), given.values()):
        names = [device_name(device) for device in devices]
        if len(set(names)) < len(names):
            raise ValueError(f"the map for '{to}' must be one-to-one, so that replies can take it back: {given!r}")
