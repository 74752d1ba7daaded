"""Tensor subclasses <-> plain tensors, with their place in the autograd graph.

A subclass that has memory of its own is sent as a plain alias of it. The alias is part of the same graph, so the
message records it as it records any tensor. A *wrapper* (a class with ``__tensor_flatten__``) is sent as its inner
tensors. Autograd knows the wrapper and not the inner tensors, so the message records the wrapper itself, after the
tensors of its table. The receiver rebuilds the wrapper and then attaches it to the graph (``TensorList.attach``).

This module knows no message and no autograd engine.
"""

from __future__ import annotations

import copyreg
import pickle
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from backhaul.errors import SerializationError

_PARAMETER_MARK = "_is_param"
"""The attribute that marks a tensor of any class as a parameter, for torch."""

Attach = Callable[[int, torch.Tensor], torch.Tensor]


REFUSED = "backhaul_refused"
"""A key in the metadata of a graph node: no gradient can pass the node on its way back to the sender."""


def is_recorded(tensor: torch.Tensor) -> bool:
    """Whether a received tensor is part of a graph that reaches back to its sender."""
    node: Any = tensor.grad_fn
    return node is not None and REFUSED not in node.metadata


def mark_refused(tensor: Any) -> torch.Tensor:
    """Mark the node that produced ``tensor``; see ``REFUSED``."""
    tensor.grad_fn.metadata[REFUSED] = True
    made: torch.Tensor = tensor
    return made


stand_ins: dict[type, Callable[[Any], torch.Tensor]] = {}
"""Functions that return the tensor to send in place of one of that class. Higher layers add theirs."""


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Refusal(torch.autograd.Function):
    """Ends the graph at a tensor that arrived in a way that carries no gradient. Its backward raises."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, why: str) -> torch.Tensor:
        ctx.why = why
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise RuntimeError(ctx.why)


def refuse_gradients(tensors: Sequence[torch.Tensor], why: str) -> TensorList:
    """Make the tensors of a message that require grad, and wrappers built from them, raise when they get a gradient."""

    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        with torch.enable_grad():
            made: Any = _Refusal.apply(tensor, why)  # type: ignore[no-untyped-call]
        return mark_refused(made)

    return TensorList(map(refuse, tensors), 0, lambda number, wrapper: refuse(wrapper.detach().requires_grad_()))


class TensorList(list[torch.Tensor]):
    """The tensors of a message that also has wrappers which require grad.

    Attributes:
        wrapped: The number of these wrappers.
        attach: Takes the number of a wrapper and the rebuilt wrapper. Returns the wrapper to use.
    """

    __slots__ = ("_used", "attach", "wrapped")

    def __init__(self, tensors: Iterable[torch.Tensor], wrapped: int, attach: Attach | None = None) -> None:
        super().__init__(tensors)
        self.wrapped = wrapped
        self.attach = attach
        self._used: dict[int, torch.Tensor] = {}  # by id: inner tensors of wrappers

    def own(self, inner: dict[str, Any]) -> dict[str, Any]:
        """The inner tensors of a wrapper. An inner tensor that another wrapper has already is copied, because the graph
        does not know that they share memory: an in-place change of one wrapper would corrupt gradients of the other.
        """
        found = {}
        for name, part in inner.items():
            copied = isinstance(part, torch.Tensor) and part.is_floating_point() and id(part) in self._used
            found[name] = part.clone() if copied else part
            self._used.setdefault(id(part), part)
        return found


def may_require_grad(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a tensor of a message, or a wrapper built from them, requires grad."""
    return isinstance(tensors, TensorList) or any([tensor.requires_grad for tensor in tensors])


