"""A tensor of another worker, as a PyTorch tensor without data here. ``operations`` says what operations do with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from backhaul._remote_tensors import on_owner
from backhaul._remote_tensors.addresses import Address, Message
from backhaul._remote_tensors.driven_modules import send_changes
from backhaul._remote_tensors.on_owner import TensorForm
from backhaul._runtime.compile_marks import graph_break

run_operation: Callable[[Any, Sequence[Any], dict[str, Any]], Any] = lambda func, args, kwargs: NotImplemented  # noqa: E731
"""Runs an operation with remote tensors among its arguments. ``operations`` sets this."""


_CPU = torch.device("cpu")
_set_data: Callable[[torch.Tensor, torch.Tensor], None] = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]


class RemoteTensor(torch.Tensor):
    """A tensor that stays on the worker that owns it. Operations on it run there.

    It says that it is on the CPU: then optimizers, schedulers and frameworks neither move nor refuse it. Results with
    dimensions stay on the owner as remote tensors. Results without dimensions, and numbers, arrive here. An operation
    with a tensor of this worker, or with tensors of two owners, gets copies and runs here.
    """

    _address: Address
    _layout: torch.layout
    _is_alias = False

    @staticmethod
    def __new__(cls, address: Address, form: TensorForm, requires_grad: bool = False) -> Self:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            form.shape,
            strides=form.stride,
            dtype=form.dtype,
            device=_CPU,
            layout=torch.strided,
            requires_grad=requires_grad,
        )
        made._address = address
        made._layout = form.layout
        return made  # type: ignore[no-any-return]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return run_operation(func, args, kwargs or {})

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    # Its data.

    @graph_break
    def to_here(self) -> torch.Tensor:
        """A copy of the tensor on this worker, outside any graph."""
        return fetch([self])[0]

    def owner_name(self) -> str:
        """The name of the worker that has the tensor."""
        return self._address.container.owner_name()

    def numpy(self, *, force: bool = False) -> Any:
        return self._copy_as_leaf().numpy(force=force)

    def tolist(self) -> Any:
        return self.to_here().tolist()

    def __array__(self, dtype: Any = None) -> Any:
        return self._copy_as_leaf().__array__(dtype)

    def data_ptr(self) -> int:
        raise RuntimeError(
            f"the tensor is on worker '{self.owner_name()}' and has no memory here; use to_here() for a copy"
        )

    def _copy_as_leaf(self) -> torch.Tensor:
        return self.to_here().requires_grad_(self.requires_grad)

    @property
    def layout(self) -> torch.layout:  # type: ignore[override]
        found: torch.layout = self._layout
        return found

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        return self.layout is torch.sparse_coo

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Take the memory of ``value``, as torch does: earlier aliases keep theirs. Between workers, take a copy."""
        other: Address | None = getattr(value, "_address", None)
        if other is not None and (other is self._address or other.is_same(self._address)):
            return
        kind = self._address.kind
        if kind == "state" and not self._is_alias:
            with torch.no_grad():
                self.detach().copy_(value)
        elif kind == "value" or self._is_alias:
            self._take_over(value)
        elif kind == "gradient":
            self._gradients.assign_data(self, value)
        else:
            self._change_form(self._gradients.rebind(self._address, value))

    def _take_over(self, value: torch.Tensor) -> None:
        if isinstance(value, RemoteTensor) and value._address.owner == self._address.owner:
            found: Any = value.detach()
            self._address = found._address
            form = TensorForm.of(found)
            if (gradients := getattr(found, "_gradients", None)) is not None:
                self._gradients = gradients
                gradients.live.add(self)
        else:
            send_changes_for(self)
            sent = value.to_here() if isinstance(value, RemoteTensor) else value.detach()
            message = Message(self._address.owner)
            place = message.place(self._address)
            container = self._address.container
            stored, form = message.send_and_wait(container, on_owner.store, sent, place, label="set .data")
            self._address = Address(stored)
        self._change_form(form)

    def _change_form(self, form: TensorForm) -> None:
        if (tuple(self.shape), self.dtype) != (form.shape, form.dtype):
            with torch._C.DisableTorchFunctionSubclass():
                _set_data(self, RemoteTensor(self._address, form))
        self._layout = form.layout

    # How it is shown and copied.

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        try:
            shown = repr(self.to_here())
        except Exception as error:
            shown = f"{tuple(self.shape)}, dtype={self.dtype}, not reachable: {type(error).__name__}"
        return f"{type(self).__name__}({shown}, on={self.owner_name()!r})"

    def __format__(self, spec: str) -> str:
        return format(self.to_here(), spec) if not self.dim() else repr(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.to_here().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            with torch.no_grad():
                memo[id(self)] = self.detach().clone()
        return memo[id(self)]  # type: ignore[no-any-return]


@graph_break
def fetch(tensors: Sequence[RemoteTensor]) -> list[torch.Tensor]:
    """Copies of remote tensors on this worker, with one message to each owner."""
    if not tensors:
        return []
    send_changes_for(tensors[0])
    by_owner: dict[int, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_owner.setdefault(tensor._address.owner, []).append(index)
    calls = []
    for owner, indices in by_owner.items():
        message = Message(owner)
        places = [message.place(tensors[index]._address) for index in indices]
        via = tensors[indices[0]]._address.container
        if len(by_owner) == 1:
            return message.send_and_wait(via, on_owner.fetch, places, label="fetch tensors")  # type: ignore[no-any-return]
        calls.append((indices, message.send(via, on_owner.fetch, places, label="fetch tensors")))
    made: dict[int, torch.Tensor] = {}
    for indices, call in calls:
        made.update(zip(indices, call.wait(), strict=True))
    return [made[index] for index in range(len(tensors))]


def send_changes_for(tensor: RemoteTensor) -> None:
    """Send changes that are still to be made, before an operation on a tensor."""
    send_changes(tensor._address.container._rrefs.worker)
