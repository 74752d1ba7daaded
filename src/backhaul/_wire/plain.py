"""Plain data and tensors <-> nested arrays of scalars, for untrusted peers. Pure and strict: decoding calls only the
constructors of the types below, and raises ``ProtocolError`` for data in any other form.

A value is a scalar of msgpack, or an array that begins with a ``Tag``. A tensor is in the message's table, and here it
is an index into the table. Records are data of higher layers. Each record is checked against its own type.
"""

from __future__ import annotations

import enum
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from backhaul._options import UNTRUSTED_VALUES
from backhaul._wire.tensors.dtypes import DTYPES
from backhaul._wire.tensors.writer import TensorWriter
from backhaul._wire.value_count import LEVELS, count
from backhaul.errors import LimitError, ProtocolError, SerializationError

MAX_DIMENSIONS = 64
"""How many dimensions a tensor may have. The size of a tensor with thousands of dimensions takes seconds to compute."""

MAX_DEPTH = 256
"""How deep values may be nested. A worker may allow less, see ``Options.limits.depth``."""

SCALARS = frozenset((type(None), bool, int, float, str, bytes))
"""Types whose values need no tag."""


class Tag(enum.IntEnum):
    """What an array means."""

    TENSOR = 0  # its index in the message's table
    LIST = 1
    TUPLE = 2
    DICT = 3  # keys and values, alternating
    SET = 4
    FROZENSET = 5
    INT = 6  # an int that is too large for msgpack: its bytes, little-endian, signed
    COMPLEX = 7
    TEXT = 8  # a str that is not valid Unicode: bytes, which include lone surrogates
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
_MAX_EQUAL_HASHES = 1024  # more keys of a dict or set do not have the same hash by chance
_BUILD: dict[int, Callable[[Any], Any]] = {int(tag): kind for kind, tag in _SEQUENCES.items()}
_PLAIN = "plain data (numbers, text, bytes, lists, tuples, dicts, sets) and tensors"

_encode_record = msgspec.msgpack.Encoder().encode
_records: dict[str, msgspec.msgpack.Decoder[Any]] = {}
_record_names: dict[type, str] = {}


def register(*kinds: type) -> None:
    """Allow records of these types (msgspec structs or dataclasses) in messages. Call it where they are defined."""
    for kind in kinds:
        _records[kind.__name__] = msgspec.msgpack.Decoder(kind)
        _record_names[kind] = kind.__name__


