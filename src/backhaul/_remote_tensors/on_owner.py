"""What the owner of tensors runs for workers that use them. It gets places and returns descriptions.

A result with dimensions stays here, and so does a view. A number, as a tensor without dimensions or in another form,
goes to the caller.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from backhaul._remote_tensors.addresses import Kind, Place, Places, travels_by_fields
from backhaul._rpc.calls.served_call import reply_as_it_is
from backhaul._rref.handle import RRef
from backhaul._rref.owner_calls import Named
from backhaul._rref.registry import current_rrefs
from backhaul._wire.callables import name_of, resolve
from backhaul._wire.pickling import reducers


@dataclasses.dataclass(frozen=True, slots=True)
class TensorForm:
    """What a caller must know of a tensor to stand for it.

    Attributes:
        shape, stride, dtype, layout: Those of the tensor; no stride if it is not strided.
        has_graph: For a gradient, whether a backward pass has recorded how it was computed.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    layout: torch.layout
    has_graph: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorForm:
        """The form of a tensor of this worker."""
        strided = tensor.layout is torch.strided
        return cls(tuple(tensor.shape), tensor.stride() if strided else None, tensor.dtype, tensor.layout)


def _make_form(
    shape: tuple[int, ...], stride: tuple[int, ...] | None, dtype: str, layout: str, has_graph: bool
) -> TensorForm:
    return TensorForm(shape, stride, getattr(torch, dtype), getattr(torch, layout), has_graph)


def _reduce_form(form: TensorForm, parcels: list[Any]) -> Any:
    dtype, layout = str(form.dtype).removeprefix("torch."), str(form.layout).removeprefix("torch.")
    return _make_form, (form.shape, form.stride, dtype, layout, form.has_graph)


reducers[TensorForm] = _reduce_form
reducers[torch._ops.OpOverload] = lambda operation, parcels: (resolve, (name_of(operation),))


@travels_by_fields
@dataclasses.dataclass(frozen=True, slots=True)
class Stays:
    """A result that stays here.

    Attributes:
        form: Its form.
        value: A reference to it, or its place if the caller had one.
    """

    form: TensorForm
    value: RRef[torch.Tensor] | Place


@dataclasses.dataclass(frozen=True, slots=True)
class Description:
    """The tensors of a module.

    Attributes:
        parameters: Names and indices; tied parameters have several names and one index.
        forms: The form of each parameter, and whether it requires grad.
        buffers: Names and forms.
        not_persistent: Names of buffers that are not part of the state.
        norms: Names and momenta of batch normalization layers.
        uninitialized: Names of lazy parameters. If there are any, nothing else is described.
    """

    parameters: list[tuple[str, int]]
    forms: list[tuple[TensorForm, bool]]
    buffers: list[tuple[str, TensorForm]]
    not_persistent: list[str]
    norms: list[tuple[str, float | None]]
    uninitialized: list[str]


Gradients = list[TensorForm | None]
"""For each parameter of a module, the form of its gradient; None if it has none."""


class Containers:
    """The objects that a message names. Finds tensors in them."""

    def __init__(self, named: Sequence[Named]) -> None:
        owned = current_rrefs().owned
        self.values: list[Any] = [owned.use(*each).wait() for each in named]
        self._parameters: dict[int, list[torch.Tensor]] = {}
        self._found: dict[int, tuple[torch.Tensor, Place]] = {}  # by the id of the tensor

    def parameters(self, container: int) -> list[torch.Tensor]:
        """The parameters of a module."""
        found = self._parameters.get(container)
        if found is None:
            found = self._parameters[container] = list(self.values[container].parameters())
        return found

    def parameter(self, place: Place) -> torch.Tensor:
        """The parameter at a place, itself; ``find`` returns it without its graph."""
        found: torch.Tensor = self.parameters(place.container)[place.key]
        return found

    def find(self, place: Place) -> torch.Tensor:
        """The tensor at a place."""
        value, key = self.values[place.container], place.key
        if place.kind == "value":
            found: torch.Tensor = value
        elif place.kind == "state":
            found = value.find(key)
        elif place.kind == "buffer":
            found = list(value.buffers())[key]
        else:
            found = self.parameters(place.container)[key]
            if place.kind == "gradient":
                if found.grad is None:
                    raise RuntimeError(f"parameter {key} of the {type(value).__name__} has no gradient any more")
                found = found.grad
            else:
                found = found.detach()
        self._found[id(found)] = found, place
        return found

    def find_all(self, values: Any) -> Any:
        """``values`` with tensors in place of their places."""

        def find(value: Any) -> Any:
            if isinstance(value, Place):
                return self.find(value)
            if isinstance(value, Places):
                return [self.find(Place(value.container, value.kind, key)) for key in value.keys]
            return value

        return tree_map(find, values)

    def place_of(self, tensor: torch.Tensor) -> Place | None:
        """The place of a tensor that was found."""
        found = self._found.get(id(tensor))
        return None if found is None or found[0] is not tensor else found[1]


