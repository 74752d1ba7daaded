"""A module of another worker, used like a local one.

The module itself lives on its owner and never travels. This side keeps a reference to it.

- ``module_on_owner``: what this side keeps.
- ``remote_changes``, ``remote_state``: methods that run on the owner.
- ``listed_tensors``: the parameters and buffers.
- ``no_local_tensors``: methods that are not possible.
- ``owner``: what the owner runs.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVarTuple, overload

import torch
from torch import nn
from typing_extensions import ParamSpec, TypeVar

from backhaul._remote_tensors.addresses import own_call
from backhaul._remote_tensors.changes_on_owner import Changes
from backhaul._rpc.api import rpc_sync
from backhaul._rpc.arguments import keywords, positional
from backhaul._rpc.call_types import Named, Positional
from backhaul._rpc.futures import Future
from backhaul._rref.handle import RRef
from backhaul._runtime.compile_marks import graph_break
from backhaul._wire.pickling import reducers
from backhaul.errors import SerializationError
from backhaul.nn import owner
from backhaul.nn.autocast import casts_here
from backhaul.nn.no_local_tensors import NoLocalTensors
from backhaul.nn.remote_changes import RemoteChanges
from backhaul.nn.remote_device import parse_place
from backhaul.nn.remote_state import RemoteState

Ts = TypeVarTuple("Ts")
P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
Inputs = ParamSpec("Inputs", default=...)
Output = TypeVar("Output", default=Any)

_OWN = ("on", "device", "module_rref", "_methods", "_tensors", "_placed", "_norms")

_TRAVELING = frozenset((*nn.Module().__dict__, *_OWN, "__orig_class__"))
"""The attributes that travel with a module, and one that ``typing`` sets and that need not."""

_MADE_ANEW = frozenset((*_OWN, "_parameters", "_buffers"))
"""The attributes that a copy of a module gets anew."""


class RunsForward(Protocol[P, R_co]):
    """A module, as far as a type checker needs to know it."""

    def forward(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class RemoteModule(RemoteChanges, RemoteState, NoLocalTensors, Generic[Inputs, Output]):
    """A module on another worker. Calling it runs it there, as part of the graph.

    The constructor runs ``module_cls(*args, **kwargs)`` on that worker, and raises what goes wrong there. Inputs are
    moved to the module's device there. Results arrive on the device that tensors of that device are mapped to or, if
    it is mapped to none, on the CPU. A ``RemoteModule`` travels in calls as a reference does. The module lives as long
    as a reference to it exists on any worker.

    Local hooks, ``train``, ``eval``, ``to`` and the like, ``state_dict`` and ``load_state_dict`` work as on any module,
    also when a local module contains this one. So do ``parameters`` and ``buffers``: they list what stands for the
    tensors on the owner, and any ``torch.optim`` optimizer takes it.

    Args:
        remote_device: ``"worker1"``, ``"worker1/cuda:0"``, ``"rank:1/cpu"``; without a device, the CPU.
        module_cls: A module class, or a function that returns a module.
        args: Positional arguments for ``module_cls``, a tuple or a list.
        kwargs: Keyword arguments for ``module_cls``, a dict.
        _module_interface_cls: A class, such as a ``torch.jit.interface``. Its methods can be called on this object too,
            each also with an ``_async`` form. Nothing is scripted.

    Attributes:
        on: Name of the worker that has the module.
        device: The module's device there.
        module_rref: A reference to the module.

    Raises:
        ValueError: ``remote_device`` names no device of a worker, or ``module_cls`` makes no module.
        Exception: What ``module_cls`` raised.

    Example:
        >>> import torch, backhaul as bh
        >>> with bh.cluster(2):
        ...     layer = bh.nn.RemoteModule("worker1", torch.nn.Linear, (4, 2))
        ...     optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        ...     loss = layer(torch.ones(3, 4)).sum()
        ...     loss.backward()
        ...     optimizer.step()
        ...     layer.bias.grad.tolist(), layer
        ([3.0, 3.0], RemoteModule(on='worker1', device='cpu'))
    """

    __call__: Callable[Inputs, Output]

    _carries_autocast: ClassVar[bool] = True
    """Whether ``torch.autocast`` of the caller holds for the module there."""

    # fmt: off
    @overload
    def __init__(self, remote_device: str, module_cls: Callable[..., RunsForward[Inputs, Output]],
                 args: list[Any], kwargs: Named | None = ..., *, _module_interface_cls: type | None = ...) -> None: ...
    @overload
    def __init__(self, remote_device: str, module_cls: Callable[[*Ts], RunsForward[Inputs, Output]],
                 args: tuple[*Ts], kwargs: None = ..., *, _module_interface_cls: type | None = ...) -> None: ...
    @overload
    def __init__(self, remote_device: str, module_cls: Callable[[], RunsForward[Inputs, Output]],
                 args: None = ..., kwargs: None = ..., *, _module_interface_cls: type | None = ...) -> None: ...
    @overload
    def __init__(self, remote_device: str, module_cls: Callable[..., RunsForward[Inputs, Output]],
                 args: Positional, kwargs: Named, *, _module_interface_cls: type | None = ...) -> None: ...
    @overload
    def __init__(self, remote_device: str, module_cls: Callable[..., RunsForward[Inputs, Output]], *,
                 kwargs: Named, _module_interface_cls: type | None = ...) -> None: ...
    # fmt: on
    @graph_break
    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., Any],
        args: Positional = (),
        kwargs: Named | None = None,
        *,
        _module_interface_cls: type | None = None,
    ) -> None:
        _check_maker(module_cls)
        place = parse_place(remote_device)
        rref, training, description = rpc_sync(
            place.worker, owner.build, (module_cls, positional(args), keywords(kwargs), place.device)
        )
        self._set(rref, place.device, _methods_of(_module_interface_cls), training)
        self._describe_new(description)

    def _set(self, rref: RRef[nn.Module], device: torch.device, methods: tuple[str, ...], training: bool) -> None:
        super().__init__()
        self.training = training
        self.on = rref.owner_name()
        self.device = str(device)
        self.module_rref = rref
        self._methods = methods

    @classmethod
    def init_from_module_rref(
        cls,
        remote_device: str,
        module_rref: RRef[nn.Module],
        _module_interface_cls: type | None = None,
    ) -> Self:
        """Another ``RemoteModule`` for a module that exists.

        Args:
            remote_device: The module's device, written as for the constructor. The worker in it is ignored: it is the
                owner of the reference.
            module_rref: A reference to the module.
            _module_interface_cls: As for the constructor.
        """
        if not isinstance(module_rref, RRef):
            raise TypeError(f"module_rref must be an RRef to a module, not a {type(module_rref).__name__}")
        made = cls.__new__(cls)
        made._set(module_rref, parse_place(remote_device).device, _methods_of(_module_interface_cls), True)
        return made

    # Calls.

    @graph_break
    def forward(self, *args: Inputs.args, **kwargs: Inputs.kwargs) -> Output:
        """Run the module on its owner, and wait for the result."""
        return self._run_and_wait("forward", *args, **kwargs)  # type: ignore[no-any-return]

    @graph_break
    def forward_async(self, *args: Inputs.args, **kwargs: Inputs.kwargs) -> Future[Output]:
        """Run the module on its owner; returns a future. Local hooks are not called."""
        return self._run("forward", *args, **kwargs)

    @graph_break
    def _run(self, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        function, arguments, changes = self._plan_run(method, args)
        with own_call():
            made = self.module_rref._call(function, arguments, kwargs, None, label=f"RemoteModule.{method}")
        if changes and (gradients := self._gradients) is not None:
            gradients.carried_by(made, changes)
        return made

    @graph_break
    def _run_and_wait(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        function, arguments, changes = self._plan_run(method, args)
        with own_call():
            made = self.module_rref._call_and_wait(function, arguments, kwargs, None, label=f"RemoteModule.{method}")
        if changes and (gradients := self._gradients) is not None:
            gradients.were_made(changes)
        return made

    def _plan_run(self, method: str, args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...], Sequence[Changes]]:
        """The name of the function of ``owner`` to call, its arguments after the module, and the changes in them."""
        planned = self._plan_without_casts(method, args)
        if self._carries_autocast and (casts := casts_here()):
            function, arguments, changes = planned
            return owner.RUN_CAST, (casts, function, *arguments), changes
        return planned

    def _plan_without_casts(self, method: str, args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...], Sequence[Changes]]:
        arguments = self.device, torch.is_grad_enabled(), method, *args
        tensors = self._tensors
        if tensors is None:
            return self._runner(), arguments, ()
        gradients = tensors.gradients
        if given := self._given():
            self._send_changes()
            if torch.is_grad_enabled():
                gradients.take_for_forward()
            return owner.RUN_WITH, (given, self._runner(), *arguments), ()
        changes = gradients.take_for_forward()
        if not changes:
            return self._runner(), arguments, ()
        carried = [(each.number, each.cleared, each.zeroed, dict(each.requires_grad)) for each in changes]
        return owner.RUN_CHANGED, (gradients.worker.incarnation, carried, self._runner(), *arguments), changes

    def _runner(self) -> str:
        """The function of ``owner`` that calls the module."""
        if self.device == "cpu":
            return owner.RUN
        client = self.module_rref._rrefs.client
        return owner.RUN_THERE if client.has_place_for(self.on, torch.device(self.device)) else owner.RUN

    def __getattr__(self, name: str) -> Any:
        """Find methods of the interface."""
        method = name.removesuffix("_async")
        if method not in self.__dict__.get("_methods", ()):
            found = self._find_tensor(name)
            return super().__getattr__(name) if found is None else found
        return functools.partial(self._run if method != name else self._run_and_wait, method)

    # References to what is on the owner.

    def get_module_rref(self) -> RRef[nn.Module]:
        """The reference to the module."""
        self._send_changes()
        return self.module_rref

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """References to the module's parameters, in its order.

        Args:
            recurse: Whether to include the parameters of submodules.
        """
        found: list[RRef[nn.Parameter]] = self._ask_owner(owner.parameters, recurse)
        return found

    def register_remote_forward_hook(self, hook: Callable[..., Any], **options: Any) -> RemoteHandle:
        """Register a forward hook on the module itself. ``hook`` is sent to the owner and runs there.

        Args:
            hook: As for ``torch.nn.Module.register_forward_hook``.
            options: As for ``torch.nn.Module.register_forward_hook``.

        Returns:
            A handle. Its ``remove()`` removes the hook.
        """
        return RemoteHandle(self._ask_owner(owner.add_hook, "register_forward_hook", hook, options))

    def register_remote_forward_pre_hook(self, hook: Callable[..., Any], **options: Any) -> RemoteHandle:
        """As ``register_remote_forward_hook``, for ``torch.nn.Module.register_forward_pre_hook``."""
        return RemoteHandle(self._ask_owner(owner.add_hook, "register_forward_pre_hook", hook, options))

    # How it is shown, and how it travels.

    def extra_repr(self) -> str:
        return f"on={self.on!r}, device={self.device!r}"

    @graph_break
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of the module on its owner. Hooks and attributes of this side are copied here."""
        tensors = self._tensors
        known = {} if tensors is None else {**tensors.parameters, **tensors.buffers}
        if copied := [name for name, tensor in known.items() if id(tensor) in memo]:
            raise RuntimeError(
                f"'{copied[0]}' of the module on worker '{self.on}' was copied before the module, and would be another "
                "parameter than that of the copy; copy the module first: copy.deepcopy((model, optimizer))"
            )
        rref, training, description = self._ask_owner(owner.copy_of)
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made._set(rref, torch.device(self.device), self._methods, training)
        own = {name: value for name, value in self.__dict__.items() if name not in _MADE_ANEW}
        made.__dict__.update(copy.deepcopy(own, memo))
        made._describe_new(description)
        if made._tensors is not None:
            copies = {**made._tensors.parameters, **made._tensors.buffers}
            memo.update((id(tensor), copies[name]) for name, tensor in known.items())
        return made

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        reducers[cls] = _reduce

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise SerializationError(
            "a RemoteModule travels in calls only; it cannot be pickled or saved: save its state_dict() instead"
        )


