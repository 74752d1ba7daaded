"""Python values <-> payloads: plain data as it is, anything else pickled, tensors and large buffers beside it.

What both ends can import goes by name; lambdas, closures and what only ``__main__`` knows goes by value
(cloudpickle). Only ever applied to bytes of authenticated peers.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import pickle
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle
import msgspec
import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from backhaul._runtime import interrupts
from backhaul._types import UNTRUSTED_VALUES
from backhaul._wire.callables import name_of, resolve
from backhaul._wire.device_link import Lease, Link, TrialEncoding
from backhaul._wire.frames import MAX_BODY, MAX_BUFFERS
from backhaul._wire.global_state import refuse_state
from backhaul._wire.memory import Buffer
from backhaul._wire.messages import TREE, Payload
from backhaul._wire.plain import MAX_DEPTH, MAX_DIMENSIONS, Flattener, restore
from backhaul._wire.tensors.subclasses import (
    SubclassReducer,
    TensorList,
    is_recorded,
    make_wrapper,
    plain_alias,
    refuse_gradients,
    set_attributes,
)
from backhaul._wire.tensors.tensors import (
    EMPTY_TABLE,
    TensorWriter,
    read_tensors,
    write_all_ordinary,
    write_lent,
    write_ordinary,
)
from backhaul.errors import BackhaulError, ProtocolError, SerializationError

_SMALL_BUFFER = 4096  # below this a buffer is cheaper inside the pickle
_ALWAYS_PLAIN = frozenset((type(None), bool, float, bytes))
_MAX_PLAIN = 64  # a list longer than this is left to pickle, which is in C
_MAX_DEPTH = 64  # how deep to look for what cannot be sent
_MAX_SEARCH = 10_000  # how many values to look at for the place of one of them


Reducer = Callable[[Any, list[Any]], Any]
"""Reduces a value for a message as ``__reduce__`` does. It may leave something in the list for its layer to act on when
the message goes out; a message that cannot be encoded never does.
"""

reducers: dict[type, Reducer] = {}
"""Types that mean something only in a message, by their layers."""

builders: dict[tuple[str, str], Callable[..., Any]] = {}
"""What to call in the place of a function named in a message, by module and name: with the same arguments, and before
them the worker that has received it.
"""


class Encoded(msgspec.Struct, eq=False):
    """A value on its way out: the payload, the frame's buffers, and what owns their memory.

    Attributes:
        tensors: Those of the message's table, then the wrappers that require grad (see ``wire.subclasses``).
        unrecorded: Where in the message a value requires grad whose gradient would be lost, and why.
        parcels: What reducers left.
        lease: The slots of a link that the message takes with it, if any. To be told when it is handed to a channel.
    """

    payload: Payload
    buffers: list[Buffer]
    keep: list[Any]
    tensors: list[torch.Tensor]
    parcels: Sequence[Any] = ()
    lease: Lease | None = None
    unrecorded: Sequence[str] = ()


def encode(
    values: Sequence[Any],
    *,
    names: Sequence[str],
    main_shared: bool = False,
    plain: bool = False,
    link: Link | None = None,
) -> Encoded:
    """Encode a list of values. Raises ``SerializationError`` naming the part that cannot travel.

    Args:
        values: Anything.
        names: What to call each value in that error.
        main_shared: Whether ``__main__`` is the same program at the other end.
        plain: Whether nothing may be pickled.
        link: What takes tensors of devices; None: they cannot travel.
    """
    try:
        flat = _encode_plain(values, link)
    except Exception:  # a tensor that cannot travel: the other form says which
        flat = None
    if plain:
        found = flat if flat is not None and not _special(flat.tensors) else _encode_tree(values, names, link)
    else:
        found = flat or _encode_pickled(values, names, main_shared, link)
    if forward_ad._current_level >= 0:  # inside ``forward_ad.dual_level()``, on whatever thread
        _refuse_tangents(found, values, names)
    return found


def _refuse_tangents(encoded: Encoded, values: Sequence[Any], names: Sequence[str]) -> None:
    for tensor in encoded.tensors:
        if forward_ad.unpack_dual(tensor).tangent is not None:
            if encoded.lease is not None:
                encoded.lease.end()
            path = path_to(tensor, values, names)
            raise SerializationError(
                f"{path} carries a forward-mode tangent, which cannot be sent to another worker; run the forward-mode "
                "computation inside the called function, use reverse mode (backhaul.backward), or send the primal of "
                "torch.autograd.forward_ad.unpack_dual",
                path=path,
            )


def _special(tensors: Sequence[torch.Tensor]) -> bool:
    return any(tensor.is_quantized or tensor.is_nested or tensor.dim() > MAX_DIMENSIONS for tensor in tensors)


def _encode_tree(values: Sequence[Any], names: Sequence[str], link: Link | None) -> Encoded:
    writer = TensorWriter(link)
    flattener = Flattener(writer)
    tree = [flattener.flatten(value, name) for name, value in zip(names, values, strict=True)]
    tensors = writer.tensors
    inline = link is None or not link.takes_host
    ordinary = write_all_ordinary(tensors) if inline and tensors else None
    if ordinary is not None:  # which takes a twentieth of the values
        return Encoded(Payload(ordinary[0], tree, loose=TREE), ordinary[1], tensors, tensors)
    table, buffers, keep = writer.finish()
    if len(buffers) > MAX_BUFFERS:
        _unsent(writer)
        raise SerializationError(f"too much for one message: {len(buffers)} buffers of tensors")
    return Encoded(Payload(table, tree, loose=TREE), buffers, [keep], writer.tensors, lease=writer.lease)


def _unsent(writer: TensorWriter) -> None:
    """Whoever catches the error may keep it for long, and all it went through; slots are not to wait for that."""
    if writer.lease is not None:
        writer.lease.end()


def _encode_plain(values: Sequence[Any], link: Link | None) -> Encoded | None:
    """The form for plain scalars and tensors; None if there is anything else."""
    if len(values) > _MAX_PLAIN:
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
    return _encode_tensors(plain, more or [(at, tensor)], link)


def _encode_tensors(plain: list[Any], placed: list[tuple[int, torch.Tensor]], link: Link | None) -> Encoded | None:
    """Several tensors, or one that is not ordinary; None if one of them is neither in this process's memory nor the
    link's.
    """
    by_id = {id(tensor): tensor for _, tensor in placed}
    ids, distinct = list(by_id), list(by_id.values())
    where = tuple((place, ids.index(id(tensor))) for place, tensor in placed)
    ordinary = None if link is not None and link.takes_host else write_all_ordinary(distinct)
    if ordinary is not None:
        table, buffers = ordinary
        return Encoded(Payload(table, plain, where), buffers, distinct, distinct)
    writer = TensorWriter(link)
    for tensor in distinct:
        if tensor.device.type != "cpu" and (link is None or not link.takes(tensor.device)):
            return None
        writer.add(tensor)
    table, buffers, keep = writer.finish()
    return Encoded(Payload(table, plain, where), buffers, [keep], distinct, lease=writer.lease)


@interrupts.calls_out
def _encode_pickled(values: Sequence[Any], names: Sequence[str], main_shared: bool, link: Link | None) -> Encoded:
    writer = TensorWriter(link)
    loose: list[pickle.PickleBuffer] = []
    out = io.BytesIO()
    parcels: list[Any] = []
    try:
        pickler = _Pickler(out, writer, loose, main_shared, parcels)
        pickler.dump(list(values))
        table, buffers, keep = writer.finish()
    except BaseException as error:  # code of the user's may raise anything
        if interrupts.from_signal(error):
            raise
        if isinstance(error, BackhaulError) and not isinstance(error, SerializationError):  # what it refers to is lost
            culprit = _explain(values, names, main_shared, link, error).path
            error.add_note(f"{culprit} stands for that, and cannot be sent")
            raise
        raise _explain(values, names, main_shared, link, error) from error
    body = out.getvalue()
    if len(body) > MAX_BODY - (1 << 16) or len(buffers) + len(loose) > MAX_BUFFERS:
        _unsent(writer)
        raise SerializationError(
            f"too much for one message: {len(body)} bytes of pickle, {len(buffers)} buffers of tensors"
        )
    buffers.extend(buffer.raw() for buffer in loose)
    wrapped = pickler.subclasses.wrapped
    form = Payload(table, pickle=body, loose=len(loose), wrapped=len(wrapped))
    encoded = Encoded(form, buffers, [keep, loose], [*writer.tensors, *wrapped], parcels, writer.lease)
    if lost := [*pickler.subclasses.lost, *pickler.scripted]:
        encoded.unrecorded = [f"{path_to(value, values, names)} (a {type(value).__name__})" for value in lost]
    return encoded


def decode(payload: Payload, buffers: Sequence[Buffer], link: Link | None = None, *, why: str = "") -> list[Any]:
    """Make the values again. The tensors live on the memory of ``buffers``, which must be writable, and of the slots
    of ``link``.

    Args:
        payload: The values.
        buffers: Those of the message.
        link: What has tensors of devices.
        why: If given, tensors that require grad raise this text when their gradient is computed.
    """
    tensors = tensors_of(payload, buffers, link)
    return load(payload, buffers, refuse_gradients(tensors, why) if why else tensors)


def tensors_of(payload: Payload, buffers: Sequence[Buffer], link: Link | None = None) -> list[torch.Tensor]:
    """The tensors of a payload, in the order of ``Encoded.tensors``. They are ``TensorList`` if wrappers
    follow them.
    """
    if payload.loose > 0:
        buffers = buffers[: len(buffers) - payload.loose]
    tensors = read_tensors(payload.tensors, buffers, link)
    return tensors if payload.wrapped <= 0 else TensorList(tensors, payload.wrapped)


@interrupts.calls_out
def load(
    payload: Payload, buffers: Sequence[Buffer], tensors: Sequence[torch.Tensor], home: object = None
) -> list[Any]:
    """Put a payload together from its tensors, or from others in their place, for the worker ``home``."""
    values = payload.plain
    if values is None:
        loose = buffers[len(buffers) - payload.loose :]
        values = _Unpickler(io.BytesIO(payload.pickle), tensors, loose, home).load()
        if not isinstance(values, list):
            raise ProtocolError(f"a payload is a list of values, not a {type(values).__name__}")
        return values
    if payload.loose == TREE:
        options = getattr(home, "options", None)
        return restore(
            values,
            tensors,
            getattr(options, "max_depth", MAX_DEPTH),
            getattr(options, "value_limit", UNTRUSTED_VALUES),
        )
    try:
        for place, index in payload.places:
            values[place] = tensors[index]
    except IndexError:
        raise ProtocolError(f"no tensor {index} or no place {place} for it") from None
    return values


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's by-value rules for functions and classes, ours for tensors and ``__main__``."""

    def __init__(
        self,
        file: io.BytesIO,
        writer: TensorWriter,
        loose: list[pickle.PickleBuffer],
        main_shared: bool,
        parcels: list[Any],
    ) -> None:
        # Not a method: a pickler that refers to itself would keep all it has seen until the next collection.
        super().__init__(file, protocol=5, buffer_callback=functools.partial(_take_buffer, loose))
        self._writer = writer
        self._main_shared = main_shared
        self._parcels = parcels
        self.subclasses = SubclassReducer()
        self.scripted: list[Any] = []  # script modules with a value that requires grad and cannot be recorded

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.Tensor:
            return self._reduce_tensor(value)
        if issubclass(kind, torch.Tensor):
            return self.subclasses.reduce(value)
        if (reducer := reducers.get(kind)) is not None:
            return reducer(value, self._parcels)
        if issubclass(kind, io.IOBase) and not issubclass(kind, (io.BytesIO, io.StringIO)):
            raise TypeError("an open file belongs to its process")
        if issubclass(kind, torch.jit.ScriptModule):
            return self._reduce_script_module(value)
        if kind is torch.jit.ScriptFunction or isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return resolve, (name_of(value),)
        if self._main_shared and isinstance(value, (type, types.FunctionType)) and _in_main(value):
            return NotImplemented  # plain pickle: by name
        reduced = super().reducer_override(value)
        if kind is types.FunctionType and reduced is not NotImplemented:
            refuse_state(value, by_value=self._by_value, references=reducers)
        return reduced

    def _by_value(self, value: Any) -> bool:
        return name_of(value, main_shared=self._main_shared) is None

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        reduced = _tensor, (self._writer.add(tensor),)
        return (*reduced, tensor.__dict__, None, None, set_attributes) if tensor.__dict__ else reduced

    def _reduce_script_module(self, module: Any) -> Any:
        """A script module is saved as a whole. What requires grad in it goes along, to be part of the graph."""
        recorded: dict[tuple[str, str], torch.Tensor] = {}
        for path, part in module.named_modules() if torch.is_grad_enabled() else ():
            for name in part._concrete_type.get_attributes():
                value = part._c.getattr(name)
                if isinstance(value, torch.Tensor):
                    if value.requires_grad:
                        recorded[path, name] = plain_alias(value)
                elif any(isinstance(each, torch.Tensor) and each.requires_grad for each in tree_leaves(value)):
                    self.scripted.append(module)
        return _script_module, (module.save_to_buffer(), recorded)


