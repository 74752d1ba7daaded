"""A module of another worker, used like one of this worker's.

The module itself lives on its owner and never travels; all that is kept here is a reference to it. What is done over
there is in ``owner``.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from backhaul._rpc.api import rpc_sync
from backhaul._rpc.arguments import keywords, positional
from backhaul._rpc.futures import Future
from backhaul._rref.handle import RRef
from backhaul._runtime.compile_marks import graph_break
from backhaul._wire.pickling import reducers
from backhaul.errors import SerializationError
from backhaul.nn import owner
from backhaul.nn.remote_device import parse_place

Self = TypeVar("Self", bound="RemoteModule")

_OWN = frozenset((*nn.Module().__dict__, "on", "device", "module_rref", "_methods"))


class RemoteModule(nn.Module):
    """A module on another worker: calling it runs it there, as part of the graph inside of a context.

    It is made where it lives: ``module_cls(*args, **kwargs)`` runs on that worker, and what goes wrong there is raised
    here. Inputs are brought to the module's device there; results arrive where tensors of that device do or, if they
    have no place here, on the CPU. It travels in calls as a reference does, and the module lives as long as one is left
    anywhere.

    Local hooks, ``train``, ``eval``, ``to`` and its kin, ``state_dict`` and ``load_state_dict`` work as on any module,
    also as part of a module that holds it. Its parameters are where it is: see ``remote_parameters``.

    Args:
        remote_device: ``"worker1"``, ``"worker1/cuda:0"``, ``"rank:1/cpu"``; without a device, the CPU.
        module_cls: A module class, or a function that returns a module.
        args: For ``module_cls``, a tuple or a list.
        kwargs: For ``module_cls``, a dict.
        _module_interface_cls: A class, such as a ``torch.jit.interface``, whose methods can be called on this too, each
            with an ``_async`` form. Nothing is scripted.

    Attributes:
        on: Name of the worker that has the module.
        device: The device there.
        module_rref: The reference to it.

    Raises:
        ValueError: ``remote_device`` does not name a place, or ``module_cls`` makes no module.
        Exception: What ``module_cls`` raised.

    Example:
        >>> import torch, backhaul as bh
        >>> with bh.cluster(2):
        ...     layer = bh.nn.RemoteModule("worker1", torch.nn.Linear, (4, 2))
        ...     with bh.context() as ctx:
        ...         loss = layer(torch.ones(3, 4)).sum()
        ...         ctx.backward(loss)
        ...     loss.shape, layer
        (torch.Size([]), RemoteModule(on='worker1', device='cpu'))
    """

    on: str
    device: str
    module_rref: RRef[nn.Module]

    @graph_break
    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: tuple[Any, ...] | list[Any] | None = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        _module_interface_cls: type | None = None,
    ) -> None:
        _check_maker(module_cls)
        place = parse_place(remote_device)
        rref, training = rpc_sync(
            place.worker, owner.build, (module_cls, positional(args), keywords(kwargs), place.device)
        )
        self._set(rref, place.device, _methods_of(_module_interface_cls), training)

    def _set(self, rref: RRef[nn.Module], device: torch.device, methods: tuple[str, ...], training: bool) -> None:
        super().__init__()
        self.training = training
        self.on = rref.owner_name()
        self.device = str(device)
        self.module_rref = rref
        self._methods = methods

    @classmethod
    def init_from_module_rref(
        cls: type[Self],
        remote_device: str,
        module_rref: RRef[nn.Module],
        _module_interface_cls: type | None = None,
    ) -> Self:
        """Another ``RemoteModule`` for a module that exists.

        Args:
            remote_device: Its device, written as for the constructor. Its worker is the reference's owner, whatever is
                said here.
            module_rref: A reference to the module.
            _module_interface_cls: As for the constructor.
        """
        if not isinstance(module_rref, RRef):
            raise TypeError(f"module_rref is a reference to a module, not a {type(module_rref).__name__}")
        made = cls.__new__(cls)
        made._set(module_rref, parse_place(remote_device).device, _methods_of(_module_interface_cls), True)
        return made

    # Calls.

    @graph_break
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module where it is, and wait for the result."""
        return self.forward_async(*args, **kwargs).wait()

    @graph_break
    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the module where it is; returns a future. Hooks of this side are not called."""
        return self._run("forward", *args, **kwargs)

    @graph_break
    def _run(self, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        arguments = torch.device(self.device), torch.is_grad_enabled(), method, *args
        return self.module_rref._call(self._runner(), arguments, kwargs, None, label=f"RemoteModule.{method}")

    def _runner(self) -> Callable[..., Any]:
        """What calls the module where it is."""
        client = self.module_rref._rrefs.client
        return owner.run_there if client.has_place_for(self.on, torch.device(self.device)) else owner.run

    @graph_break
    def _start(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function with the module, where it is."""
        return self.module_rref._call(function, args, kwargs, None)

    def __getattr__(self, name: str) -> Any:
        """Methods of the interface."""
        method = name.removesuffix("_async")
        if method not in self.__dict__.get("_methods", ()):
            return super().__getattr__(name)
        run = functools.partial(self._run, method)
        return run if method != name else lambda *args, **kwargs: run(*args, **kwargs).wait()

    def get_module_rref(self) -> RRef[nn.Module]:
        """The reference to the module."""
        return self.module_rref

    # Parameters.

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """References to the module's parameters, in its order.

        Args:
            recurse: Whether to include those of its submodules.
        """
        found: list[RRef[nn.Parameter]] = self._start(owner.parameters, recurse).wait()
        return found

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Not here: use ``remote_parameters``. (Without ``recurse`` there are none, for whoever walks over modules.)"""
        return self._none_here("parameters", recurse)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Not here: use ``remote_parameters``."""
        return self._none_here("named_parameters", recurse)

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """Not here."""
        return self._none_here("buffers", recurse)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Not here."""
        return self._none_here("named_buffers", recurse)

    def _none_here(self, method: str, recurse: bool) -> Iterator[Any]:
        if recurse:
            raise ValueError(
                f"{method}() is not supported by RemoteModule: its tensors are on worker '{self.on}'; use "
                "remote_parameters() for references to its parameters, or state_dict() for a copy of all"
            )
        return iter(())

    # What reaches the module.

    def train(self: Self, mode: bool = True) -> Self:
        """Set the mode of the module. ``training`` says what was last set or seen by this side."""
        if not isinstance(mode, bool):
            raise ValueError("training mode is expected to be boolean")
        self._change("train", mode)
        self.training = mode
        return self

    def requires_grad_(self: Self, requires_grad: bool = True) -> Self:
        """Set it for all parameters of the module."""
        return self._change("requires_grad_", requires_grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``.grad`` of the module's parameters. Gradients in contexts stay."""
        self._change("zero_grad", set_to_none)

    def apply(self: Self, fn: Callable[[nn.Module], None]) -> Self:
        """Call ``fn`` with the module and each of its submodules, where they are."""
        return self._change("apply", fn)

    def _change(self: Self, method: str, *args: Any) -> Self:
        self._start(owner.change, method, args, {}).wait()
        return self

    def to(self: Self, *args: Any, **kwargs: Any) -> Self:
        """Move the module to another device of its worker, or to another dtype, as ``torch.nn.Module.to`` does."""
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        return self._convert("to", *args, known=device, **kwargs)

    def cuda(self: Self, device: int | torch.device | None = None) -> Self:
        """Move the module to a GPU of its worker."""
        known = torch.device("cuda", device) if isinstance(device, int) else device or torch.device("cuda")
        return self._convert("cuda", device, known=known)

    def cpu(self: Self) -> Self:
        """Move the module to the CPU of its worker."""
        return self._convert("cpu", known=torch.device("cpu"))

    def to_empty(self: Self, *, device: int | str | torch.device | None, recurse: bool = True) -> Self:
        """Give the module memory on a device of its worker, with no values in it; what a module on ``meta`` needs."""
        return self._convert("to_empty", known=None if device is None else torch.device(device), device=device)

    def type(self: Self, dst_type: torch.dtype | str) -> Self:
        """Convert all parameters and buffers."""
        return self._convert("type", dst_type)

    def float(self: Self) -> Self:
        """Convert what is floating point."""
        return self._convert("float")

    def double(self: Self) -> Self:
        """Convert what is floating point."""
        return self._convert("double")

    def half(self: Self) -> Self:
        """Convert what is floating point."""
        return self._convert("half")

    def bfloat16(self: Self) -> Self:
        """Convert what is floating point."""
        return self._convert("bfloat16")

    def _convert(self: Self, method: str, *args: Any, known: torch.device | None = None, **kwargs: Any) -> Self:
        device = known or torch.device(self.device)
        self.device = str(self._start(owner.convert, device, method, args, kwargs).wait())
        return self

    def _apply(self: Self, fn: Any, recurse: bool = True) -> Self:
        """A module that holds this one is moved or converted: its devices are this worker's, so this one stays."""
        return self

    # Hooks on the other side.

    def register_remote_forward_hook(self, hook: Callable[..., Any], **options: Any) -> RemoteHandle:
        """Register a forward hook on the module itself: ``hook`` travels, and runs where the module is.

        Args:
            hook: As for ``torch.nn.Module.register_forward_hook``.
            options: Likewise.

        Returns:
            A handle whose ``remove()`` removes it.
        """
        return RemoteHandle(self._start(owner.add_hook, "register_forward_hook", hook, options).wait())

    def register_remote_forward_pre_hook(self, hook: Callable[..., Any], **options: Any) -> RemoteHandle:
        """The same, for ``torch.nn.Module.register_forward_pre_hook``."""
        return RemoteHandle(self._start(owner.add_hook, "register_forward_pre_hook", hook, options).wait())

    # State: torch's own state_dict and load_state_dict call these, on every module that a model has.

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if keep_vars:
            raise ValueError(
                "the state of a RemoteModule is a copy, so state_dict(keep_vars=True) is not possible; "
                "see remote_parameters()"
            )
        state, versions = self._start(owner.save).wait()
        destination.update({prefix + name: value for name, value in state.items()})
        if hasattr(destination, "_metadata"):
            destination._metadata.update({(prefix + name).rstrip("."): value for name, value in versions.items()})

    def _load_from_state_dict(  # noqa: PLR0917 (torch's signature)
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        state = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        state = tree_map_only(torch.Tensor, lambda tensor: owner.on_cpu(tensor.detach()), state)
        versions = {
            f"{name}."[len(prefix) : -1]: value
            for name, value in getattr(state_dict, "_metadata", {}).items()
            if f"{name}.".startswith(prefix)
        }
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        missing, unexpected, errors = self._start(owner.load, state, versions, assign).wait()
        missing_keys.extend(prefix + name for name in missing)
        if strict:
            unexpected_keys.extend(prefix + name for name in unexpected)
        error_msgs.extend(errors)

    # What a module that lives elsewhere cannot have.

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """Not possible: the module's tensors are elsewhere."""
        self._refuse("register_buffer")

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Not possible."""
        self._refuse("register_parameter")

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Not possible; hold both in a module of your own."""
        self._refuse("add_module")

    def share_memory(self: Self) -> Self:
        """Not possible."""
        self._refuse("share_memory")

    def _refuse(self, method: str) -> NoReturn:
        raise ValueError(f"{method}() is not supported by RemoteModule: the module is on worker '{self.on}'")

    def extra_repr(self) -> str:
        return f"on={self.on!r}, device={self.device!r}"

    # Travelling.

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        reducers[cls] = _reduce

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise SerializationError(
            "a RemoteModule travels in calls only; it cannot be pickled, copied or saved otherwise: save its "
            "state_dict() instead"
        )


class RemoteHandle:
    """Removes a hook from a module on another worker."""

    __slots__ = ("_handle",)

    def __init__(self, handle: RRef[Any]) -> None:
        self._handle = handle

    def remove(self) -> None:
        """Remove it. Once this returns, the hook is not called any more."""
        self._handle.rpc_sync().remove()


def _check_maker(make: Any) -> None:
    if isinstance(make, type):
        if not issubclass(make, nn.Module):
            raise ValueError(f"module_cls is to make a torch.nn.Module, but {make.__qualname__} is no class of modules")
    elif isinstance(make, nn.Module) or not callable(make):
        raise ValueError(
            f"module_cls is a module class or a function that returns a module, which is called on the other worker, "
            f"not a {type(make).__name__}"
        )


def _methods_of(interface: type | None) -> tuple[str, ...]:
    """The methods of an interface, without those that there are anyway."""
    if interface is None:
        return ()
    names = (name for name, _ in inspect.getmembers(interface, inspect.isfunction) if not name.startswith("_"))
    return tuple(name for name in names if name not in ("forward", "forward_async"))


def _reduce(module: RemoteModule, parcels: list[Any]) -> Any:
    added = [name for name in (*module.__dict__, *module._modules) if name not in _OWN]
    if added:
        warnings.warn(
            f"attributes added to a RemoteModule do not travel with it: {', '.join(added)}", UserWarning, stacklevel=2
        )
    device = torch.device(module.device)
    return _arrive, (type(module), module.module_rref, device, module._methods, module.training)


def _arrive(
    kind: type[RemoteModule], rref: RRef[nn.Module], device: torch.device, methods: tuple[str, ...], training: bool
) -> RemoteModule:
    made = kind.__new__(kind)
    made._set(rref, device, methods, training)
    return made


reducers[RemoteModule] = _reduce
