"""Decides what ``split`` moves where, and checks it before anything moves. Changes nothing and sends nothing.

A model is a set of tensors and modules that may be shared. A split is exact only if everything that is shared stays
together. The *home* of a module is the worker and device to which its part goes, or None if it stays.
"""

from __future__ import annotations

import collections
import difflib
import functools
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from backhaul._rpc.node import Node
from backhaul._rref.handle import RRef
from backhaul._types import WorkerInfo
from backhaul._worker.worker import current_worker
from backhaul.nn.remote_device import parse_place
from backhaul.nn.remote_module import RemoteModule

_MAX_VALUES = 10_000  # values that are searched for references to modules and tensors, for each module

Home = tuple[WorkerInfo, torch.device]


@dataclass(frozen=True, slots=True)
class MovedPart:
    """A module that moves.

    Attributes:
        name: Its name in the model, as the user wrote it.
        module: The module.
        home: Where it goes.
    """

    name: str
    module: nn.Module
    home: Home


@dataclass(slots=True)
class _Survey:
    """What is registered in a model.

    Attributes:
        modules: Name, module and home of each module. A module that has two homes is there twice.
        tensors: The same for parameters and buffers.
        homes: The homes of each module and tensor, by id.
        names: A name of each module and tensor, by id.
    """

    modules: list[tuple[str, nn.Module, Home | None]] = field(default_factory=list)
    tensors: list[tuple[str, torch.Tensor, Home | None]] = field(default_factory=list)
    homes: dict[int, set[Home | None]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    def note(self, name: str, value: nn.Module | torch.Tensor, home: Home | None) -> bool:
        """Note that something is registered. Returns whether that is news."""
        homes = self.homes.setdefault(id(value), set())
        self.names.setdefault(id(value), name)
        if home in homes:
            return False
        homes.add(home)
        return True


def make_plan(model: nn.Module, places: Mapping[str, str]) -> list[MovedPart]:
    """The parts of ``model`` to move, without duplicates.

    Raises:
        TypeError: ``model`` or ``places`` is of another type.
        ValueError: The split is not possible.
        UnknownWorkerError: A place names no worker.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not a {type(model).__name__}")
    if not isinstance(places, Mapping):
        raise TypeError(
            f"places must be a dict of module names and workers, such as {{'encoder': 'worker1'}}, not a "
            f"{type(places).__name__}"
        )
    parts: dict[int, MovedPart] = {}
    for name, place in places.items():
        part = MovedPart(name, _find(model, name), _home(name, place))
        other = parts.setdefault(id(part.module), part)
        if other.home != part.home:
            raise ValueError(
                f"'{other.name}' and '{name}' are the same module, so they cannot be on two workers; name one of the "
                "two, and both move"
            )
    survey = _Survey()
    _survey(survey, model, "", None, None, parts)
    _check_parts(parts, survey)
    _check_shared_tensors(survey)
    _check_references(survey)
    return list(parts.values())


def _find(model: nn.Module, name: Any) -> nn.Module:
    if not isinstance(name, str):
        raise TypeError(f"a part is named by a str such as 'encoder.layers.0', not a {type(name).__name__}")
    module: Any = model
    for step in name.split(".") if name else ():
        if isinstance(module, RemoteModule):
            raise ValueError(
                f"'{name}' is inside a module that is on worker '{module.on}' already; call bh.nn.gather(model) first"
            )
        if step not in module._modules or module._modules[step] is None:
            raise ValueError(f"the model has no module '{name}'{_hint(model, name)}")
        module = module._modules[step]
    found: nn.Module = module
    return found


def _hint(model: nn.Module, name: str) -> str:
    known = [each for each, _ in model.named_modules() if each]
    tensors = [each for each, _ in (*model.named_parameters(), *model.named_buffers())]
    if name in tensors:
        return f": '{name}' is a tensor; name the module that has it, '{name.rpartition('.')[0]}'"
    if not known:
        return ": it has no submodules; '' names the model itself"
    close = difflib.get_close_matches(name, known, 3, 0.5)
    if close:
        return f"; similar names: {', '.join(close)}"
    return f"; its children: {', '.join(each for each, _ in model.named_children())}"


def _home(name: str, place: Any) -> Home:
    try:
        parsed = parse_place(place)
    except (TypeError, ValueError) as error:
        raise type(error)(f"the place of '{name}': {error}") from None
    return current_worker().part(Node).peers.find(parsed.worker).info, parsed.device


def _survey(  # noqa: PLR0917
    survey: _Survey, module: nn.Module, name: str, home: Home | None, inside: str | None, parts: Mapping[int, MovedPart]
) -> None:
    """Note a module and everything registered in it. ``inside``: the part that contains it."""
    part = parts.get(id(module))
    if part is not None:
        if inside is not None:
            raise ValueError(
                f"'{part.name}' is inside '{inside}', and both are to move; name one of them, or the other modules "
                f"inside '{inside}' instead of it"
            )
        home, inside = part.home, part.name
    if not survey.note(name, module, home):
        return
    survey.modules.append((name, module, home))
    if isinstance(module, RemoteModule):
        return
    prefix = f"{name}." if name else ""
    for tensors in (module._parameters, module._buffers):
        for key, tensor in tensors.items():
            if tensor is not None and survey.note(prefix + key, tensor, home):
                survey.tensors.append((prefix + key, tensor, home))
    for key, child in module._modules.items():
        if child is not None:
            _survey(survey, child, prefix + key, home, inside, parts)


def _check_parts(parts: Mapping[int, MovedPart], survey: _Survey) -> None:
    for name, module, home in survey.modules:
        inside = home is not None
        if inside and isinstance(module, RemoteModule):
            raise ValueError(
                f"'{name}' is on worker '{module.on}' already; call bh.nn.gather(model) first, or leave it out"
            )
        if isinstance(module, torch.jit.ScriptModule) and (
            inside or any(id(child) in parts for child in module._modules.values())
        ):
            raise ValueError(f"'{name or 'the model'}' is a script module; split it before torch.jit.script")
    for name, tensor, home in survey.tensors:
        if home is not None and is_lazy(tensor):
            raise ValueError(f"'{name}' is not initialized yet; run the model once on this worker before you split it")


def _check_shared_tensors(survey: _Survey) -> None:
    """Tensors that are the same, or overlap in memory, must have one home."""
    first: dict[int, tuple[str, Home | None]] = {}
    spans = []
    for name, tensor, home in survey.tensors:
        other, other_home = first.setdefault(id(tensor), (name, home))
        if other_home != home:
            raise _tied(other, other_home, name, home)
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.numel():
            start = 0 if tensor.is_meta else tensor.data_ptr()
            reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            if start:
                spans.append((str(tensor.device), start, start + (reach + 1) * tensor.element_size(), name, home))
    spans.sort(key=lambda span: span[:3])
    ends: dict[tuple[str, Home | None], tuple[int, str]] = {}  # how far the tensors of each home reach
    for device, start, end, name, home in spans:
        for (other_device, other_home), (other_end, other) in ends.items():
            if other_device == device and other_home != home and other_end > start:
                raise _tied(other, other_home, name, home)
        ends[device, home] = max(ends.get((device, home), (0, "")), (end, name))


def _tied(name: str, home: Home | None, other: str, other_home: Home | None) -> ValueError:
    return ValueError(
        f"'{name}' and '{other}' share one tensor, but {_fate(name, home)} and {_fate(other, other_home)}; "
        "put both on the same worker, or give each a tensor of its own"
    )


def _fate(name: str, home: Home | None) -> str:
    return f"'{name}' stays here" if home is None else f"'{name}' moves to '{home[0].name}/{home[1]}'"


def _check_references(survey: _Survey) -> None:
    """Attributes and hooks that refer to something registered elsewhere would refer to a copy of it afterwards."""
    for name, module, home in survey.modules:
        for path, value in () if isinstance(module, RemoteModule) else _references(module):
            homes = survey.homes.get(id(value))
            if homes is not None and home not in homes:
                where = f"{name}{path}" if name else path.removeprefix(".")
                other = survey.names[id(value)]
                raise ValueError(
                    f"'{where}' refers to '{other or 'the model'}', but {_fate(name or 'the model', home)} and "
                    f"{_fate(other or 'the model', next(iter(homes)))}; remove that reference before you split, or "
                    "keep both on the same worker"
                )


def _references(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules and tensors to which a module refers without having registered them, with the paths to them."""
    registered = ("_parameters", "_buffers", "_modules")
    waiting = collections.deque((f".{key}", value) for key, value in vars(module).items() if key not in registered)
    seen: dict[int, Any] = {}
    while waiting and len(seen) < _MAX_VALUES:
        path, value = waiting.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value  # kept: another value must not get its id
        if isinstance(value, (nn.Module, torch.Tensor)):
            yield path, value
        else:
            waiting.extend((f"{path}{step}", inner) for step, inner in _inside(value))


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """What a container, a function or an object holds."""
    if isinstance(value, dict):
        for key, item in list(value.items()):
            yield f"[{key!r}]", item
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        for index, item in enumerate(list(value)):
            yield f"[{index}]", item
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, types.FunctionType):
        for cell_name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield f" (its variable {cell_name})", cell.cell_contents
            except ValueError:  # not set yet
                pass
    elif not isinstance(value, (type, types.ModuleType, RRef)):
        try:
            attributes = list(vars(value).items())
        except (TypeError, ReferenceError):  # it has none, or is a reference to what is gone
            return
        for key, item in attributes:
            yield f".{key}", item