def _take_buffer(loose: list[pickle.PickleBuffer], buffer: pickle.PickleBuffer) -> bool:
    """Put a buffer beside the pickle, or return True to keep it inside."""
    try:
        view = buffer.raw()
    except BufferError:  # not contiguous
        return True
    if view.nbytes < _SMALL_BUFFER or view.readonly:
        return True  # read-only memory comes back read-only that way
    loose.append(buffer)
    return False


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, tensors: Sequence[torch.Tensor], loose: Sequence[Buffer], home: object
    ) -> None:
        super().__init__(file, buffers=loose)
        self._tensors = tensors
        self._home = home

    def find_class(self, module: str, name: str) -> Any:
        if name == "_tensor" and module == __name__:
            return self._tensors.__getitem__
        if name == make_wrapper.__name__ and module == make_wrapper.__module__:
            return functools.partial(make_wrapper, self._tensors)
        if (builder := builders.get((module, name))) is not None:
            return functools.partial(builder, self._home)
        return super().find_class(module, name)


def _tensor(index: int) -> torch.Tensor:
    """Stands in a pickle for the message's tensor of that index; the unpickler puts its own in its place."""
    raise pickle.UnpicklingError("a payload's tensors are missing")


def _script_module(saved: bytes, recorded: dict[tuple[str, str], torch.Tensor]) -> Any:
    # As torch.jit.load does it, without its remark that TorchScript is deprecated.
    unit = torch._C.CompilationUnit()
    module = torch._C.import_ir_module_from_buffer(unit, saved, None, {}, False)  # type: ignore[call-arg, arg-type]
    made = torch.jit._recursive.wrap_cpp_module(module)
    parts = dict(made.named_modules()) if recorded else {}
    for (path, name), tensor in recorded.items():
        if is_recorded(tensor):  # as in ``make_parameter``
            parts[path]._c.setattr(name, tensor)
    return made