@torch.no_grad()
def run(named: Sequence[Named], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function with tensors of this worker."""
    containers = Containers(named)
    args, kwargs = containers.find_all((args, kwargs))
    result = function(*args, **kwargs)
    views = _makes_views(function)

    def reply(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        place = containers.place_of(value)
        if place is not None:
            return Stays(TensorForm.of(value), place)
        return Stays(TensorForm.of(value), RRef(value)) if value.dim() or views else on_cpu(value)

    return tree_map(reply, result)


def _makes_views(function: Callable[..., Any]) -> bool:
    """Whether the results of an operation share memory with its arguments and are no arguments."""
    if not isinstance(function, torch._ops.OpOverload):
        return False
    aliases = [each.alias_info for each in function._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


@torch.no_grad()
def fetch(named: Sequence[Named], places: Sequence[Place] | Places) -> list[torch.Tensor]:
    """Copies of tensors."""
    reply_as_it_is()
    return [on_cpu(tensor.detach()) for tensor in Containers(named).find_all(places)]


@torch.no_grad()
def keep(named: Sequence[Named], kind: Kind, keys: Sequence[Any]) -> list[RRef[torch.Tensor] | None]:
    """References to tensors of the one container, as they are now. None: the tensor is not there any more."""
    containers = Containers(named)
    made: list[RRef[torch.Tensor] | None] = []
    for key in keys:
        try:
            found = containers.find(Place(0, kind, key))
        except (RuntimeError, IndexError):
            made.append(None)
        else:
            made.append(RRef(found if kind == "gradient" else found.detach()))
    return made


@torch.no_grad()
def rebind(named: Sequence[Named], place: Place, value: Place | torch.Tensor) -> TensorForm:
    """Set ``.data`` of a parameter or a buffer itself."""
    containers = Containers(named)
    target = containers.parameter(place) if place.kind == "parameter" else containers.find(place)
    target.data = containers.find_all(value).to(target.device)
    return TensorForm.of(target)


def store(named: Sequence[Named], value: torch.Tensor, like: Place) -> tuple[RRef[torch.Tensor], TensorForm]:
    """Keep a tensor that the caller has sent, on the device of another."""
    stored = value.to(Containers(named).find(like).device)
    return RRef(stored), TensorForm.of(stored)


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU. Meta tensors have no data to move."""
    return tensor if tensor.is_meta else tensor.cpu()


def differentiable(module: nn.Module, indices: Iterable[int]) -> list[torch.Tensor]:
    """Parameters of a module as parts of the graph: the gradients of the copies at the caller reach the parameters."""
    reply_as_it_is()
    parameters = list(module.parameters())
    return [on_cpu(parameters[index].view_as(parameters[index])) for index in indices]


def differentiable_gradient(module: nn.Module, index: int) -> torch.Tensor:
    """The gradient of a parameter, with the graph that a pass with ``create_graph=True`` has recorded."""
    reply_as_it_is()
    gradient = list(module.parameters())[index].grad
    if gradient is None:
        raise RuntimeError(f"parameter {index} of the {type(module).__name__} has no gradient any more")
    return on_cpu(gradient.view_as(gradient))


def describe(module: nn.Module) -> Description:
    """The tensors of a module."""
    named = list(module.named_parameters(remove_duplicate=False))
    if lazy := [name for name, parameter in named if is_lazy(parameter)]:
        return Description([], [], [], [], [], lazy)
    indices = {parameter: index for index, parameter in enumerate(module.parameters())}
    return Description(
        [(name, indices[parameter]) for name, parameter in named],
        [(TensorForm.of(parameter), parameter.requires_grad) for parameter in indices],
        [(name, TensorForm.of(buffer)) for name, buffer in module.named_buffers() if not is_lazy(buffer)],
        [
            f"{prefix}.{name}" if prefix else name
            for prefix, part in module.named_modules()
            for name in part._non_persistent_buffers_set
        ],
        [(name, part.momentum) for name, part in module.named_modules() if isinstance(part, _BatchNorm)],
        [],
    )


def are_gradients(known: Gradients, parameters: Sequence[torch.Tensor]) -> bool:
    """Whether the gradients of parameters have the forms that are known. Unlike ``gradients_of``, it makes nothing."""
    if len(known) != len(parameters):
        return False
    for form, parameter in zip(known, parameters, strict=True):
        grad = parameter.grad
        if grad is None:
            if form is not None:
                return False
        elif (
            form is None
            or grad.shape != form.shape
            or grad.dtype is not form.dtype
            or grad.layout is not form.layout
            or grad.requires_grad is not form.has_graph
            or (form.stride is not None and grad.stride() != form.stride)
        ):
            return False
    return True


def gradients_of(parameters: Iterable[torch.Tensor]) -> Gradients:
    """The forms of the gradients of parameters."""
    grads = [parameter.grad for parameter in parameters]
    return [
        None
        if grad is None
        else dataclasses.replace(TensorForm.of(grad), has_graph=True)
        if grad.requires_grad
        else TensorForm.of(grad)
        for grad in grads
    ]


def describe_gradients(named: Sequence[Named]) -> list[Gradients]:
    """The forms of the gradients of the named modules."""
    return [gradients_of(module.parameters()) for module in Containers(named).values]


@torch.no_grad()
def accumulate(named: Sequence[Named], place: Place, gradient: Place | torch.Tensor) -> None:
    """Add to the gradient of a parameter, as a pass does: passes that end at the same time lose nothing."""
    containers = Containers(named)
    parameter = containers.parameter(place)
    found = containers.find_all(gradient)
    if parameter.requires_grad:
        torch.autograd.backward([parameter], [found.to(parameter.device)])


@torch.no_grad()
def copy_parameter(named: Sequence[Named], place: Place, requires_grad: bool) -> tuple[RRef[nn.Module], Description]:
    """A module with one parameter, which is a copy of a tensor."""
    copy = nn.ParameterList([nn.Parameter(Containers(named).find(place).clone(), requires_grad)])
    return RRef(copy), describe(copy)


def check_and_unscale(
    gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor
) -> torch.Tensor:
    """Unscale gradients. Returns 1 if one of them is infinite or NaN, else 0."""
    device = gradients[0].device
    found = found_inf.to(device)
    torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), found, inverse_scale.to(device))
    return found
