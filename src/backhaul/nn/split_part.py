"""What ``split`` leaves in a model in place of a module that it has moved. It knows no models."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import nn

from backhaul._remote_tensors.on_owner import Description
from backhaul._rpc.compression import as_it_is
from backhaul._rref.handle import RRef
from backhaul._wire.pickling import reducers
from backhaul.nn import split_owner
from backhaul.nn.remote_module import RemoteModule
from backhaul.nn.split_inner import (
    OF_EVERY_MODULE,
    Impersonates,
    InnerModule,
    SplitInner,
    attributes_of,
    list_inner,
    make_inner,
    place_tensors,
    read_attribute,
)

_SLOTS = (
    "on",
    "device",
    "module_rref",
    "_methods",
    "_tensors",
    "_placed",
    "_name",
    "_kind",
    "_attributes",
    "_listed",
    "_inner",
)

OF_EVERY_PART = frozenset((*OF_EVERY_MODULE, *dir(RemoteModule), *_SLOTS, "_shares"))
"""The attributes that a part has, whatever it stands for."""


class SplitPart(Impersonates, RemoteModule):
    """A ``RemoteModule`` that stands for a module of a model. It has the methods and the attributes of that module.

    Methods run on the owner. Reading an attribute returns a copy of its current value. Setting an attribute that the
    module had when it was moved sets it on the owner. Other attributes that are set stay on this worker.

    Attributes:
        _name: The name of the module in the model.
        _kind: Its class.
        _attributes: The names of its attributes that are no tensors, modules or methods.
        _listed: The modules inside it.
        _inner: What stands for them here, once the parameters were listed.
        _shares: Whether it shares parameters with another part.
    """

    _name: str
    _kind: type[nn.Module]
    _attributes: frozenset[str]
    _listed: list[InnerModule]
    _inner: Sequence[SplitInner] = ()
    _shares: bool = False

    def __getattr__(self, name: str) -> Any:
        """Called for names that this side does not have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "_attributes" not in self.__dict__:
                raise
        return read_attribute(self._ask_owner, self._path(name), self.on, "", name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            raise ValueError(
                f"'{self._path(name)}' cannot be set here: '{self._name}' is on worker '{self.on}'; set it before "
                "split, or after bh.nn.gather"
            )
        if name in self.__dict__.get("_attributes", ()):
            with torch.no_grad(), as_it_is():
                self._ask_owner(split_owner.write, "", name, value)
        else:
            super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if self._shares:
            raise ValueError(
                f"'{self._name}' cannot be copied: it shares parameters with another part on worker '{self.on}', and a "
                "copy would not; copy the model before split, or after bh.nn.gather"
            )
        return super().__deepcopy__(memo)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Called by torch when it converts the model: convert this part to the same type. It stays on its device."""
        if self._tensors is not None:
            tensors = [*self._tensors.parameters.values(), *self._tensors.buffers.values()]
            types = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
            wanted = {fn(torch.empty(0, dtype=dtype)).dtype for dtype in types}
            if wanted != types:
                if len(wanted) > 1:
                    raise ValueError(
                        f"'{self._name}' has parameters of several types ({', '.join(map(str, types))}), and they are "
                        "to stay different; convert the model before split, or after bh.nn.gather"
                    )
                self.to(wanted.pop())
        return self

    # What is inside it.

    def _describe(self, description: Description) -> None:
        super()._describe(description)
        self.__dict__["_inner"] = make_inner(self, self._name, self._listed)
        self._place_tensors()

    def _describe_again(self, description: Description) -> None:
        super()._describe_again(description)
        self._place_tensors()

    def _place_tensors(self) -> None:
        if self._tensors is not None:
            place_tensors(self, self._inner, "_parameters", dict(self._tensors.parameters))
            place_tensors(self, self._inner, "_buffers", dict(self._tensors.buffers))
            self._note_placed([self, *self._inner])

    def _find_given(self) -> dict[str, Any]:
        tensors = self._tensors
        assert tensors is not None
        found: dict[str, Any] = {}
        modules = {"": self, **{each._path: each for each in self._inner}}
        names = [name for name in tensors.names if name.rpartition(".")[0] not in modules]  # second names of modules
        for path, module in modules.items():
            prefix = f"{path}." if path else ""
            own = module.__dict__["_parameters"], module.__dict__["_buffers"]
            found.update(tensors.others_in(prefix, *own))
            names += [prefix + name for listed in own for name in listed]
        self._check_names(names)
        return found

    def _note_layers(self, description: Description) -> None:
        super()._note_layers(description)
        self.__dict__["_norms"] = {}  # they are among the modules inside it

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self._note_modes([mode] * (1 + len(self._inner)))
        return self

    def _note_modes(self, modes: list[bool]) -> None:
        for each, mode in zip(self._inner, modes[1:], strict=True):
            each.__dict__["training"] = mode

    def _path(self, name: str) -> str:
        return f"{self._name}.{name}" if self._name else name

    def _get_name(self) -> str:
        return "RemoteModule"

    def extra_repr(self) -> str:
        return f"{self._kind.__name__}, {super().extra_repr()}"

    def __repr__(self) -> str:
        return f"{self._get_name()}({self.extra_repr()})"


class SplitContainer(SplitPart):
    """Stands for a module whose class can be indexed or iterated over."""

    def __iter__(self) -> NoReturn:
        raise self._no_elements("iterated over")

    def __getitem__(self, index: Any) -> NoReturn:
        raise self._no_elements("indexed")

    def __len__(self) -> int:
        raise self._no_elements("measured with len()")

    def __bool__(self) -> bool:
        return True

    def _no_elements(self, what: str) -> TypeError:
        return TypeError(
            f"'{self._name}' (a {self._kind.__name__}) cannot be {what} here: it is on worker '{self.on}', with its "
            f"elements; split its elements in place of it: {{'{self._path('0')}': '{self.on}', ...}}"
        )


def make_part(
    name: str, module: nn.Module, device: torch.device, reference: RRef[nn.Module], description: Description
) -> SplitPart:
    """Make what stands for ``module``.

    Args:
        name: The name of the module in its model.
        module: The module.
        device: The device on which the owner has the module now.
        reference: A reference to the module there.
        description: Its tensors there.
    """
    kind = type(module)
    methods = tuple(
        each
        for each in dir(kind)
        if each not in OF_EVERY_PART
        and not each.startswith("__")
        and isinstance(inspect.getattr_static(kind, each), types.FunctionType)
    )
    attributes = attributes_of(module) - OF_EVERY_PART
    has_elements = hasattr(kind, "__getitem__") or hasattr(kind, "__iter__")
    made_as = SplitContainer if has_elements else SplitPart
    shown = name, kind, attributes, list_inner(module)
    part = _arrive_part(made_as, reference, device, methods, module.training, *shown)
    part._describe(description)
    return part


def share_proxies(parts: Iterable[tuple[SplitPart, nn.Module]]) -> None:
    """Let parts that share parameters list the same proxies. Each part is given with the module for which it stands."""
    first: dict[int, tuple[SplitPart, Any]] = {}  # by the id of the parameter
    for part, module in parts:
        assert part._tensors is not None
        listed = dict(part._tensors.parameters)
        for index, (name, parameter) in enumerate(module.named_parameters()):
            other, proxy = first.setdefault(id(parameter), (part, listed[name]))
            if other is not part:
                part._tensors.share(index, proxy)
                other.__dict__["_shares"] = part.__dict__["_shares"] = True
        part._place_tensors()


def _reduce_part(part: SplitPart, parcels: list[Any]) -> Any:
    """A part travels in calls as a ``RemoteModule`` does: as a reference."""
    shown = part._name, part._kind, part._attributes, part._listed
    device = torch.device(part.device)
    return _arrive_part, (type(part), part.module_rref, device, part._methods, part.training, *shown)


def _arrive_part(  # noqa: PLR0917 (in a message)
    made_as: type[SplitPart],
    reference: RRef[nn.Module],
    device: torch.device,
    methods: tuple[str, ...],
    training: bool,
    name: str,
    kind: type[nn.Module],
    attributes: frozenset[str],
    listed: list[InnerModule],
) -> SplitPart:
    part = made_as.__new__(made_as)
    part._set(reference, device, methods, training)
    part.__dict__.update(_name=name, _kind=kind, _attributes=attributes, _listed=listed)
    return part


reducers[SplitPart] = reducers[SplitContainer] = _reduce_part
