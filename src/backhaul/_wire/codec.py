"""Python values <-> payloads. Plain data is sent without pickle. Everything else is pickled. Tensors and large buffers
are sent beside the pickle.

Functions and classes that both ends can import are sent by name. Lambdas, closures and functions and classes that only
``__main__`` defines are sent by value (cloudpickle). This module decodes bytes of authenticated peers only.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from backhaul._options import UNTRUSTED_VALUES
from backhaul._runtime import interrupts
from backhaul._wire import nested
from backhaul._wire.device_link import Lease, Link
from backhaul._wire.frames import MAX_BODY, MAX_BUFFERS
from backhaul._wire.memory import Buffer
from backhaul._wire.messages import NESTED, TREE, Payload
from backhaul._wire.pickling import Pickler, Unpickler
from backhaul._wire.plain import MAX_DEPTH, MAX_DIMENSIONS, Flattener, restore
from backhaul._wire.tensors.reader import tensors_of
from backhaul._wire.tensors.specs import EMPTY_TABLE
from backhaul._wire.tensors.subclasses import refuse_gradients
from backhaul._wire.tensors.writer import TensorWriter, write_all_ordinary, write_lent, write_ordinary
from backhaul._wire.unsendable import explain, path_to
from backhaul.errors import BackhaulError, ProtocolError, SerializationError

_ALWAYS_PLAIN = frozenset((type(None), bool, float, bytes))
_MAX_PLAIN_VALUES = 64  # a longer list is left to pickle, which is written in C


class Encoded(msgspec.Struct, eq=False):
    """A list of values, ready to be sent.

    Attributes:
        payload: What the body of the message contains.
        buffers: The buffers of the frame.
        keep: The owners of the buffers' memory.
        tensors: The tensors of the message's table, then the wrappers that require grad (see ``tensors.subclasses``).
        parcels: What reducers of higher layers collect during pickling, for their interceptors.
        lease: The slots of a link that the message uses, if any. The sender informs the lease when a channel has the
            message.
        copies: The indices of tensors that stand for parameters inside objects, such as modules, that are sent by
            value. The receiver gets parameters of its own for them.
        unrecorded: Paths to values that require grad and whose gradient would be lost, with their types.
    """

    payload: Payload
    buffers: list[Buffer]
    keep: Any
    tensors: list[torch.Tensor]
    parcels: Sequence[Any] = ()
    lease: Lease | None = None
    unrecorded: Sequence[str] = ()
    copies: frozenset[int] = frozenset()

    @property
    def recorded(self) -> tuple[int, ...]:
        """The positions in ``tensors`` of those that require grad."""
        return tuple([index for index, tensor in enumerate(self.tensors) if tensor.requires_grad])

    def discard(self) -> None:
        """The values are not going to be sent: free their slots at once."""
        if self.lease is not None:
            self.lease.end()


def encode(
    values: Sequence[Any],
    *,
    names: Sequence[str],
    main_shared: bool = False,
    plain: bool = False,
    link: Link | None = None,
    apart: bool = False,
) -> Encoded:
    """Encode a list of values. Raises ``SerializationError``, which names the part that cannot be sent.

    Args:
        values: The values.
        names: The names of the values in that error.
        main_shared: Whether ``__main__`` is the same program at the other end.
        plain: Whether pickle is forbidden.
        link: Sends tensors on devices. None: tensors on devices cannot be sent.
        apart: Whether each tensor arrives as one of its own, also if it comes twice or shares memory with another. Then
            none may require grad.
    """
    try:
        flat = _encode_plain(values, link, apart)
        if flat is None and not plain:
            flat = _encode_nested(values, main_shared, link, apart)
    except Exception:  # a tensor cannot be sent; the other encoding raises an error that names it
        flat = None
    if apart and flat is None:
        values = _detached_where_repeated(values)
    if plain:
        found = flat if flat is not None and not _special(flat.tensors) else _encode_tree(values, names, link)
    else:
        found = flat or _encode_pickled(values, names, main_shared, link)
    if forward_ad._current_level >= 0:  # inside ``forward_ad.dual_level()``, on any thread
        _refuse_tangents(found, values, names)
    return found


def _refuse_tangents(encoded: Encoded, values: Sequence[Any], names: Sequence[str]) -> None:
    for tensor in encoded.tensors:
        if forward_ad.unpack_dual(tensor).tangent is not None:
            encoded.discard()
            path = path_to(tensor, values, names)
            raise SerializationError(
                f"{path} carries a forward-mode tangent, which cannot be sent to another worker; run the forward-mode "
                "computation inside the called function, use reverse mode (backhaul.backward), or send the primal of "
                "torch.autograd.forward_ad.unpack_dual",
                path=path,
            )


def _detached_where_repeated(values: Sequence[Any]) -> list[Any]:
    """The values. A tensor that comes again is another one on the same memory."""
    seen: set[int] = set()
    found = []
    for value in values:
        repeated = isinstance(value, torch.Tensor) and id(value) in seen
        seen.add(id(value))
        found.append(value.detach() if repeated else value)
    return found


def _special(tensors: Sequence[torch.Tensor]) -> bool:
    return any(tensor.is_quantized or tensor.is_nested or tensor.dim() > MAX_DIMENSIONS for tensor in tensors)


def _encode_tree(values: Sequence[Any], names: Sequence[str], link: Link | None) -> Encoded:
    writer = TensorWriter(link)
    flattener = Flattener(writer)
    tree = [flattener.flatten(value, name) for name, value in zip(names, values, strict=True)]
    tensors = writer.tensors
    inline = link is None or not link.takes_host
    ordinary = write_all_ordinary(tensors) if inline and tensors else None
    if ordinary is not None:  # this table has a twentieth of the values of the general table
        return Encoded(Payload(ordinary[0], tree, loose=TREE), ordinary[1], tensors, tensors)
    table, buffers, keep = writer.finish()
    if len(buffers) > MAX_BUFFERS:
        _unsent(writer)
        raise SerializationError(
            f"the message is too much for one frame: it has {len(buffers)} tensor buffers, and the limit is "
            f"{MAX_BUFFERS}; send fewer tensors in one call"
        )
    return Encoded(Payload(table, tree, loose=TREE), buffers, [keep], writer.tensors, lease=writer.lease)


def _unsent(writer: TensorWriter) -> None:
    """Return the slots now. The error that follows keeps its frames alive, and with them the lease."""
    if writer.lease is not None:
        writer.lease.end()


def _encode_plain(values: Sequence[Any], link: Link | None, apart: bool) -> Encoded | None:
    """Encode plain scalars and tensors; None if there is any other value."""
    if len(values) > _MAX_PLAIN_VALUES:
        return None
    plain = list(values)
    tensor: torch.Tensor | None = None
    more: list[tuple[int, torch.Tensor]] | None = None
    for place, value in enumerate(values):
        kind = type(value)
        if kind is torch.Tensor and not value.__dict__:
            plain[place] = None
            if tensor is None:
                tensor, at = value, place
            else:
                more = more or [(at, tensor)]
                more.append((place, value))
        elif not (
            kind in _ALWAYS_PLAIN
            or (kind is int and -(1 << 63) <= value < 1 << 64)
            or (kind is str and value.isascii())
        ):
            return None
    if tensor is None:
        return Encoded(Payload(EMPTY_TABLE, plain), [], [], [])
    if more is None and (link is None or not link.takes_host):
        ordinary = write_ordinary(tensor)
        if ordinary is not None:
            table, buffer = ordinary
            return Encoded(Payload(table, plain, ((at, 0),)), [buffer], [tensor], [tensor])
    if more is None and link is not None and link.takes(tensor.device):
        lent = write_lent(tensor, link)
        if lent is not None:
            return Encoded(Payload(lent[0], plain, ((at, 0),)), [], [tensor], [tensor], lease=lent[1])
    placed = more or [(at, tensor)]
    if apart:
        where = tuple([(place, index) for index, (place, _) in enumerate(placed)])
        return _encode_tensors(plain, [tensor for _, tensor in placed], link, where, apart=True)
    by_id = {id(tensor): tensor for _, tensor in placed}
    ids = list(by_id)
    where = tuple((place, ids.index(id(tensor))) for place, tensor in placed)
    return _encode_tensors(plain, list(by_id.values()), link, where)


def _encode_nested(values: Sequence[Any], main_shared: bool, link: Link | None, apart: bool) -> Encoded | None:
    """Encode containers of plain scalars and tensors, references and functions; None if there is any other value."""
    writer = nested.NestedWriter(main_shared, apart=apart)
    try:
        flat = [writer.flatten(value) for value in values]
    except nested.NotNestedError:
        return None
    if len(writer.tensors) > MAX_BUFFERS:
        return None
    encoded = _encode_tensors(flat, writer.tensors, link, (), NESTED, apart=apart)
    if encoded is not None:
        encoded.parcels = writer.parcels
    return encoded


def _encode_tensors(
    plain: list[Any],
    distinct: list[torch.Tensor],
    link: Link | None,
    where: tuple[tuple[int, int], ...],
    form: int = 0,
    *,
    apart: bool = False,
) -> Encoded | None:
    """Encode values with several tensors, or one that is not ordinary. None if the link does not take the device of a
    tensor.
    """
    if not distinct:
        return Encoded(Payload(EMPTY_TABLE, plain, loose=form), [], [], [])
    ordinary = None if link is not None and link.takes_host else write_all_ordinary(distinct, apart=apart)
    if ordinary is not None:
        table, buffers = ordinary
        return Encoded(Payload(table, plain, where, loose=form), buffers, distinct, distinct)
    writer = TensorWriter(link)
    for tensor in distinct:
        if tensor.device.type != "cpu" and (link is None or not link.takes(tensor.device)):
            return None
        writer.add(tensor)
    table, buffers, keep = writer.finish()
    return Encoded(Payload(table, plain, where, loose=form), buffers, [keep], distinct, lease=writer.lease)


@interrupts.calls_out
def _encode_pickled(values: Sequence[Any], names: Sequence[str], main_shared: bool, link: Link | None) -> Encoded:
    writer = TensorWriter(link)
    loose: list[pickle.PickleBuffer] = []
    out = io.BytesIO()
    parcels: list[Any] = []
    try:
        pickler = Pickler(out, writer, loose, main_shared, parcels)
        pickler.dump(list(values))
        table, buffers, keep = writer.finish()
    except BaseException as error:  # user code may raise anything
        if interrupts.from_signal(error):
            raise
        if isinstance(error, BackhaulError) and not isinstance(error, SerializationError):
            culprit = explain(values, names, main_shared, link, error).path
            error.add_note(f"{culprit} cannot be sent, because it refers to what this error is about")
            raise
        raise explain(values, names, main_shared, link, error) from error
    body = out.getvalue()
    if len(body) > MAX_BODY - (1 << 16) or len(buffers) + len(loose) > MAX_BUFFERS:
        _unsent(writer)
        raise SerializationError(
            f"the message is too much for one frame: it has {len(body)} bytes of pickle and {len(buffers)} tensor "
            f"buffers, and the limits are {MAX_BODY} and {MAX_BUFFERS}; split it over several calls"
        )
    buffers.extend(buffer.raw() for buffer in loose)
    wrapped = pickler.subclasses.wrapped
    form = Payload(table, pickle=body, loose=len(loose), wrapped=len(wrapped))
    encoded = Encoded(form, buffers, [keep, loose], [*writer.tensors, *wrapped], parcels, writer.lease)
    if pickler.subclasses.parameters:
        encoded.copies = _copies(pickler.subclasses.parameters, writer.tensors, values, names)
    if lost := [*pickler.subclasses.lost, *pickler.scripted]:
        encoded.unrecorded = [f"{path_to(value, values, names)} (a {type(value).__name__})" for value in lost]
    return encoded


def _copies(
    parameters: Sequence[tuple[torch.Tensor, torch.Tensor]],
    tensors: Sequence[torch.Tensor],
    values: Sequence[Any],
    names: Sequence[str],
) -> frozenset[int]:
    """See ``Encoded.copies``. Parameters that are values themselves, or in lists, tuples and dicts, are no copies, and
    neither are those of a module that is called.
    """
    direct = {id(leaf) for leaf in tree_leaves(list(values))}
    called = values[0] if names[0] == "function" else None
    for each in (called, getattr(called, "__self__", None)):
        if isinstance(each, torch.nn.Module):
            direct.update(map(id, each.parameters()))
    inside = {id(alias) for parameter, alias in parameters if id(parameter) not in direct}
    return frozenset(index for index, tensor in enumerate(tensors) if id(tensor) in inside) if inside else frozenset()


def decode(payload: Payload, buffers: Sequence[Buffer], link: Link | None = None, *, why: str = "") -> list[Any]:
    """Decode a list of values. The tensors live on the memory of ``buffers``, which must be writable, and of the slots
    of ``link``.

    Args:
        payload: The encoded values.
        buffers: The buffers of the message.
        link: Gives access to tensors of devices.
        why: If given, a gradient of a received tensor raises an error with this text.
    """
    tensors = tensors_of(payload, buffers, link)
    return load(payload, buffers, refuse_gradients(tensors, why) if why else tensors)


@interrupts.calls_out
def load(
    payload: Payload, buffers: Sequence[Buffer], tensors: Sequence[torch.Tensor], worker: object = None
) -> list[Any]:
    """Decode a payload with these tensors, which may differ from those of the message, for the worker ``worker``."""
    values = payload.plain
    if values is None:
        loose = buffers[len(buffers) - payload.loose :]
        values = Unpickler(io.BytesIO(payload.pickle), tensors, loose, worker).load()
        if not isinstance(values, list):
            raise ProtocolError(f"the pickle of a payload must be a list of values, not a {type(values).__name__}")
        return values
    if payload.loose == NESTED:
        return [nested.restore(value, tensors, worker) for value in values]
    if payload.loose == TREE:
        options = getattr(worker, "options", None)
        return restore(
            values,
            tensors,
            MAX_DEPTH if options is None else options.limits.depth,
            UNTRUSTED_VALUES if options is None else options.value_limit,
        )
    try:
        for place, index in payload.places:
            values[place] = tensors[index]
    except IndexError:
        raise ProtocolError(
            f"a payload puts tensor {index} into place {place}, but has {len(tensors)} tensors and {len(values)} places"
        ) from None
    return values
