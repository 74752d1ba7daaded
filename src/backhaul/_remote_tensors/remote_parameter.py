"""A parameter of a module on another worker. It is a leaf here; its gradient is on the owner."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from backhaul._autograd.torch_engine.hooks import count_own_handle
from backhaul._remote_tensors import on_owner
from backhaul._remote_tensors.addresses import Address, Message
from backhaul._remote_tensors.driven_modules import gradients_at, send_changes
from backhaul._remote_tensors.module_gradients import ModuleGradients
from backhaul._remote_tensors.on_owner import TensorForm
from backhaul._remote_tensors.remote_tensor import RemoteTensor
from backhaul._rref.handle import RRef
from backhaul._runtime.compile_marks import graph_break
from backhaul._wire.tensors.subclasses import stand_ins

_original: Any = torch._C.TensorBase


_ZERO_GRAD = {inspect.unwrap(kind.zero_grad).__code__ for kind in (torch.optim.Optimizer, nn.Module)}
"""torch's code that clears all gradients."""

_any_made = False


def any_made() -> bool:
    """Whether this process has made a remote parameter."""
    return _any_made


class RemoteParameter(RemoteTensor, nn.Parameter):
    """Stands for a parameter of another worker: for optimizers, schedulers, clipping, counting, saving.

    ``.grad`` is None if the parameter there has no gradient, else a remote tensor that stands for it. An operation that
    records a graph uses a copy that is part of the graph: its gradient reaches the parameter.
    """

    _gradients: ModuleGradients
    _perhaps: RemoteTensor | None
    _passes_on: bool

    @staticmethod
    def __new__(cls, gradients: ModuleGradients, index: int, form: TensorForm, requires_grad: bool) -> Self:
        made: Any = RemoteTensor.__new__(cls, Address(gradients.container, "parameter", index), form, requires_grad)
        made._gradients = gradients
        made._perhaps = None
        made._passes_on = False
        if requires_grad:
            made._pass_on_gradients()
        global _any_made
        _any_made = True
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            raise NotImplementedError(
                "torch.autograd.grad() cannot return the gradient of a parameter of another worker; call "
                "loss.backward() and read .grad of the parameter"
            )
        if torch.is_grad_enabled() and not _keeps_proxies(func):
            args, kwargs = _with_graph(args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    # Its gradient.

    @property
    def grad(self) -> torch.Tensor | None:
        if hidden.covers_here():
            return None
        index = self._address.key
        if sys._getframe(1).f_code in _ZERO_GRAD:
            return self._perhaps_gradient()
        form = self._gradients.form_of(index)
        if form is None:
            return None
        if form.has_graph and torch.is_grad_enabled():
            return self._gradient_with_graph()
        live = self._gradients.live
        known: Any = live.gradient(index)
        if known is None or (known.dtype, known.layout, tuple(known.shape)) != (form.dtype, form.layout, form.shape):
            known = self._gradient_of(form)
            live.set_gradient(index, known)
        return known  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None:
            self._gradients.clear(self._address.key)
        elif value is not self._gradients.live.gradient(self._address.key):
            if value.shape != self.shape or value.dtype != self.dtype:
                raise RuntimeError(
                    f"the gradient has shape {tuple(value.shape)} and dtype {value.dtype}, but the parameter on worker "
                    f"'{self.owner_name()}' has shape {tuple(self.shape)} and dtype {self.dtype}"
                )
            self._gradients.assign(self._address.key, value)

    @graph_break
    def _gradient_with_graph(self) -> torch.Tensor:
        """A copy that is part of the graph, after a pass with ``create_graph=True``."""
        send_changes(self._gradients.worker)
        container: RRef[Any] = self._address.container
        function = on_owner.differentiable_gradient
        key = self._address.key
        copy: torch.Tensor = container._call_and_wait(function, (key,), None, None, label="fetch a gradient")
        return copy

    def _gradient_of(self, form: TensorForm) -> RemoteTensor:
        made = RemoteTensor(Address(self._address.container, "gradient", self._address.key), form)
        made._gradients = self._gradients
        return made

    def _perhaps_gradient(self) -> RemoteTensor | None:
        """The gradient, for code that only clears it: it need not ask the owner whether there is one."""
        if self._gradients.is_cleared(self._address.key):
            return None
        if self._perhaps is None:
            self._perhaps = self._gradient_of(TensorForm((), (), self.dtype, torch.strided))
        return self._perhaps

    @property
    def requires_grad(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            found: bool = _original.requires_grad.__get__(self)
            return found

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        if wanted != self.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                _original.requires_grad.__set__(self, wanted)
            if wanted:
                self._pass_on_gradients()
            self._gradients.require_grad(self._address.key, wanted)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        self.requires_grad = requires_grad
        return self

    def register_hook(self, hook: Callable[..., Any]) -> NoReturn:
        self._refuse_hook("register_hook")

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> NoReturn:
        self._refuse_hook("register_post_accumulate_grad_hook")

    def _refuse_hook(self, method: str) -> NoReturn:
        raise RuntimeError(
            f"{method}() is not possible here: the gradient is computed on worker '{self.owner_name()}'; register the "
            "hook there, with apply() of the RemoteModule"
        )

    # How it is copied.

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.to_here(), self.requires_grad).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            container = self._address.container
            message = Message(self._address.owner)
            send_changes(self._gradients.worker)
            made = message.place(self._address), self.requires_grad
            copied = message.send_and_wait(container, on_owner.copy_parameter, *made, label="copy a parameter")
            rref, description = copied
            ((form, requires_grad),) = description.forms
            memo[id(self)] = RemoteParameter(gradients_at(rref), 0, form, requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def update_form(self, form: TensorForm, requires_grad: bool) -> None:
        """The parameter there has changed its shape, dtype or whether it requires grad."""
        self._change_form(form)
        with torch._C.DisableTorchFunctionSubclass():
            _original.requires_grad.__set__(self, requires_grad)
        if requires_grad:
            self._pass_on_gradients()

    def _pass_on_gradients(self) -> None:
        """Send the owner what arrives here. torch makes this parameter a leaf of the local graph if code in C++ uses
        it, as ``torch.autograd.Function.apply`` and operations that write to other tensors do.
        """
        if not self._passes_on:
            self._passes_on = True
            count_own_handle()
            with torch._C.DisableTorchFunctionSubclass():
                nn.Parameter.register_post_accumulate_grad_hook(self, _pass_on)


def _pass_on(parameter: RemoteParameter) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        gradient = _original.grad.__get__(parameter)
        _original.grad.__set__(parameter, None)
    if gradient.grad_fn is not None:
        raise RuntimeError(
            f"the gradient of a parameter of worker '{parameter.owner_name()}' has a graph here (create_graph=True), "
            "which cannot be kept: use a copy, for example parameter * 1, in this operation"
        )
    parameter._gradients.accumulate(parameter._address, gradient)


# Operations in a graph.


_KEEPING = frozenset(
    """
    detach size dim ndimension numel nelement stride storage_offset element_size is_floating_point is_complex
    is_signed is_contiguous is_same_size is_coalesced is_pinned is_shared is_inference is_set_to get_device has_names
    retain_grad untyped_storage storage type to cpu empty_like zeros_like ones_like full_like rand_like randn_like
    randint_like new_empty new_zeros new_ones new_full new_tensor equal allclose isfinite isnan isinf sign
    __len__ __hash__ __repr__ __format__ __deepcopy__ __reduce_ex__ __dir__ _is_view is_neg is_conj is_distributed
    is_nonzero item tolist numpy dense_dim sparse_dim result_type can_cast __bool__ backward
    """.split()  # noqa: SIM905
)
"""Names of functions that need no graph."""


def _keeps_proxies(func: Any) -> bool:
    """Whether a function takes proxies as they are: it reads what is known here, has no gradient, or changes them."""
    name = func.__name__
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(func.__self__, "__name__", "") not in ("T", "mT", "H", "mH", "real", "imag")
    return name in _KEEPING or (name.endswith("_") and not name.endswith("__"))


def _with_graph(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments with copies that are part of the graph in place of parameters that require grad."""
    leaves, form = tree_flatten((args, kwargs))
    indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, RemoteParameter) and leaf.requires_grad]
    for index, copy in zip(indices, differentiable([leaves[index] for index in indices]), strict=True):
        leaves[index] = copy
    made: tuple[Any, Any] = tree_unflatten(leaves, form)
    return made


@graph_break
def differentiable(parameters: Sequence[RemoteParameter]) -> list[torch.Tensor]:
    """Copies of parameters that are part of the graph, with one call for each module."""
    if not parameters:
        return []
    send_changes(parameters[0]._gradients.worker)
    by_module: dict[ModuleGradients, list[int]] = {}
    call: Any
    for index, parameter in enumerate(parameters):
        by_module.setdefault(parameter._gradients, []).append(index)
    calls = []
    for gradients, indices in by_module.items():
        gradients.used = True
        gradients.forget()
        container: RRef[Any] = gradients.container
        keys = [parameters[index]._address.key for index in indices]
        call = on_owner.differentiable, (keys,), None, None
        if len(by_module) == 1:
            return container._call_and_wait(*call, label="fetch parameters")  # type: ignore[no-any-return]
        calls.append((indices, container._call(*call, label="fetch parameters")))
    made: dict[int, torch.Tensor] = {}
    for indices, call in calls:
        made.update(zip(indices, call.wait(), strict=True))
    return [made[index] for index in range(len(parameters))]


def _sent(parameter: RemoteParameter) -> torch.Tensor:
    """What travels in a call in place of a parameter: a copy, part of the graph if the call is."""
    if torch.is_grad_enabled() and parameter.requires_grad:
        return differentiable([parameter])[0]
    return nn.Parameter(parameter.to_here(), parameter.requires_grad)


stand_ins[RemoteParameter] = _sent
stand_ins[RemoteTensor] = RemoteTensor.to_here


# Steps of torch's optimizers.


class HiddenGradients(threading.local):
    """Says that a frame of this thread must see no gradients of remote parameters: torch's own optimizer step."""

    def __init__(self) -> None:
        self._steps: list[tuple[FrameType, object] | None] = []
        """The frame of each step and its optimizer, the innermost last; None: a closure that sees gradients."""

    def begin(self, frame: FrameType, optimizer: object) -> None:
        """Hide gradients from what ``frame`` calls. This ends with ``end``, or with the frame."""
        self._steps.append((frame, optimizer))

    def end(self, optimizer: object) -> bool:
        """Undo the last ``begin`` if it was for ``optimizer``. Returns whether it was."""
        found = self.is_stepped(optimizer)
        if found:
            self._steps.pop()
        return found

    def show(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """``function``, which sees gradients."""

        def shown() -> Any:
            depth = len(self._steps)
            self._steps.append(None)
            try:
                return function()
            finally:
                del self._steps[depth:]  # steps inside the function may have raised errors

        return shown

    def is_stepped(self, optimizer: object) -> bool:
        """Whether the calling code is inside a step of ``optimizer`` that must see no gradients."""
        step = self._innermost()
        return step is not None and step[1] is optimizer

    def covers_here(self) -> bool:
        """Whether the calling code must see no gradients."""
        return self._innermost() is not None

    def _innermost(self) -> tuple[FrameType, object] | None:
        """The innermost step that runs. Forgets steps that have raised errors."""
        while self._steps:
            step = self._steps[-1]
            if step is None:
                return None
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame is not step[0]:
                frame = frame.f_back
            if frame is not None:
                return step
            self._steps.pop()
        return None


hidden = HiddenGradients()