class RemoteHandle:
    """Removes a hook from a module on another worker."""

    __slots__ = ("_handle",)

    def __init__(self, handle: RRef[Any]) -> None:
        self._handle = handle

    def remove(self) -> None:
        """Remove the hook. Once this returns, the hook is not called any more."""
        self._handle.rpc_sync().remove()


def _check_maker(make: Any) -> None:
    if isinstance(make, type):
        if not issubclass(make, nn.Module):
            raise ValueError(f"module_cls must be a subclass of torch.nn.Module; {make.__qualname__} is not")
    elif isinstance(make, nn.Module) or not callable(make):
        raise ValueError(
            f"module_cls must be a module class, or a function that returns a module, not a {type(make).__name__}; it "
            "is called on the other worker"
        )


def _methods_of(interface: type | None) -> tuple[str, ...]:
    """The methods of an interface, without those that every ``RemoteModule`` has."""
    if interface is None:
        return ()
    names = (name for name, _ in inspect.getmembers(interface, inspect.isfunction) if not name.startswith("_"))
    return tuple(name for name in names if name not in ("forward", "forward_async"))


def _reduce(module: RemoteModule, parcels: list[Any]) -> Any:
    added = [name for name in (*module.__dict__, *module._modules) if name not in _TRAVELING]
    if added:
        warnings.warn(
            f"attributes added to a RemoteModule do not travel with it: {', '.join(added)}", UserWarning, stacklevel=2
        )
    device = torch.device(module.device)
    module._send_changes()
    return _arrive, (type(module), module.module_rref, device, module._methods, module.training)


def _arrive(
    kind: type[RemoteModule], rref: RRef[nn.Module], device: torch.device, methods: tuple[str, ...], training: bool
) -> RemoteModule:
    made = kind.__new__(kind)
    made._set(rref, device, methods, training)
    return made


reducers[RemoteModule] = _reduce