def path_to(part: Any, values: Sequence[Any], names: Sequence[str]) -> str:
    """Where in a message ``part`` is, in the words of ``names``; all of them if it is not found in reasonable time."""
    ahead = list(zip(names, values, strict=True))
    seen = {id(value) for value in values}
    for path, value in ahead:  # grows
        if value is part or (isinstance(value, torch.Tensor) and _aliases(value, part)):
            return path
        for step, child in _children(value) if len(ahead) < _MAX_SEARCH else ():
            if id(child) not in seen:
                seen.add(id(child))
                ahead.append((path + step, child))
    return ", ".join(itertools.islice(names, 8))


def _aliases(value: torch.Tensor, part: Any) -> bool:
    """Whether ``part`` is the plain alias that travels for ``value``."""
    base = value if value._base is None else value._base
    return isinstance(part, torch.Tensor) and part._base is base


def _in_main(value: Any) -> bool:
    return value.__module__ == "__main__" and name_of(value, main_shared=True) is not None


def _explain(
    values: Sequence[Any], names: Sequence[str], main_shared: bool, link: Link | None, error: BaseException
) -> SerializationError:
    """Find the innermost part that does not travel on its own, and say so."""
    search = _Search(main_shared, None if link is None else TrialEncoding(link))
    for name, value in zip(names, values, strict=True):
        found = search.locate(name, value, frozenset((id(value),)), 0)
        if found is not None:
            path, culprit, why = found
            break
    else:  # a circle, or nothing to be found in reasonable time
        path, culprit, why = ", ".join(itertools.islice(names, 8)), values, _reason(error)
    device = error.device if isinstance(error, SerializationError) else None
    return SerializationError(f"{path} (a {type(culprit).__name__}) cannot be sent: {why}", path=path, device=device)


