"""What the owner of a module does for the workers that refer to it. They call these functions on the owner."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from backhaul._remote_tensors import changes_on_owner
from backhaul._remote_tensors.changes_on_owner import Changes
from backhaul._remote_tensors.on_owner import Description, describe, on_cpu
from backhaul._rpc.calls.served_call import reply_as_it_is
from backhaul._rref.handle import RRef
from backhaul.nn.autocast import Casts, casting

State = dict[str, Any]

Made = tuple[RRef[nn.Module], bool, Description]
"""A reference to a new module, whether it is in training mode, and its tensors."""


def build(make: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> Made:
    """Make a module on a device."""
    module = make(*args, **kwargs)
    if not isinstance(module, nn.Module):
        label = getattr(make, "__qualname__", repr(make))
        raise ValueError(f"module_cls {label} must return a torch.nn.Module, but it returned a {type(module).__name__}")
    return _made(module.to(device))


def copy_of(module: nn.Module) -> Made:
    """Copy a module."""
    return _made(copy.deepcopy(module))


def _made(module: nn.Module) -> Made:
    return RRef(module), module.training, describe(module)


def run(module: nn.Module, device: str, grad: bool, method: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call the module, or one of its methods, with inputs moved to its device. Results are moved to the CPU.

    Args:
        module: The module.
        device: Its device, if it has no tensors.
        grad: Whether the caller has grad mode enabled; it is the mode here too.
        method: The method.
        args: Positional arguments of the method.
        kwargs: Keyword arguments of the method.
    """
    result = run_in_place(module, device, grad, method, *args, **kwargs)
    if _device_of(module, device).type == "cpu":
        return result
    with torch.set_grad_enabled(grad):
        return tree_map_only(torch.Tensor, on_cpu, result)


def run_there(module: nn.Module, device: str, grad: bool, method: str, /, *args: Any, **kwargs: Any) -> Any:
    """As ``run``, but results on ``device`` stay there: the caller has mapped that device to one of its own."""
    result = run_in_place(module, device, grad, method, *args, **kwargs)
    mapped = torch.device(device)
    place = mapped.type, mapped.index or 0
    with torch.set_grad_enabled(grad):
        return tree_map_only(
            torch.Tensor, lambda t: t if (t.device.type, t.device.index) == place else on_cpu(t), result
        )


def run_in_place(module: nn.Module, device: str, grad: bool, method: str, /, *args: Any, **kwargs: Any) -> Any:
    """As ``run``, but all results stay on their devices."""
    place = _device_of(module, device)
    function = module if method == "forward" else getattr(module, method)
    if place.type == "cpu" and grad == torch.is_grad_enabled():
        return function(*args, **kwargs)
    with torch.set_grad_enabled(grad):
        if place.type != "cpu":
            args, kwargs = tree_map_only(torch.Tensor, lambda tensor: _bring(tensor, place), (args, kwargs))
        return function(*args, **kwargs)


