"""Plain data and tensors <-> nested arrays of scalars, for peers that are not to be trusted. Pure and strict: nothing
is called but the constructors of the types below, and whatever is not exactly in this form is a ``ProtocolError``.

A value is a scalar that msgpack knows, or an array that begins with a ``Tag``. Tensors stand in the message's table,
and here by their index. Records are what layers above have to tell each other; each is checked against its own type.
"""

from __future__ import annotations

import enum
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from backhaul._types import UNTRUSTED_VALUES
from backhaul._wire.tensors.writer import TensorWriter
from backhaul._wire.value_count import LEVELS, count
from backhaul.errors import LimitError, ProtocolError, SerializationError

MAX_DIMENSIONS = 64
"""How many dimensions a tensor may have: the size of one that has thousands takes seconds to compute."""

MAX_DEPTH = 256
"""How deep values may be nested at all; a worker may want less, see ``Options.max_depth``."""

SCALARS = frozenset((type(None), bool, int, float, str, bytes))
"""What stands for itself."""


class Tag(enum.IntEnum):
    """What an array is."""

    TENSOR = 0  # its index in the message's table
    LIST = 1
    TUPLE = 2
    DICT = 3  # keys and values in turn
    SET = 4
    FROZENSET = 5
    INT = 6  # one that is too large for msgpack: its bytes, little-endian, signed
    COMPLEX = 7
    TEXT = 8  # a str that is no Unicode: bytes, with lone surrogates as they are
    SIZE = 9  # torch.Size
    DTYPE = 10  # its name
    DEVICE = 11  # type, and index or nil
    RECORD = 12  # its name and its fields, as msgpack


_SEQUENCES: dict[type, Tag] = {
    list: Tag.LIST,
    tuple: Tag.TUPLE,
    set: Tag.SET,
    frozenset: Tag.FROZENSET,
    torch.Size: Tag.SIZE,
}
_HASHED = frozenset((int(Tag.SET), int(Tag.FROZENSET)))
_SAME_HASH = 1024  # keys of a dict or set that may have one hash: no more than that by chance
_BUILD: dict[int, Callable[[Any], Any]] = {int(tag): kind for kind, tag in _SEQUENCES.items()}
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_PLAIN = "plain data (numbers, text, bytes, lists, tuples, dicts, sets) and tensors"

_encode_record = msgspec.msgpack.Encoder().encode
_records: dict[str, msgspec.msgpack.Decoder[Any]] = {}
_record_names: dict[type, str] = {}


def register(*kinds: type) -> None:
    """Let records of these types (msgspec structs or dataclasses) travel. Called where they are defined."""
    for kind in kinds:
        _records[kind.__name__] = msgspec.msgpack.Decoder(kind)
        _record_names[kind] = kind.__name__