class Flattener:
    """Values -> nested arrays. Adds the tensors of one message to its writer."""

    def __init__(self, writer: TensorWriter) -> None:
        self._writer = writer
        self._indices: dict[int, int] = {}

    def flatten(self, value: Any, path: str) -> Any:
        """Encode ``value``. Raises ``SerializationError``, which names the part that is not plain data."""
        return self._flatten(value, path, 0)

    def _flatten(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind in SCALARS:
            return _flat_scalar(value) if kind is int or kind is str else value
        if depth >= MAX_DEPTH:
            raise SerializationError(
                f"{path} is nested more than {MAX_DEPTH} deep, or contains itself; flatten it before the call",
                path=path,
            )
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
        raise SerializationError(
            f"{path} is a {kind.__name__}; one of the two workers is not trusted, so only {_PLAIN} can be sent",
            path=path,
        )

    def _tensor(self, tensor: torch.Tensor, path: str) -> list[int]:
        index = self._indices.get(id(tensor))
        if index is None:
            if tensor.is_quantized or tensor.is_nested or tensor.__dict__ or tensor.dim() > MAX_DIMENSIONS:
                what = "with attributes" if tensor.__dict__ else "that is quantized or nested"
                if tensor.dim() > MAX_DIMENSIONS:
                    what = f"of more than {MAX_DIMENSIONS} dimensions"
                raise SerializationError(
                    f"{path} is a tensor {what}, which cannot be sent while one of the two workers is not trusted",
                    path=path,
                )
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


class _Decoding:
    """The state of decoding one message.

    Attributes:
        tensors: The tensors of the message.
        values: How many values the remaining records may have; None: any number.
    """

    __slots__ = ("tensors", "values")

    def __init__(self, tensors: Sequence[torch.Tensor], values: int | None) -> None:
        self.tensors = tensors
        self.values = values

    def read_record(self, name: str, body: bytes) -> Any:
        if self.values is not None:
            option, found = count(body, self.values, LEVELS)
            if option:
                raise _TooManyError if option == "limits.values" else _TooDeepError
            self.values -= found
        return _records[name].decode(body)


def restore(
    flat: Sequence[Any],
    tensors: Sequence[torch.Tensor],
    depth: int = MAX_DEPTH,
    values: int | None = UNTRUSTED_VALUES,
) -> list[Any]:
    """Decode the values of a message.

    Args:
        flat: The encoded values.
        tensors: The tensors of the message.
        depth: How deep the values may be nested.
        values: How many values all records may have together; None: any number. Values outside records exist already.

    Raises:
        ProtocolError: The data is not in this form.
        LimitError: The values are nested too deep, or the records have too many values.
    """
    decoding = _Decoding(tensors, values)
    try:
        return [_restore(item, decoding, depth) for item in flat]
    except _TooManyError:
        raise LimitError(
            f"the records of a message have more than {values} values, the limit of the receiving worker; "
            "send less, or raise Options.limits.values there",
            limit="values in one message",
            option="limits.values",
            value=values,
        ) from None
    except _TooDeepError:
        raise LimitError(
            f"the values of a message are nested more than {depth} deep, the limit of the receiving worker; "
            "flatten them, or raise Options.limits.depth there",
            limit="nesting depth",
            option="limits.depth",
            value=depth,
        ) from None
    except ProtocolError:
        raise
    except Exception as error:  # for example unhashable keys, invalid text, a malformed record
        raise ProtocolError(f"malformed plain data: {type(error).__name__}: {error}") from error


def _restore(flat: Any, decoding: _Decoding, depth: int) -> Any:
    kind = type(flat)
    if kind in SCALARS:
        return flat
    if kind is not list or not flat or type(flat[0]) is not int:
        raise ProtocolError(f"malformed plain data: a {kind.__name__} without a tag")
    if depth <= 0:
        raise _TooDeepError
    tag = flat[0]
    if (build := _BUILD.get(tag)) is not None:
        items = [_restore(item, decoding, depth - 1) for item in flat[1:]]
        if tag in _HASHED:
            _check_hashes(items)
        return build(items)
    if tag == Tag.DICT:
        if len(flat) % 2 == 0:
            raise ProtocolError("malformed plain data: a dict has a key without a value")
        items = [_restore(item, decoding, depth - 1) for item in flat[1:]]
        keys = items[::2]
        _check_hashes(keys)
        return dict(zip(keys, items[1::2], strict=True))
    return _restore_leaf(tag, flat[1:], decoding)


def _check_hashes(keys: list[Any]) -> None:
    """Refuse keys that were chosen to have the same hash. Building a dict of n such keys takes n * n steps."""
    if len(keys) <= _MAX_EQUAL_HASHES:
        return
    hashes = sorted(map(hash, keys))
    if any(map(operator.eq, hashes, itertools.islice(hashes, _MAX_EQUAL_HASHES, None))):
        raise ProtocolError(f"more than {_MAX_EQUAL_HASHES} keys of a dict or set have the same hash")


def _restore_leaf(tag: int, fields: list[Any], decoding: _Decoding) -> Any:
    kinds = [type(field) for field in fields]
    if tag == Tag.TENSOR and kinds == [int] and 0 <= fields[0] < len(decoding.tensors):
        return decoding.tensors[fields[0]]
    if tag == Tag.INT and kinds == [bytes]:
        return int.from_bytes(fields[0], "little", signed=True)
    if tag == Tag.COMPLEX and kinds == [float, float]:
        return complex(*fields)
    if tag == Tag.TEXT and kinds == [bytes]:
        return fields[0].decode("utf-8", "surrogatepass")
    if tag == Tag.DTYPE and kinds == [str] and fields[0] in DTYPES:
        return DTYPES[fields[0]]
    if tag == Tag.DEVICE and kinds in ([str, int], [str, type(None)]):
        return torch.device(fields[0]) if fields[1] is None else torch.device(fields[0], fields[1])
    if tag == Tag.RECORD and kinds == [str, bytes] and fields[0] in _records:
        return decoding.read_record(fields[0], fields[1])
    names = ", ".join(kind.__name__ for kind in kinds)
    raise ProtocolError(f"malformed plain data: unknown tag {tag}, or wrong fields for it ({names})")
