"""Which messages to a peer are compressed, and in which form: by the options, by the block and function of a call, and
by what the peer can read. ``_wire.compression`` does the work.

Knows records, options and encoded messages. Knows no channel and no call.
"""

from __future__ import annotations

import contextvars
import fnmatch
import logging
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar

from backhaul._options import Codec, Options
from backhaul._rpc.cluster.membership_table import WorkerRecord, choose
from backhaul._runtime.compile_marks import graph_break
from backhaul._wire.codec import Encoded
from backhaul._wire.compression import compress
from backhaul._wire.tensors.buffer_forms import readable_forms

log = logging.getLogger("backhaul")

F = TypeVar("F", bound=Callable[..., Any])

LEAST_COMPRESSED = 1 << 15
"""Frames of at most this many bytes travel as they are. Larger ones take a slower path anyway, see
``Peer.unchecked_bytes``.
"""

_NONE = Codec()
_MARK = "_backhaul_codec"
_in_block: contextvars.ContextVar[Codec | None] = contextvars.ContextVar("codec", default=None)


class compression:
    """Choose the codec of some calls, in place of ``Options.compression``.

    As a context manager: the arguments of calls that are made in the block have this codec. As a decorator: the
    arguments and the results of ``rpc_sync`` and ``rpc_async`` to the function have it, if both workers import the
    function with the decorator. The codec of a block counts more than that of a function. Gradients are not affected:
    they have the codec of the options. ``where`` and what the peer can read count as they do in the options.

    Args:
        codec: The codec; its ``forward`` counts. None: tensors travel as they are.

    Raises:
        ValueError: The codec needs a package that is not installed.

    Example:
        >>> import torch, backhaul as bh
        >>> @bh.compression(None)
        ... def weights() -> torch.Tensor:
        ...     return torch.ones(100_000)
        >>> with bh.cluster(2), bh.compression(bh.Codec(forward="fp16")):
        ...     bh.rpc_sync("worker1", torch.sum, args=(torch.ones(100_000),)).item()
        100000.0
    """

    @graph_break
    def __init__(self, codec: Codec | None) -> None:
        if codec is not None and not isinstance(codec, Codec):
            raise TypeError(f"codec must be a Codec or None, got {codec!r}; write Codec(forward=...)")
        check_codec(codec)
        self._codec = codec or _NONE
        self._before: list[contextvars.Token[Codec | None]] = []

    def __call__(self, function: F) -> F:
        setattr(function, _MARK, self._codec)
        return function

    @graph_break
    def __enter__(self) -> None:
        self._before.append(_in_block.set(self._codec))

    @graph_break
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _in_block.reset(self._before.pop())


def as_it_is() -> compression:
    """A block whose calls send their arguments as they are: the state of a module, for example."""
    return compression(None)


def check_codec(codec: Codec | None) -> None:
    """Raise ``ValueError`` if this process cannot use a codec."""
    missing = {codec.forward, codec.backward} - {None, *readable_forms()} if codec is not None else ()
    if missing:
        raise ValueError(
            f"{codec} needs zstd, which is not installed; install backhaul[compression], or choose another codec"
        )


def check_codecs(options: Options) -> None:
    """Raise ``ValueError`` if this process cannot use the codecs in its options."""
    given = options.compression
    for codec in given.values() if isinstance(given, Mapping) else (given,):
        check_codec(codec)


class PeerCompression:
    """How one worker compresses what it sends to one peer. Nothing in it changes.

    Args:
        options: Those of the worker.
        own: The worker.
        record: The peer.

    Attributes:
        backward: The form of gradients; empty: they travel as they are.
    """

    __slots__ = ("_far", "_forms", "_forward", "_near", "backward")

    def __init__(self, options: Options, own: WorkerRecord, record: WorkerRecord) -> None:
        self._far = own.host != record.host
        self._near = _may_compress_on_host(options, own, record)
        self._forms = record.forms
        given = options.compression
        codec: Codec | None
        if isinstance(given, Mapping):
            codec = next((found for name, found in given.items() if fnmatch.fnmatchcase(record.name, name)), None)
        else:
            codec = given
        codec = codec or _NONE
        self._forward, self.backward = self._usable(codec.forward, codec), self._usable(codec.backward, codec)
        lacking = {codec.forward, codec.backward} - {None, *record.forms}
        if lacking and (self._far or (codec.where == "always" and self._near)):
            log.warning(
                "worker '%s' cannot read the codec %s, so tensors travel to it as they are; install the package there",
                record.name,
                " and ".join(sorted(map(str, lacking))),
            )

    def _usable(self, form: str | None, codec: Codec) -> str:
        applies = self._far or (codec.where == "always" and self._near)
        return form if form is not None and applies and form in self._forms else ""

    def of_call(self, encoded: Encoded, function: object) -> Encoded | None:
        """The arguments of a call, compressed. None: they travel as they are."""
        return self._compress(encoded, _in_block.get() or getattr(function, _MARK, None))

    def of_reply(self, encoded: Encoded, function: object) -> Encoded | None:
        """The result of a call to ``function``, compressed. None: it travels as it is."""
        return self._compress(encoded, getattr(function, _MARK, None))

    def _compress(self, encoded: Encoded, codec: Codec | None) -> Encoded | None:
        form = self._forward if codec is None else self._usable(codec.forward, codec)
        return compress(encoded, form) if form else None

    def of_gradients(self, encoded: Encoded) -> Encoded | None:
        """Gradients, compressed. None: they travel as they are."""
        return compress(encoded, self.backward) if self.backward else None


def _may_compress_on_host(options: Options, own: WorkerRecord, record: WorkerRecord) -> bool:
    """Whether ``where="always"`` holds for a peer on the same host. Either of the two may have opened the channel. What
    goes through shared memory, or stays in the process, is not compressed: that would only cost time.
    """
    addresses = {choose(record, own.host) or "", choose(own, record.host) or ""}
    schemes = {address.partition(":")[0] for address in addresses}
    if record.id == own.id or "inproc" in schemes:
        return False
    return "unix" not in schemes or options.shm_bytes == 0