class _Search:
    """Looks for what cannot travel, by trying part after part."""

    def __init__(self, main_shared: bool, link: Link | None) -> None:
        self._main_shared = main_shared
        self._link = link
        self._tries = 2000

    def locate(self, path: str, value: Any, above: frozenset[int], depth: int) -> tuple[str, Any, str] | None:
        """The culprit at or below ``value``, with its path and what is wrong with it."""
        self._tries -= 1
        why = _trouble(value, self._main_shared, self._link)
        if why is None:
            return None
        circular = False
        apart = depth < _MAX_DEPTH and self._tries > 0 and type(value) not in reducers  # those do not travel by parts
        for step, part in _children(value) if apart else ():
            if id(part) in above:
                circular = True
                continue
            found = self.locate(path + step, part, above | {id(part)}, depth + 1)
            if found is not None:
                return found
        # What refers back to something above it may only suffer from that.
        return None if circular and depth else (path, value, why)


def _trouble(value: Any, main_shared: bool, link: Link | None) -> str | None:
    """Why ``value`` does not travel. Text, not the exception: that would hold on to all it went through."""
    try:
        writer = TensorWriter(link)
        _Pickler(io.BytesIO(), writer, [], main_shared, []).dump(value)
        writer.finish()
    except BaseException as error:
        if interrupts.from_signal(error):
            raise
        return _reason(error)
    return None


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, BackhaulError) else f"{type(error).__name__}: {error}"


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"[{key!r}]", item
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, item in enumerate(value):
            yield f"[{index}]", item
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, types.FunctionType) and value.__closure__:
        for name, cell in zip(value.__code__.co_freevars, value.__closure__, strict=True):
            with contextlib.suppress(ValueError):
                yield f".<{name}>", cell.cell_contents
    elif not isinstance(value, (type, types.ModuleType, torch.Tensor)):
        for name, item in getattr(value, "__dict__", {}).items():
            yield f".{name}", item
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    yield f".{name}", getattr(value, name)
