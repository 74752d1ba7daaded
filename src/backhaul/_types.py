"""Names, ids and options: the plain data that all layers share. Imports nothing of ours."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NewType

WorkerId = NewType("WorkerId", int)
"""A worker's place in the cluster, 0 to 65535 (16 bits, so that it fits into a context id)."""

CallId = NewType("CallId", int)
"""Identifies one call among all calls of its caller."""

DeviceMaps = Mapping[str, Mapping[Any, Any] | Literal["cpu"]]
"""By worker: device here -> device there (``0``, ``"cuda:0"``, ``"cpu"`` or ``torch.device``), or ``"cpu"``."""

MAX_WORKERS = 1 << 16

MIN_VALUES = 4096
"""The lowest ``Options.max_values``: messages that Backhaul sends on its own account have fewer values."""

UNTRUSTED_VALUES = 1 << 16
"""The default of ``Options.max_values`` where peers are not trusted."""

_TIMES = (
    "timeout",
    "connect_timeout",
    "rendezvous_timeout",
    "backward_timeout",
    "shutdown_timeout",
    "heartbeat_interval",
    "suspect_after",
    "lost_after",
)

_DEVICE = re.compile(r"cuda:(0|[1-9][0-9]{0,2})")
_NAME = re.compile(r"[A-Za-z0-9_:.-]{1,128}")


