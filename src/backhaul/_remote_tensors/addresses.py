"""Where a remote tensor is: at a driver as an ``Address``, in a message as a ``Place``. Knows no tensor class."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch

from backhaul._rpc.compression import as_it_is
from backhaul._rpc.futures import Future
from backhaul._rref.handle import RRef, keep_until
from backhaul._rref.owner_calls import Named
from backhaul._wire.pickling import reducers

R = TypeVar("R")

Kind = Literal["value", "parameter", "gradient", "buffer", "state"]
"""How a tensor is found in its container, which is the tensor itself, a module, or the state of an optimizer."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Address:
    """The place of a tensor on another worker.

    Attributes:
        container: A reference to the object that has the tensor.
        kind: How to find the tensor in it.
        key: The index of a parameter, gradient or buffer. For state, the number of the parameter and the path below.
    """

    container: RRef[Any]
    kind: Kind = "value"
    key: Any = None

    @property
    def owner(self) -> int:
        """The id of the worker that has the tensor."""
        return self.container.owner().id

    def is_same(self, other: Address) -> bool:
        """Whether both are the same place."""
        one, two = self.container, other.container
        same = (one._identity, one._id, self.kind, self.key) == (two._identity, two._id, other.kind, other.key)
        return one is two and same if self.kind == "value" else same


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """An address in a message to the owner.

    Attributes:
        container: The index of the container among those of the message.
        kind, key: See ``Address``.
    """

    container: int
    kind: Kind
    key: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """Several addresses in one container. A list of a thousand places would take a millisecond to encode."""

    container: int
    kind: Kind
    keys: list[Any]


def _fields_of(record: Any, parcels: list[Any]) -> Any:
    return type(record), tuple([getattr(record, name) for name in record.__dataclass_fields__])


def travels_by_fields(kind: type[R]) -> type[R]:
    """Let a record travel as a call of its class: a message with it needs no pickle."""
    reducers[kind] = _fields_of
    return kind


travels_by_fields(Place)
travels_by_fields(Places)


def compact(value: Any) -> Any:
    """``value`` with ``Places`` for each list of places in one container."""
    if type(value) is list:
        first = value[0] if value else None
        if type(first) is Place and all(
            type(each) is Place and each.container == first.container and each.kind == first.kind for each in value
        ):
            return Places(first.container, first.kind, [each.key for each in value])
        return [compact(each) for each in value]
    if type(value) is tuple:
        return tuple(map(compact, value))
    return value


_here = threading.local()


class own_call:
    """The calls that this thread makes in the block are part of the use of remote tensors or modules."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = getattr(_here, "own", False)
        _here.own = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _here.own = self._before


def is_own_call() -> bool:
    """Whether this thread is in ``own_call``."""
    return getattr(_here, "own", False)


class Message:
    """A call to one owner. It names each container once, however many tensors of it the call uses."""

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self._containers: list[RRef[Any]] = []
        self._numbers: dict[RRef[Any], int] = {}

    def number(self, container: RRef[Any]) -> int:
        """The index of a container."""
        found = self._numbers.get(container)
        if found is None:
            found = self._numbers[container] = len(self._containers)
            self._containers.append(container)
        return found

    def place(self, address: Address) -> Place:
        """The address as the message says it."""
        return Place(self.number(address.container), address.kind, address.key)

    def argument(self, tensor: torch.Tensor) -> Any:
        """A tensor as an argument of the message: its place, if it is on the receiver."""
        address: Address | None = getattr(tensor, "_address", None)
        if address is None:
            return tensor.detach()
        if address.owner == self.owner:
            return self.place(address)
        return tensor.to_here()  # type: ignore[attr-defined]

    def send(self, via: RRef[Any], function: Callable[..., Any], *args: Any, label: str) -> Future[Any]:
        """Call ``function(containers, *args)`` on the owner, outside any graph. ``via``: a reference that is here."""
        named: Sequence[Named] = [container._named() for container in self._containers]
        with torch.no_grad(), own_call(), as_it_is():
            client = via._rrefs.client
            future: Future[Any] = client.call_async(
                self.owner, function, (named, *map(compact, args)), None, None, label=label
            )
        for container in self._containers:
            keep_until(container, future)
        return future

    def send_and_wait(self, via: RRef[Any], function: Callable[..., Any], *args: Any, label: str) -> Any:
        """As ``send``, but waits for the result."""
        named: Sequence[Named] = [container._named() for container in self._containers]
        with torch.no_grad(), own_call(), as_it_is():
            client = via._rrefs.client
            return client.call(self.owner, function, (named, *map(compact, args)), None, None, label=label)