def run_with(  # noqa: PLR0917 (positional arguments travel without pickle)
    module: nn.Module,
    given: Mapping[str, torch.Tensor],
    runner: str,
    device: str,
    grad: bool,
    method: str,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call ``runner`` while the module uses the tensors in ``given`` in place of its own."""
    place = _device_of(module, device)
    with torch.set_grad_enabled(grad):
        used = {name: _bring(tensor, place) for name, tensor in given.items()}
    versions = {name: tensor._version for name, tensor in used.items() if not tensor.is_inference()}
    with torch.nn.utils.stateless._reparametrize_module(module, used):
        result = _RUNNERS[runner](module, device, grad, method, *args, **kwargs)
    if changed := [name for name, version in versions.items() if used[name]._version != version]:
        raise RuntimeError(
            f"the {type(module).__name__} has changed {', '.join(changed)}, which functional_call() gave to it as a "
            "copy from another worker; run the module in evaluation mode, or do not give these tensors"
        )
    return result


def run_changed(  # noqa: PLR0917 (positional arguments travel without pickle)
    module: nn.Module,
    driver: str,
    changes: Sequence[tuple[Any, ...]],
    runner: str,
    device: str,
    grad: bool,
    method: str,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Change the module's parameters, then call ``runner``, one of the functions above."""
    changes_on_owner.change(
        module,
        driver,
        [Changes(number, cleared, zeroed, {}, requires_grad) for number, cleared, zeroed, requires_grad in changes],
    )
    return _RUNNERS[runner](module, device, grad, method, *args, **kwargs)


def run_cast(module: nn.Module, casts: Casts, runner: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call ``runner``, one of the functions above, under the autocast of the caller."""
    with casting(casts):
        return _RUNNERS[runner](module, *args, **kwargs)


RUN, RUN_THERE, RUN_IN_PLACE, RUN_WITH, RUN_CHANGED, RUN_CAST = (
    f"{function.__module__}:{function.__qualname__}"
    for function in (run, run_there, run_in_place, run_with, run_changed, run_cast)
)
"""The names of these functions in messages."""

_RUNNERS: dict[str, Callable[..., Any]] = {
    RUN: run,
    RUN_THERE: run_there,
    RUN_IN_PLACE: run_in_place,
    RUN_WITH: run_with,
    RUN_CHANGED: run_changed,
}


def _device_of(module: nn.Module, otherwise: str | torch.device) -> torch.device:
    """The device of the first parameter or buffer: any worker may have moved the module with ``to``."""
    found = _first_of(module, "_parameters") if _is_listed_by_torch(module) else next(module.parameters(), None)
    if found is None:
        found = next(module.buffers(), None)
    return torch.device(otherwise) if found is None else found.device


def _is_listed_by_torch(module: nn.Module) -> bool:
    kind = type(module)
    return kind.named_parameters is nn.Module.named_parameters and kind.parameters is nn.Module.parameters


def _first_of(module: nn.Module, kind: str) -> torch.Tensor | None:
    """The first tensor that ``parameters`` lists. Its generators would take longer than a small call."""
    for tensor in getattr(module, kind).values():
        if tensor is not None:
            return tensor  # type: ignore[no-any-return]
    for part in module._modules.values():
        if part is not None and (found := _first_of(part, kind)) is not None:
            return found
    return None


def _bring(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor if tensor.is_meta else tensor.to(device)


def parameters(module: nn.Module, recurse: bool) -> list[RRef[nn.Parameter]]:
    """References to the parameters, in the module's order."""
    return [RRef(parameter) for parameter in module.parameters(recurse)]


def change(module: nn.Module, method: str, args: Any, kwargs: Any) -> Description:
    """Call a method that changes the module. Returns its tensors."""
    getattr(module, method)(*args, **kwargs)
    return describe(module)


_modes: weakref.WeakKeyDictionary[nn.Module, list[bool]] = weakref.WeakKeyDictionary()
"""The modes of modules and of all that is inside them, before the last change by ``train``."""


def train(module: nn.Module, mode: bool) -> None:
    """Set the mode of a module and of all that is inside it."""
    _modes[module] = [part.training for part in module.modules()]
    module.train(mode)


def restore_mode(module: nn.Module, mode: bool) -> list[bool]:
    """Undo ``train``, if the module had ``mode`` before. Otherwise set the mode as ``train`` does. Returns the modes of
    the module and of all that is inside it.
    """
    before, parts = _modes.get(module, []), list(module.modules())
    if before[:1] != [mode] or len(before) != len(parts):
        train(module, mode)
        return [mode] * len(parts)
    for part, was in zip(parts, before, strict=True):
        part.training = was
    return before


def convert(
    module: nn.Module, device: torch.device, method: str, args: Any, kwargs: Any
) -> tuple[torch.device, Description]:
    """Call ``to`` or a similar method. Returns the device of the module (``device`` if it has no tensors)."""
    description = change(module, method, args, kwargs)
    return _device_of(module, device), description


def add_hook(module: nn.Module, register: str, hook: Callable[..., Any], options: Mapping[str, Any]) -> RRef[Any]:
    """Register a hook. Returns a reference to the handle that removes it."""
    return RRef(getattr(module, register)(hook, **options))


def save(module: nn.Module) -> tuple[State, State]:
    """The state, as tensors on the CPU, and torch's metadata about its versions."""
    reply_as_it_is()
    state = module.state_dict()
    return _plain(dict(state)), dict(getattr(state, "_metadata", {}))


Loaded = tuple[list[str], list[str], list[str], Description]
"""Missing keys, unexpected keys, errors, and the tensors of the module."""


def load(module: nn.Module, state: State, versions: State, assign: bool, prefix: str) -> Loaded:
    """Load a state. The names in it, and in what is returned, begin with ``prefix``."""
    given: Any = nn.Module().state_dict()  # of the type that can carry metadata
    given.update(state)
    given._metadata = versions
    whole = module
    for name in reversed(prefix.split(".")[:-1]):  # so that errors have full names
        inner, whole = whole, nn.Module()
        whole._modules[name] = inner
    try:
        keys = whole.load_state_dict(given, strict=False, assign=assign)
    except RuntimeError as error:
        first, *rest = str(error).split("\n\t")
        listed = rest and first.startswith("Error(s) in loading state_dict")  # else a hook has raised it
        return [], [], rest if listed else [str(error)], describe(module)
    return list(keys.missing_keys), list(keys.unexpected_keys), [], describe(module)


def _plain(state: State) -> State:
    made: State = tree_map_only(torch.Tensor, lambda tensor: on_cpu(tensor.detach()), state)
    return made