def check_name(name: str) -> str:
    """Return ``name`` if it is a valid name of a worker, else raise ``ValueError``."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a worker name: use 1 to 128 letters, digits, '_', '-', ':' or '.'")
    return name


def device_name(device: object) -> str:
    """The name of a device: ``"cpu"``, or ``"cuda:0"`` and so on. Raises ``ValueError`` for other devices.

    Example:
        >>> device_name(1), device_name("cuda"), device_name("cpu")
        ('cuda:1', 'cuda:0', 'cpu')
    """
    number = isinstance(device, int) and not isinstance(device, bool)
    name = f"cuda:{device}" if number else str(device)  # the text of a torch.device is the same
    name = "cuda:0" if name == "cuda" else name
    if name != "cpu" and not _DEVICE.fullmatch(name):
        raise ValueError(f"{device!r} is not a device: use an index, 'cuda:<index>' or 'cpu'")
    return name


def first_number(incarnation: str) -> int:
    """The first id that a worker gives. Each incarnation starts at another place in the 48 bits of an id. Otherwise
    other workers could confuse its objects with those of an earlier incarnation.
    """
    return 1 + (zlib.crc32(incarnation.encode()) << 15)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Identifies one worker of the cluster.

    Attributes:
        name: The unique name, as given to ``init``.
        id: The unique number. It is the rank, if the workers have ranks.
    """

    name: str
    id: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """What a worker proves itself with, and whom it believes, where TCP is encrypted. All files are PEM.

    Attributes:
        certificate: This worker's certificate, with those between it and the authority.
        key: Its private key.
        authority: Certificates of those who may have signed the others' certificates. Use an authority of the cluster's
            own: whoever has a certificate of it may try to take part.
        names: Whether a worker's certificate must carry the worker's name as a subject alternative name (DNS). Without
            that any member can claim to be any other.
    """

    certificate: str | Path
    key: str | Path
    authority: str | Path
    names: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How one worker behaves. All have working defaults; times are in seconds, sizes in bytes.

    Attributes:
        timeout: Default timeout of a call; 0 means none.
        threads: How many handlers run at once. Handlers that wait for Backhaul do not count, nor do scripted ones that
            wait in script, and a request that has waited long for a place runs anyway, so this can slow calls down
            but never block them.
        transport: ``"auto"`` listens on a Unix socket, and on TCP too where ``bind`` is given; ``"unix"`` and
            ``"tcp"`` listen on that alone.
        bind: Host or IP address for TCP to listen on; loopback unless given. Beyond loopback a ``secret`` and ``tls``
            are required.
        tls: Certificates: TCP is then encrypted, and both ends prove who they are. ``"auto"``: made by ``launch`` for
            that launch alone.
        allow_plain: Whether TCP beyond loopback may go without ``tls``: everyone on the way can read and change it.
        secret: The cluster secret, which every peer must prove to know before it is listened to. Default: the
            environment's ``BACKHAUL_SECRET``, else one made by worker 0 and shared through the store.
        init_method: Where the workers meet: ``env://`` (torchrun's environment), ``tcp://host:port`` or
            ``file:///path``. Not used where ``init`` is given a store.
        trusted: Whether the others may run any code here, as members of one program do. If not, they can call only what
            is exposed (see ``expose``), with plain data and tensors; nothing of theirs is unpickled.
        allow: With ``trusted=False``: who may call what of that, as patterns of worker names -> patterns of function
            names. Default: everyone may, but for what ``expose`` says.
        tracebacks: Whether errors go to callers with their traceback. Default: as ``trusted``.
        max_frame_bytes: Largest message this worker accepts.
        max_depth: How deep the values of a message may be nested, where they are not pickled.
        max_values: How many values one message may have: numbers, texts, lists, keys and entries of dicts, and the
            numbers that describe its tensors. A pickle counts as one. Default: 65536 where not ``trusted``, else any.
        max_tensors: How many tensors a call or its result may have. Default: 16384 where not ``trusted``, else any.
        max_calls: How many calls of one peer are served at once; more are refused. Default: 1024 where not
            ``trusted``, else any.
        max_bytes_in_flight: How many bytes the calls of one peer that are being served may have together; a single one
            is bounded by ``max_frame_bytes`` alone. Default: 1 GiB where not ``trusted``, else any.
        max_contexts: How many autograd contexts one peer may bring here at once. Default: 1024 where not ``trusted``,
            else any.
        shm_bytes: How much shared memory this worker makes at most, for large tensors that it sends to others on its
            host; what finds no place there goes through the socket. 0 switches it off. Default: an eighth of the
            memory, at most 2 GiB.
        device_maps: By worker, on which of its devices a tensor of this one's arrives: ``{0: 1}`` for one of ``cuda:0``
            that goes to its ``cuda:1``. Replies and gradients go back the other way. ``"cpu"`` in the place of a map:
            all arrives on the CPU, on both sides. Without a map a tensor arrives on the device of the same index.
        devices: ``"auto"``: a tensor goes where ``device_maps`` says, else to the device of the same index; if there is
            none, the call raises ``SerializationError``. ``"cpu"``: all tensors that this worker sends and gets arrive
            on the CPU, but for the workers in ``device_maps``. ``"mapped"``: tensors of this worker's devices travel
            only as ``device_maps`` says; where that says nothing, a call that takes one along raises
            ``SerializationError``.
        device_slot_bytes: How much memory of each of its devices this worker takes at most for tensors that it sends to
            others on its host; what finds no place there is copied through the host. 0 switches it off. Default: an
            eighth of the device's memory.
        connect_timeout: How long a first call may take to reach its peer; at most ``lost_after``, where that is on.
        rendezvous_timeout: How long ``init`` waits for the others, in all. After 5 s it logs which ranks are missing,
            and the error at the end names them. The default is long because the processes of a large launch on few
            cores may take minutes to import torch.
        backward_timeout: How long a backward pass may take; 0 means any time.
        shutdown_timeout: How long ``shutdown`` waits for the others by default.
        heartbeat_interval: How often this worker looks whether its peers are alive, and at the latest says that it is
            itself. 0 switches all of that off.
        suspect_after: A peer of which nothing was heard for so long is suspected: that is logged, counted, and said by
            errors. 0: never.
        lost_after: A peer of which nothing was heard for so long is lost: its channel is closed, and what waits for it
            fails with ``PeerLostError``. 0: never.
    """

    follows_reference: ClassVar[bool] = False
    """Whether tensors that are not recorded keep that they require grad, as in the reference: those received outside
    a context are leaves, and ``no_grad`` does not change what is sent. So it is in ``backhaul.compat``.
    """

    timeout: float = 60.0
    threads: int = 16
    transport: Literal["auto", "unix", "tcp"] = "auto"
    bind: str | None = None
    tls: Tls | Literal["auto"] | None = None
    allow_plain: bool = False
    secret: str | bytes | None = None
    trusted: bool = True
    allow: Mapping[str, Sequence[str]] | None = None
    tracebacks: bool | None = None
    init_method: str | None = None
    max_frame_bytes: int = 8 << 30
    max_depth: int = 64
    max_values: int | None = None
    max_tensors: int | None = None
    max_calls: int | None = None
    max_bytes_in_flight: int | None = None
    max_contexts: int | None = None
    shm_bytes: int | None = None
    device_maps: DeviceMaps | None = None
    devices: Literal["auto", "cpu", "mapped"] = "auto"
    device_slot_bytes: int | None = None
    connect_timeout: float = 20.0
    rendezvous_timeout: float = 120.0
    backward_timeout: float = 600.0
    shutdown_timeout: float = 60.0
    heartbeat_interval: float = 0.5
    suspect_after: float = 2.0
    lost_after: float = 10.0

    def __post_init__(self) -> None:
        for field in _TIMES:
            if not getattr(self, field) >= 0:  # so that a NaN is refused too
                raise ValueError(f"{field} must not be negative, got {getattr(self, field)}")
        self._check_heartbeat()
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, got {self.threads}")
        if self.transport not in ("auto", "unix", "tcp"):
            raise ValueError(f"transport must be 'auto', 'unix' or 'tcp', got {self.transport!r}")
        if self.transport == "unix" and (self.bind, self.tls) != (None, None):
            raise ValueError("bind and tls are for TCP, but transport is 'unix'")
        if self.tls is not None and self.tls != "auto" and not isinstance(self.tls, Tls):
            raise ValueError(f"tls must be a Tls, 'auto' or None, got {self.tls!r}")
        if self.allow is not None:
            _check_allow(self.allow, self.trusted)
        if self.devices not in ("auto", "cpu", "mapped"):
            raise ValueError(f"devices must be 'auto', 'cpu' or 'mapped', got {self.devices!r}")
        if self.device_maps is not None and not isinstance(self.device_maps, Mapping):
            raise ValueError(
                "device_maps has, by name of a worker, a map from device to device or 'cpu', "
                f"not {self.device_maps!r}; devices='cpu' is for all workers"
            )
        for to, given in (self.device_maps or {}).items():
            _check_map(check_name(to), given)
        self._check_limits()

    def _check_limits(self) -> None:
        if self.max_frame_bytes < 1 << 16:
            raise ValueError(f"max_frame_bytes must be at least 65536, got {self.max_frame_bytes}")
        for field in ("shm_bytes", "device_slot_bytes"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise ValueError(f"{field} must be a number of bytes, 0 or more, got {value!r}")
        if not 1 <= self.max_depth <= 256:
            raise ValueError(f"max_depth must be 1 to 256, got {self.max_depth}")
        if self.max_values is not None and self.max_values < MIN_VALUES:
            raise ValueError(f"max_values must be at least {MIN_VALUES}, got {self.max_values}")
        for field in ("max_tensors", "max_calls", "max_bytes_in_flight", "max_contexts"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} must be at least 1, got {value}")

    @property
    def value_limit(self) -> int | None:
        """``max_values``, or its default; None: any number."""
        return UNTRUSTED_VALUES if self.max_values is None and not self.trusted else self.max_values

    def _check_heartbeat(self) -> None:
        if self.heartbeat_interval == float("inf"):
            raise ValueError("heartbeat_interval must be finite; 0 switches heartbeats off")
        for field in ("suspect_after", "lost_after"):
            if 0 < getattr(self, field) < 2 * self.heartbeat_interval:
                raise ValueError(
                    f"{field} must be at least twice heartbeat_interval ({self.heartbeat_interval}), or 0 for never; "
                    f"got {getattr(self, field)}"
                )
        if 0 < self.lost_after < self.suspect_after:
            raise ValueError(f"lost_after must not be less than suspect_after, got {self.lost_after}")

    def __repr__(self) -> str:
        shown = (f for f in self.__slots__ if f != "secret")
        return f"Options({', '.join(f'{f}={getattr(self, f)!r}' for f in shown)})"


def _check_allow(allow: Mapping[str, Sequence[str]], trusted: bool) -> None:
    if trusted:
        raise ValueError("allow needs trusted=False: those who are trusted can send any code, so a list binds nobody")
    for caller, functions in allow.items():
        if not isinstance(caller, str) or isinstance(functions, str) or not all(isinstance(f, str) for f in functions):
            raise ValueError(f"allow maps patterns of workers to lists of patterns of functions, not {allow!r}")


def _check_map(to: str, given: object) -> None:
    if given == "cpu":
        return
    if not isinstance(given, Mapping):
        raise ValueError(f"device_maps has a map from device to device, or 'cpu', for each worker, not {given!r}")
    for devices in (given.keys(), given.values()):
        names = [device_name(device) for device in devices]
        if len(set(names)) < len(names):
            raise ValueError(f"the map for '{to}' must be one-to-one, so that it can be gone back: {given!r}")