class Flattener:
    """Values -> nested arrays. Collects the tensors of one message on the way."""

    def __init__(self, writer: TensorWriter) -> None:
        self._writer = writer
        self._indices: dict[int, int] = {}

    def flatten(self, value: Any, path: str) -> Any:
        """The form of ``value``. Raises ``SerializationError`` naming the part that is not plain."""
        return self._flatten(value, path, 0)

    def _flatten(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind in SCALARS:
            return _flat_scalar(value) if kind is int or kind is str else value
        if depth >= MAX_DEPTH:
            raise SerializationError(f"{path} is nested more than {MAX_DEPTH} deep, or in itself", path=path)
        if kind is dict:
            flat: list[Any] = [int(Tag.DICT)]
            for key, item in value.items():
                flat.append(self._flatten(key, f"{path}.<key>", depth + 1))
                flat.append(self._flatten(item, f"{path}[{key!r}]", depth + 1))
            return flat
        if (tag := _SEQUENCES.get(kind)) is not None:
            parts = (self._flatten(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value))
            return [int(tag), *parts]
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return self._tensor(value, path)
        if kind is complex:
            return [int(Tag.COMPLEX), value.real, value.imag]
        if kind is torch.dtype:
            return [int(Tag.DTYPE), str(value).removeprefix("torch.")]
        if kind is torch.device:
            return [int(Tag.DEVICE), value.type, value.index]
        if (name := _record_names.get(kind)) is not None:
            return [int(Tag.RECORD), name, _encode_record(value)]
        raise SerializationError(f"{path} is a {kind.__name__}; only {_PLAIN} can be sent", path=path)

    def _tensor(self, tensor: torch.Tensor, path: str) -> list[int]:
        index = self._indices.get(id(tensor))
        if index is None:
            if tensor.is_quantized or tensor.is_nested or tensor.__dict__ or tensor.dim() > MAX_DIMENSIONS:
                what = "with attributes" if tensor.__dict__ else "that is quantized or nested"
                if tensor.dim() > MAX_DIMENSIONS:
                    what = f"of more than {MAX_DIMENSIONS} dimensions"
                raise SerializationError(f"{path} is a tensor {what}, which cannot be sent", path=path)
            index = self._indices[id(tensor)] = self._writer.add(tensor)
        return [int(Tag.TENSOR), index]


def _flat_scalar(value: int | str) -> Any:
    if isinstance(value, int):
        if -(1 << 63) <= value < 1 << 64:
            return value
        return [int(Tag.INT), value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return [int(Tag.TEXT), value.encode("utf-8", "surrogatepass")]
    return value


class _TooDeepError(Exception):
    pass


class _TooManyError(Exception):
    pass


class _Parts:
    """What the values of one message refer to, or are limited by."""

    __slots__ = ("tensors", "values")

    def __init__(self, tensors: Sequence[torch.Tensor], values: int | None) -> None:
        self.tensors = tensors
        self.values = values  # how many the records may still have; None: any number

    def read_record(self, name: str, body: bytes) -> Any:
        if self.values is not None:
            option, found = count(body, self.values, LEVELS)
            if option:
                raise _TooManyError if option == "max_values" else _TooDeepError
            self.values -= found
        return _records[name].decode(body)


def restore(
    flat: Sequence[Any],
    tensors: Sequence[torch.Tensor],
    depth: int = MAX_DEPTH,
    values: int | None = UNTRUSTED_VALUES,
) -> list[Any]:
    """The values of a message again.

    Args:
        flat: Their form.
        tensors: Those of the message.
        depth: How deep they may be nested.
        values: How many values the records among them may have together; None: any number. The others exist already.

    Raises:
        ProtocolError: They are not in this form.
        LimitError: They are nested too deep, or have too many values.
    """
    parts = _Parts(tensors, values)
    try:
        return [_restore(item, parts, depth) for item in flat]
    except _TooManyError:
        raise LimitError(
            f"records have more than {values} values, which is the limit of the worker that got them "
            "(Options.max_values there)",
            limit="values in one message",
            option="max_values",
            value=values,
        ) from None
    except _TooDeepError:
        raise LimitError(
            f"values are nested more than {depth} deep, which is the limit of the worker that got them "
            "(Options.max_depth there)",
            limit="nesting depth",
            option="max_depth",
            value=depth,
        ) from None
    except ProtocolError:
        raise
    except Exception as error:  # unhashable keys, bytes that are no text, a record of another form
        raise ProtocolError(f"not plain data: {type(error).__name__}: {error}") from error


def _restore(flat: Any, parts: _Parts, depth: int) -> Any:
    kind = type(flat)
    if kind in SCALARS:
        return flat
    if kind is not list or not flat or type(flat[0]) is not int:
        raise ProtocolError(f"a {kind.__name__} without a tag where plain data should be")
    if depth <= 0:
        raise _TooDeepError
    tag = flat[0]
    if (build := _BUILD.get(tag)) is not None:
        items = [_restore(item, parts, depth - 1) for item in flat[1:]]
        if tag in _HASHED:
            _check_hashes(items)
        return build(items)
    if tag == Tag.DICT:
        if len(flat) % 2 == 0:
            raise ProtocolError("a dict of a key without a value")
        items = [_restore(item, parts, depth - 1) for item in flat[1:]]
        keys = items[::2]
        _check_hashes(keys)
        return dict(zip(keys, items[1::2], strict=True))
    return _restore_leaf(tag, flat[1:], parts)


def _check_hashes(keys: list[Any]) -> None:
    """Refuse keys that were chosen to have one hash: to build a dict of them takes time as the square of its size."""
    if len(keys) <= _SAME_HASH:
        return
    hashes = sorted(map(hash, keys))
    if any(map(operator.eq, hashes, itertools.islice(hashes, _SAME_HASH, None))):
        raise ProtocolError(f"more than {_SAME_HASH} keys of a dict or set have the same hash")


def _restore_leaf(tag: int, fields: list[Any], parts: _Parts) -> Any:
    kinds = [type(field) for field in fields]
    if tag == Tag.TENSOR and kinds == [int] and 0 <= fields[0] < len(parts.tensors):
        return parts.tensors[fields[0]]
    if tag == Tag.INT and kinds == [bytes]:
        return int.from_bytes(fields[0], "little", signed=True)
    if tag == Tag.COMPLEX and kinds == [float, float]:
        return complex(*fields)
    if tag == Tag.TEXT and kinds == [bytes]:
        return fields[0].decode("utf-8", "surrogatepass")
    if tag == Tag.DTYPE and kinds == [str] and fields[0] in _DTYPES:
        return _DTYPES[fields[0]]
    if tag == Tag.DEVICE and kinds in ([str, int], [str, type(None)]):
        return torch.device(fields[0]) if fields[1] is None else torch.device(fields[0], fields[1])
    if tag == Tag.RECORD and kinds == [str, bytes] and fields[0] in _records:
        return parts.read_record(fields[0], fields[1])
    raise ProtocolError(f"impossible plain data: tag {tag} with {', '.join(kind.__name__ for kind in kinds)}")
