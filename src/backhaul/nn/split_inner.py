"""Stands for a module inside a module that ``split`` has moved, so that a model still lists all its modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import nn

from backhaul._rpc.compression import as_it_is
from backhaul.errors import BackhaulError, SerializationError
from backhaul.nn import split_owner
from backhaul.nn.autocast import casts_here
from backhaul.nn.listed_tensors import set_buffer
from backhaul.nn.module_on_owner import ModuleOnOwner, ModuleReference

Ask = Callable[..., Any]
"""Calls a function of ``split_owner`` with a module, a path in it, and the arguments. Returns the result."""

OF_EVERY_MODULE = frozenset((*dir(nn.Module()), *nn.Module().__dict__))

InnerModule = tuple[str, str, type[nn.Module], bool, frozenset[str]]
"""The path of a module inside a part, its first path if it has several, its class, whether it is in training mode, and
the names of its attributes.
"""


def list_inner(module: nn.Module) -> list[InnerModule]:
    """All modules inside ``module``, under all their names, in its order."""
    first: dict[int, str] = {}
    return [
        (path, first.setdefault(id(each), path), type(each), each.training, attributes_of(each))
        for path, each in module.named_modules(remove_duplicate=False)
        if path
    ]


def attributes_of(module: nn.Module) -> frozenset[str]:
    """The names of the attributes that can be set and are no tensors or modules."""
    kind = type(module)
    settable = {name for name in dir(kind) if getattr(getattr(kind, name, None), "fset", None) is not None}
    return frozenset((settable | vars(module).keys()) - OF_EVERY_MODULE)


def read_attribute(ask: Ask, shown: str, on: str, path: str, name: str) -> Any:
    """The value of an attribute of a module on worker ``on``; ``shown`` is its full name in the model."""
    try:
        what, value = ask(split_owner.read, path, name)
    except SerializationError as error:
        raise AttributeError(f"'{shown}' is on worker '{on}'; it cannot be sent here: {error}", name=name) from error
    except BackhaulError as error:
        raise AttributeError(f"'{shown}' is on worker '{on}', which cannot be asked: {error}", name=name) from error
    if what == "missing":
        raise AttributeError(value, name=name)
    return functools.partial(_call, ask, path, name) if what == "method" else value


def _call(ask: Ask, path: str, method: str, /, *args: Any, **kwargs: Any) -> Any:
    return ask(split_owner.call, path, torch.is_grad_enabled(), casts_here(), method, *args, **kwargs)


class Impersonates:
    """``isinstance`` takes it for an instance of ``_kind`` too."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        kind: type = self.__dict__.get("_kind", type(self))
        return kind


class SplitInner(Impersonates, nn.Module):
    """A module inside a split part, without tensors of its own. ``isinstance`` takes it for what it stands for.

    It lists its parameters and buffers, and has the attributes and methods of the module. It cannot be called: that
    would be a message for each of the modules inside a part.
    """

    _part: ModuleReference
    _path: str
    _shown: str
    _kind: type[nn.Module]
    _attributes: frozenset[str]

    def __init__(self, part: ModuleReference, shown: str, inner: InnerModule) -> None:
        super().__init__()
        path, _, kind, training, attributes = inner
        own = {"_path": path, "_shown": shown, "_kind": kind, "_attributes": attributes, "_version": kind._version}
        self.__dict__.update(own, _part=part, training=training)

    @property
    def training(self) -> bool:
        """Whether the module is in training mode, as this side has last set or seen it."""
        found: bool = self.__dict__["training"]
        return found

    @training.setter
    def training(self, mode: bool) -> None:
        if "_path" in self.__dict__ and mode != self.training:
            self._ask(split_owner.write, self._path, "training", mode)
        self.__dict__["training"] = mode

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"'{self._shown}' cannot be called here: it is inside a module on worker '{self._part.on}'; split "
            f"'{self._shown}' itself in place of the module that contains it"
        )

    def _ask(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return self._part.ask_owner(function, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "_attributes" not in self.__dict__:
                raise
        return read_attribute(self._ask, f"{self._shown}.{name}", self._part.on, self._path, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module | nn.Parameter):
            raise ValueError(
                f"'{self._shown}.{name}' cannot be set here: it is on worker '{self._part.on}'; set it before split, "
                "or after bh.nn.gather"
            )
        if set_buffer(self, name, value):
            return
        if name in self.__dict__.get("_attributes", ()):
            with torch.no_grad(), as_it_is():
                self._ask(split_owner.write, self._path, name, value)
        else:
            super().__setattr__(name, value)

    def train(self, mode: bool = True) -> Self:
        self._ask(split_owner.train, self._path, mode)
        for each in self.modules():
            each.__dict__["training"] = mode
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        self._ask(split_owner.apply, self._path, fn)
        return self

    # The part saves, loads and converts all that is inside it.

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None: ...

    def _load_from_state_dict(self, *args: Any) -> None: ...

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # the copy of the part makes others

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"hooks of '{self._shown}' cannot be registered here: it is inside a module on worker '{self._part.on}'; "
            "register them before split, or with apply() of the module that contains it"
        )

    register_forward_hook = register_forward_pre_hook = _refuse_hook
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _refuse_hook

    def _get_name(self) -> str:
        return self._kind.__name__

    def __repr__(self) -> str:
        return f"{self._kind.__name__} inside a module on worker '{self._part.on}'"


def make_inner(part: ModuleOnOwner, name: str, modules: Sequence[InnerModule]) -> list[SplitInner]:
    """Put what stands for the modules inside a part into it. ``name`` is the name of the part in its model."""
    made: dict[str, SplitInner] = {}
    reference = ModuleReference(part.on, part.module_rref)
    part.__dict__["_modules"] = {}
    for inner in modules:
        path, first = inner[:2]
        if path == first:
            made[first] = SplitInner(reference, f"{name}.{path}" if name else path, inner)
        parent, _, own = path.rpartition(".")
        (made[parent] if parent else part).__dict__["_modules"][own] = made[first]
    return list(made.values())


def place_tensors(part: nn.Module, inner: Sequence[SplitInner], kind: str, tensors: dict[str, Any]) -> None:
    """Let the modules of a part list its tensors, each its own: ``kind`` is ``_parameters`` or ``_buffers``."""
    by_path: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        path, _, own = name.rpartition(".")
        by_path.setdefault(path, {})[own] = tensor
    part.__dict__[kind] = by_path.get("", {})
    for module in inner:
        module.__dict__[kind] = by_path.get(module._path, {})