def detached(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a message, without a graph and without requiring grad."""
    found = [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]
    return TensorList(found, tensors.wrapped, _detach_wrapper) if isinstance(tensors, TensorList) else found


def _detach_wrapper(number: int, wrapper: torch.Tensor) -> torch.Tensor:
    return wrapper.detach()


class SubclassReducer:
    """Reduces the tensor subclasses of one message to plain tensors.

    Attributes:
        wrapped: The wrappers that require grad, in the order of their numbers.
        lost: Values that require grad and whose classes pickle them without their graph.
        parameters: The parameters of the message, each with the plain tensor that is sent for it.
    """

    __slots__ = ("lost", "parameters", "wrapped")

    def __init__(self) -> None:
        self.wrapped: list[torch.Tensor] = []
        self.lost: list[torch.Tensor] = []
        self.parameters: list[tuple[torch.Tensor, torch.Tensor]] = []

    def reduce(self, value: torch.Tensor) -> Any:
        """Return what ``__reduce__`` would."""
        kind = type(value)
        if kind is torch.nn.Parameter:
            return self._reduce_parameter(value)
        if kind is FakeTensor:
            raise SerializationError(
                "fake tensors have no data; the compiler or other tracing code made this one; call outside the trace"
            )
        if hasattr(value, "__tensor_flatten__"):
            return self._reduce_wrapper(value)
        if kind in stand_ins:
            return _same, (stand_ins[kind](value),)
        if kind.__reduce_ex__ is torch.nn.Parameter.__reduce_ex__:
            return self._reduce_parameter(value, kind)
        if kind.__reduce_ex__ is torch.Tensor.__reduce_ex__:
            if isinstance(value, torch.nn.Parameter):  # by its mark, see torch.nn.Parameter
                return self._reduce_parameter(value, kind)
            return _with_attributes(value, make_subclass, plain_alias(value), kind)
        registered = copyreg.dispatch_table.get(kind)
        made: Any = registered(value) if registered is not None else value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if value.requires_grad and not is_lazy(value) and not _carries(made, value):
            self.lost.append(value)
        return made

    def _reduce_parameter(self, value: torch.Tensor, *kind: type) -> Any:
        alias = plain_alias(value)
        self.parameters.append((value, alias))
        return _with_attributes(value, make_parameter, alias, value.requires_grad, *kind)

    def _reduce_wrapper(self, value: torch.Tensor) -> Any:
        kind: Any = type(value)
        names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: getattr(value, name) for name in names}
        made_of: tuple[Any, ...]
        if value.layout is torch.jagged:  # its shape and stride contain symbols of this process
            dimension = ragged_dimensions.name_of(inner[_ragged_source(inner)])
            made_of = kind, inner, context, None, None, dimension
        else:
            made_of = kind, inner, context, tuple(value.shape), value.stride(), None
        number = -1
        if value.requires_grad:
            number = len(self.wrapped)
            self.wrapped.append(value)
        attributes = {
            name: item
            for name, item in value.__dict__.items()
            # A class with its own pickling may have private attributes that cannot be pickled.
            if not (name in inner or (name[0] == "_" and kind.__reduce_ex__ is not torch.Tensor.__reduce_ex__))
        }
        is_parameter = bool(attributes.pop(_PARAMETER_MARK, False))
        arguments = made_of, value.requires_grad, is_parameter, number
        return make_wrapper, arguments, attributes, None, None, set_attributes


def plain_alias(value: torch.Tensor) -> torch.Tensor:
    """Return ``value`` without its class, on the same memory and in the same graph.

    Without grad mode there is no graph. The alias then only has the same ``requires_grad`` as ``value``.
    """
    with torch._C.DisableTorchFunctionSubclass():
        plain = value.as_subclass(torch.Tensor)
        if plain.requires_grad is not value.requires_grad:
            plain = plain.detach().requires_grad_(value.requires_grad)
        return plain


def set_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    """Give a rebuilt tensor its Python attributes."""
    tensor.__dict__.update(attributes)


def make_parameter(tensor: torch.Tensor, requires_grad: bool, kind: Any = torch.nn.Parameter) -> torch.Tensor:
    """Build a parameter. A tensor that is part of a graph is not a leaf here, so it stays an ordinary tensor."""
    if is_recorded(tensor):
        return tensor if kind is torch.nn.Parameter else tensor.as_subclass(kind)
    if not issubclass(kind, torch.nn.Parameter):
        return torch.nn.Parameter(tensor.detach().as_subclass(kind), requires_grad)
    made: torch.Tensor = torch.Tensor._make_subclass(kind, tensor.detach(), requires_grad)
    return made


def make_subclass(tensor: torch.Tensor, kind: Any) -> torch.Tensor:
    """Build a tensor of a class that has memory of its own."""
    made: torch.Tensor = tensor.as_subclass(kind)
    return made


def make_wrapper(
    tensors: Sequence[torch.Tensor], made_of: tuple[Any, ...], requires_grad: bool, is_parameter: bool, number: int
) -> torch.Tensor:
    """Build a wrapper from the tensors of a message, and attach it to the graph if it has a number."""
    kind, inner, context, shape, stride, dimension = made_of
    attached = number >= 0 and isinstance(tensors, TensorList) and tensors.attach is not None
    if attached:
        inner = tensors.own(inner)  # type: ignore[attr-defined]
    if dimension is not None:
        source = _ragged_source(inner)
        inner = {**inner, source: ragged_dimensions.adopt(dimension, inner[source])}
    made: torch.Tensor = kind.__tensor_unflatten__(inner, context, shape, stride)
    if attached:
        made = tensors.attach(number, made)  # type: ignore[attr-defined]
        _keep_inner_graph(made, inner)
        if is_recorded(made) or not is_parameter:
            return made
    if is_parameter:
        return torch.nn.Parameter(made.detach(), requires_grad)
    return made.requires_grad_() if requires_grad and made.is_leaf else made


def _keep_inner_graph(wrapper: torch.Tensor, inner: dict[str, Any]) -> None:
    """Give a wrapper back its inner tensors that are part of a graph of their own. Attaching has detached them."""
    for name, part in inner.items():
        if isinstance(part, torch.Tensor) and part.requires_grad:
            setattr(wrapper, name, part)
            if getattr(wrapper, name) is not part:
                raise SerializationError(
                    f"a {type(wrapper).__name__} and its inner tensor {name!r} both require grad, but the receiver "
                    f"cannot set {name!r}; detach one of the two before you send it"
                )


def _with_attributes(value: torch.Tensor, build: Callable[..., Any], *args: Any) -> Any:
    attributes = {name: item for name, item in value.__dict__.items() if name != _PARAMETER_MARK}
    return build, args, attributes, None, None, set_attributes


def _carries(reduced: Any, value: torch.Tensor) -> bool:
    """Whether the reduced form of a value contains a tensor that is an alias of the value in the graph."""
    with torch._C.DisableTorchFunctionSubclass():
        node: Any = value.grad_fn or value
        for part in tree_leaves(list(reduced[1:3])) if isinstance(reduced, tuple) else ():
            if not isinstance(part, torch.Tensor) or not part.requires_grad:
                continue
            if (part.grad_fn or part) is node:
                return True
            behind: Any = getattr(part.grad_fn, "next_functions", ())
            if len(behind) == 1 and getattr(behind[0][0], "variable", behind[0][0]) is node:
                return True
    return False


def _ragged_source(inner: dict[str, Any]) -> str:
    """The inner tensor of a jagged tensor that identifies its ragged dimension."""
    return "_offsets" if inner.get("_lengths") is None else "_lengths"


class _RaggedDimensions:
    """Names the ragged dimensions of jagged tensors. A name is the same in all processes. Thread-safe.

    torch allows an operation on two jagged tensors only if their offsets are the same tensor object. Offsets that are
    sent get a name. If this process already has offsets of that name, the received tensor uses them. A jagged tensor
    that comes back, or its gradient, therefore matches the tensors that stayed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards both tables
        self._names: Any = WeakTensorKeyDictionary()  # offsets -> name
        self._offsets: dict[bytes, TensorWeakRef] = {}

    def name_of(self, offsets: torch.Tensor) -> bytes:
        """Return the name of a ragged dimension."""
        with self._lock:
            name: bytes | None = self._names.get(offsets)
            if name is None:
                name = secrets.token_bytes(12)
                self._register(name, offsets)
            return name

    def adopt(self, name: bytes, offsets: torch.Tensor) -> torch.Tensor:
        """Return the offsets of the dimension ``name`` in this process, which are equal to ``offsets``."""
        with self._lock:
            known = self._offsets.get(name)
            found = None if known is None else known()
            if found is None:
                self._register(name, offsets)
                return offsets
        same = found.device == offsets.device and found.dtype == offsets.dtype and torch.equal(found, offsets)
        return found if same else offsets

    def _register(self, name: bytes, offsets: torch.Tensor) -> None:
        self._names[offsets] = name
        self._offsets[name] = TensorWeakRef(offsets)
        if len(self._offsets) > 2 * len(self._names) + 64:
            self._offsets = {name: each for name, each in self._offsets.items() if each() is not None}


ragged_dimensions = _RaggedDimensions()
"""The ragged dimensions of this process."""
